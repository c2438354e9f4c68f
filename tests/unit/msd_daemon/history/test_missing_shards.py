"""Steps of a run whose shards went missing, or were cut, are refused by the shard's name, at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.journal_reader import JournalReader
from msd_client.contract.errors import CorruptRecordError
from msd_daemon import lineage
from msd_daemon.config.resolve import resolve_job
from msd_daemon.history.runs import find_run
from msd_daemon.history.verify_steps import StepVerifier, Verification
from tests.support.journalled_run import planned_run
from tests.support.ledger import Corpus

STEPS = 8
KINDS = ("plain", "zst", "parquet")


@dataclass
class Run:
    state_dir: Path
    shards: dict[str, list[Path]]


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run over two shards of one source, whose steps end in the midst of a shard."""
    kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    corpus = Corpus({kind: [np.full(300, 20, int).tolist() for _ in range(2)]})
    if kind == "parquet":
        write_parquet(corpus, folder)
        corpus_files = sorted(folder.glob("*.parquet"))
    else:
        corpus.write_texts(folder, {kind: "" if kind == "plain" else kind})
        corpus_files = sorted(folder.glob(f"{kind}-*.jsonl*"))
    job = resolve_job(
        {
            "name": "lost",
            "tokenizer": {"file": "tokenizer.json"},
            "sources": {kind: {"paths": [str(path) for path in corpus_files], "shuffle": False}},
            "batch": {"rows": 8, "row_tokens": 64, "microbatch_rows": 1},
        },
        folder,
    )
    plans = planned_run(folder / "state", job, {"dp": 2}, STEPS)
    assert len(plans) == STEPS
    return Run(folder / "state", {kind: corpus_files})


def write_parquet(corpus: Corpus, folder: Path) -> None:
    """Write each shard with row groups of 40 rows, so that steps go over several blocks."""
    corpus.write_texts(folder, {"parquet": ""})
    for path in sorted(folder.glob("parquet-*.jsonl")):
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        pq.write_table(pa.table({"text": texts}), path.with_suffix(".parquet"), row_group_size=40)
        path.unlink()


@pytest.fixture(params=["missing", "cut"])
def damage(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    undo: list[tuple[Path, bytes]] = []

    def act(path: Path) -> None:
        undo.append((path, path.read_bytes()))
        if request.param == "missing":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size // 2)

    yield act
    for path, content in undo:
        path.write_bytes(content)


def verified(run: Run) -> Verification:
    found = find_run("lost", run.state_dir)
    with JournalReader(found.journal) as reader:
        return StepVerifier(found, reader).verify(0, STEPS)


@pytest.mark.parametrize("step", range(STEPS))
def test_a_lost_shard_is_named_for_every_step(
    run: Run, damage: Callable[[Path], None], step: int
) -> None:
    assert lineage("lost", step, state_dir=run.state_dir).rows
    (shards,) = run.shards.values()
    damage(shards[0])
    with pytest.raises(CorruptRecordError) as caught:
        lineage("lost", step, state_dir=run.state_dir)
    assert str(shards[0]) in str(caught.value)


def test_verify_names_a_lost_shard(run: Run, damage: Callable[[Path], None]) -> None:
    assert verified(run).is_equal
    (shards,) = run.shards.values()
    damage(shards[0])
    found = verified(run)
    assert not found.is_equal
    assert any(str(shards[0]) in text for text in found.changed)
