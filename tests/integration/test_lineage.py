"""What lineage tells of a run, against the ledger of what its ranks were given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import msd_daemon
from msd_client.contract.errors import CorruptRecordError, NotFoundError
from msd_client.msdctl import main
from tests.support.ledger import Corpus, Given, note
from tests.support.ledger import Ledger as LedgerOf
from tests.support.node import Node, run_ranks, running_node
from tests.support.told import Documents, given_pieces, run_msdctl, told_pieces

pytestmark = pytest.mark.processes

KINDS = {"gz": "gz", "plain": "", "xz": "xz", "zst": "zst"}
FIRST_STEPS = 9
REWOUND_TO = 6
LAST_STEP = 16


@dataclass
class Run:
    """Two generations of one job: the second begins at step 6, which the first went beyond."""

    corpus: Corpus
    documents: Documents
    state_dir: Path
    first: list[Given]
    second: list[Given]

    @property
    def given(self) -> list[Given]:
        """What was given of each step by the newest generation that holds it."""
        return [one for one in self.first if one.step < REWOUND_TO] + self.second


def read_all(
    node: Node, corpus: Corpus, job: Any, mesh: dict[str, int], steps: int, **options: Any
) -> list[LedgerOf]:
    """Let every rank of any mesh read; return the ledger of each."""
    parts = [LedgerOf(corpus) for _ in range(int(np.prod(list(mesh.values()))))]
    run_ranks(
        node, job, mesh, steps, read_step=lambda data, step: note(parts[data.rank], data, step),
        **options,
    )  # fmt: skip
    return parts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(6)
    lengths = {name: [rng.integers(0, 90, 40).tolist() for _ in range(3)] for name in KINDS}
    corpus = Corpus(lengths)
    job = {
        "name": "told",
        "seed": 4,
        "tokenizer": {"file": str(folder / "data" / "tokenizer.json")},
        "sources": corpus.write_texts(folder / "data", KINDS),
        "batch": {"rows": 8, "row_tokens": 64, "microbatch_rows": 2},
    }
    with running_node(folder / "n") as node:
        first = read_all(node, corpus, job, {"dp": 2, "tp": 2}, FIRST_STEPS)
        state = first[0].state(REWOUND_TO)
        second = read_all(node, corpus, job, {"dp": 4}, LAST_STEP - REWOUND_TO, state=state)
        yield Run(
            corpus,
            Documents(corpus.oracle_sources(KINDS)),
            folder / "n" / "state",
            [one for part in first for one in part.given],
            [one for part in second for one in part.given],
        )


def test_every_step_of_two_generations_is_told_as_its_ranks_were_given_it(
    run: Run, capsys: Any
) -> None:
    for step in range(LAST_STEP):
        code, told, _ = run_msdctl(
            capsys, "lineage", "told", "--step", step, "--state-dir", run.state_dir
        )
        assert code == 0
        own = [one for one in run.given if one.step == step]
        assert told_pieces(told["rows"], run.documents) == given_pieces(own, run.corpus)
        assert told["schema"] == "msd.lineage/1"
        assert told["generation"] == (1 if step < REWOUND_TO else 2)
        # The first generation planned ahead of its ranks: further than they read.
        if step < FIRST_STEPS:
            assert told["other_generations"] == ([] if step < REWOUND_TO else [1])


def test_an_older_generation_is_told_by_its_number(run: Run) -> None:
    for step in range(FIRST_STEPS):
        told = msd_daemon.lineage("told", step, generation=1, state_dir=run.state_dir)
        own = [one for one in run.first if one.step == step]
        rows = [row_map(row) for row in told.rows]
        assert told_pieces(rows, run.documents) == given_pieces(own, run.corpus)


def test_of_one_rank_its_rows_alone_are_told(run: Run) -> None:
    for rank in range(4):
        told = msd_daemon.lineage("told", 2, rank=rank, state_dir=run.state_dir)
        own = [one for one in run.first if one.step == 2 and one.rank == rank]
        rows = [row_map(row) | {"ranks": (rank,)} for row in told.rows]
        assert all(rank in row.ranks for row in told.rows)
        assert told_pieces(rows, run.documents) == given_pieces(own, run.corpus)
    with pytest.raises(NotFoundError, match="rank 4 is not in the mesh"):
        msd_daemon.lineage("told", 2, rank=4, state_dir=run.state_dir)


def test_an_export_has_every_segment_of_its_steps(run: Run, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "told.parquet"
    code, told, _ = run_msdctl(
        capsys, "lineage", "told", "--steps", f"2:{LAST_STEP}", "--parquet", path, "--state-dir",
        run.state_dir,
    )  # fmt: skip
    assert code == 0
    rows = pq.read_table(path).to_pylist()
    assert told["rows"] == len(rows)
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    own = [one for one in run.given if one.step >= 2]
    assert told_pieces(rows, run.documents) == given_pieces(own, run.corpus)
    assert {row["epoch"] for row in rows} >= {0}
    assert not list(tmp_path.glob("*.tmp"))


def test_steps_that_are_not_there_are_refused_with_what_is_kept(run: Run, capsys: Any) -> None:
    with pytest.raises(
        NotFoundError, match=r"step 900 is not planned yet.*generation 2: steps 6 to"
    ):
        msd_daemon.lineage("told", 900, state_dir=run.state_dir)
    with pytest.raises(NotFoundError, match="step 2 of generation 2 is not kept any more"):
        msd_daemon.lineage("told", 2, generation=2, state_dir=run.state_dir)
    with pytest.raises(NotFoundError, match="generation 7 is of no generation that is kept"):
        msd_daemon.lineage("told", 2, generation=7, state_dir=run.state_dir)
    with pytest.raises(NotFoundError, match=r"no run of job 'other'.*told"):
        msd_daemon.lineage("other", 2, state_dir=run.state_dir)
    code, _, err = run_msdctl(
        capsys, "lineage", "told", "--step", 900, "--state-dir", run.state_dir
    )
    assert code == 4
    assert "name a step of these" in err


def test_a_shard_that_was_changed_is_named(run: Run) -> None:
    told = msd_daemon.lineage("told", 3, state_dir=run.state_dir)
    for source in KINDS:
        shard = Path(next(row.shard for row in told.rows if row.source == source))
        content = shard.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        shard.write_bytes(changed)
        try:
            with pytest.raises(CorruptRecordError, match=f"{shard} was changed") as raised:
                msd_daemon.lineage("told", 3, state_dir=run.state_dir)
            assert raised.value.attributes["shard"] == str(shard)
        finally:
            shard.write_bytes(content)
    assert msd_daemon.lineage("told", 3, state_dir=run.state_dir) == told


def test_people_are_shown_tables(run: Run, capsys: Any) -> None:
    def shown(*arguments: object) -> tuple[str, str]:
        capsys.readouterr()
        assert main.run([*map(str, arguments), "--state-dir", str(run.state_dir)]) == 0
        out, err = capsys.readouterr()
        return out, err

    out, err = shown("lineage", "told", "--step", 7, "--rank", 1)
    told = msd_daemon.lineage("told", 7, rank=1, state_dir=run.state_dir)
    assert len(out.splitlines()) == 1 + len(told.rows)
    assert "step 7 of rank 1, generation 2 (dp 4)" in err
    assert "generations 1 planned this step too" in err
    row = told.rows[0]
    out, err = shown("find", "told", row.source, f"{Path(row.shard).name}:{row.place}")
    assert "delivered" in out
    assert "superseded" in out
    assert "kept: generation 2: steps 6 to" in err
    out, _ = shown("verify", "told", "--steps", "2:9")
    assert out == "job told: 7 of 7 steps are what they were\n"
    assert main.run(["lineage", "told"]) == 2
    assert main.run(["lineage", "told", "--steps", "3:5"]) == 2
    assert main.run(["verify", "told", "--steps", "5:3"]) == 2


def row_map(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}
