"""msdctl verify on a run whose sources or journal were changed afterwards."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.state import DELIVERED_TOKENS, StateDelta
from msd_client.msdctl import main
from tests.support.ledger import Corpus, read_ledger
from tests.support.node import Node, running_node
from tests.support.told import run_msdctl

pytestmark = pytest.mark.processes

STEPS = 24


@dataclass
class Run:
    folder: Path
    corpus: Corpus
    state_dir: Path

    @property
    def shards(self) -> list[Path]:
        return sorted((self.folder / "data").glob("*.jsonl"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A large shard, of which a fingerprint knows the edges alone, and a small one."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(9)
    corpus = Corpus({"large": [rng.integers(60, 90, 900).tolist()], "small": [[30] * 90]})
    job = {
        "name": "kept",
        "tokenizer": {"file": str(folder / "data" / "tokenizer.json")},
        "sources": corpus.write_texts(folder / "data", {"large": "", "small": ""}),
        "mixture": {0: {"large": 24, "small": 1}},
        "batch": {"rows": 16, "row_tokens": 256, "microbatch_rows": 2},
        "defaults": {"shuffle": False},
    }
    with running_node(folder / "n") as node:
        read_ledger(node, corpus, job, {"dp": 2}, STEPS)
    yield Run(folder, corpus, folder / "n" / "state")


@pytest.fixture
def kept(run: Run) -> Iterator[Run]:
    """The run, whose shards are what they were at the end again."""
    before = {path: path.read_bytes() for path in run.shards}
    yield run
    for path, content in before.items():
        path.write_bytes(content)


def verify(capsys: Any, state_dir: Path, *arguments: object) -> tuple[int, dict[str, Any], str]:
    return run_msdctl(capsys, "verify", "kept", "--state-dir", state_dir, *arguments)


def test_an_untouched_run_is_what_it_was(run: Run, capsys: Any) -> None:
    code, found, _ = verify(capsys, run.state_dir, "--steps", f"0:{STEPS}")
    assert (code, found["verified"], found["is_equal"]) == (0, STEPS, True)
    assert found["schema"] == "msd.verify/1"
    assert found["content"] == found["changed_shards"] == found["damaged_rows"] == []


def test_a_token_at_a_files_edge_changes_its_fingerprint(kept: Run, capsys: Any) -> None:
    small = kept.shards[1]
    change_token(small, kept.corpus, int(kept.corpus.firsts[900 + 40]) + 1)
    code, found, _ = verify(capsys, kept.state_dir, "--steps", "2:6")
    assert code == 1
    assert not found["is_equal"]
    assert str(small) in found["changed_shards"][0]
    assert found["first_difference"] is None


def test_a_token_inside_a_large_file_is_seen_in_its_content_alone(
    kept: Run, capsys: Any, tmp_path: Path
) -> None:
    large, steps = kept.shards[0], ("--steps", f"0:{STEPS}")
    assert large.stat().st_size > 3 * (64 << 10)
    code, former, _ = verify(capsys, kept.state_dir, *steps, "--content")
    assert (code, len(former["content"])) == (0, STEPS)
    file = tmp_path / "content.json"
    file.write_text(json.dumps(former))
    assert verify(capsys, kept.state_dir, *steps, "--against", file)[0] == 0
    document = 450
    change_token(large, kept.corpus, int(kept.corpus.firsts[document]) + 3)
    # Membership, counts and edges are equal: nothing but the content can tell.
    assert verify(capsys, kept.state_dir, *steps)[0] == 0
    code, found, _ = verify(capsys, kept.state_dir, *steps, "--against", file)
    assert code == 1
    difference = found["first_difference"]
    assert difference["what"] == "content"
    step = difference["step"]
    assert difference["expected"] == former["content"][step]["digest"] != difference["actual"]
    assert holds(capsys, kept, step, document)
    assert not any(holds(capsys, kept, before, document) for before in range(step))


def test_steps_that_the_former_digests_lack_are_not_said_to_be_equal(
    run: Run, capsys: Any, tmp_path: Path
) -> None:
    _, former, _ = verify(capsys, run.state_dir, "--steps", "0:10", "--content")
    file = tmp_path / "content.json"
    file.write_text(json.dumps(former))
    for steps, lacking in (("2:10", []), ("5:15", [10, 11, 12, 13, 14]), ("20:22", [20, 21])):
        code, found, _ = verify(capsys, run.state_dir, "--steps", steps, "--against", file)
        assert (code, found["uncompared"]) == (int(bool(lacking)), lacking)
        assert found["is_equal"] == (not lacking)
        assert found["first_difference"] is None
    arguments = ["--state-dir", str(run.state_dir), "--steps", "5:15", "--against", str(file)]
    assert main.run(["verify", "kept", *arguments]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "job kept: 5 of 10 steps are what they were"
    assert said[1].startswith("not compared: the content of 5 steps, 10 to 14, of which ")


def test_a_document_of_another_length_changes_the_digest_of_its_step(
    kept: Run, capsys: Any
) -> None:
    large, document = kept.shards[0], 450
    step = next(step for step in range(STEPS) if holds(capsys, kept, step, document))
    first = int(kept.corpus.firsts[document]) + 3
    content = large.read_bytes()
    was = f" {first} {first + 1} ".encode()
    assert content.count(was) == 1
    large.write_bytes(content.replace(was, was[:6] + b"0" + was[7:]))
    code, found, _ = verify(capsys, kept.state_dir, "--steps", f"0:{STEPS}")
    difference = found["first_difference"]
    assert code == 1
    assert difference["what"] in ("digest", "counts")
    assert difference["step"] <= step
    assert found["verified"] == difference["step"]


def edit(state_dir: Path, into: Path, change: Callable[[sqlite3.Connection], object]) -> Path:
    """Return a copy of a state folder whose journal was changed."""
    shutil.copytree(state_dir, into)
    (journal,) = into.glob("jobs/*/journal.db")
    with sqlite3.connect(journal) as db:
        change(db)
    db.close()
    return into


def test_a_digest_that_was_overwritten_is_a_damaged_row(
    run: Run, capsys: Any, tmp_path: Path
) -> None:
    changed = edit(
        run.state_dir, tmp_path / "s",
        lambda db: db.execute("UPDATE steps SET digest = ? WHERE step = 7", ("0" * 64,)),
    )  # fmt: skip
    code, found, _ = verify(capsys, changed, "--steps", "4:12")
    assert code == 1
    assert [row["step"] for row in found["damaged_rows"]] == [7]
    assert "0" * 64 in found["damaged_rows"][0]["what"]
    assert (found["verified"], found["passed_over"]) == (3, 5)
    assert verify(capsys, changed, "--steps", "0:7")[0] == 0


def test_a_flipped_bit_and_a_lost_row_are_named(run: Run, capsys: Any, tmp_path: Path) -> None:
    def change(db: sqlite3.Connection) -> None:
        (delta,) = db.execute("SELECT delta FROM steps WHERE step = 9").fetchone()
        flipped = bytearray(delta)
        flipped[len(flipped) // 2] ^= 4
        db.execute("UPDATE steps SET delta = ? WHERE step = 9", (bytes(flipped),))
        db.execute("DELETE FROM steps WHERE step = 12")

    changed = edit(run.state_dir, tmp_path / "s", change)
    code, found, _ = verify(capsys, changed, "--steps", "10:14")
    assert code == 1
    assert sorted(row["step"] for row in found["damaged_rows"]) == [9, 12]
    assert found["verified"] == 0
    code, _, err = run_msdctl(capsys, "lineage", "kept", "--step", 10, "--state-dir", changed)
    assert code == 1
    assert "step 9, generation 1 is damaged" in err


@pytest.mark.parametrize("what", ["digest", "counts"])
def test_a_row_that_is_whole_and_false_is_the_first_difference(
    run: Run, capsys: Any, tmp_path: Path, what: str
) -> None:
    def change(db: sqlite3.Connection) -> None:
        (body,) = db.execute("SELECT delta FROM steps WHERE step = 8").fetchone()
        delta = StateDelta.decode(body)
        if what == "digest":
            delta = replace(delta, stream_digest=b"\1" * 32)
        else:
            progress = delta.progress.copy()
            progress[DELIVERED_TOKENS] += 1
            delta = replace(delta, progress=progress)
        db.execute(
            "UPDATE steps SET delta = ?, digest = ? WHERE step = 8",
            (delta.encode(), delta.stream_digest.hex()),
        )

    changed = edit(run.state_dir, tmp_path / "s", change)
    code, found, _ = verify(capsys, changed, "--steps", "3:12")
    difference = found["first_difference"]
    assert code == 1
    assert (difference["step"], difference["what"]) == (8, what)
    assert found["verified"] == 5
    assert (difference["expected"] == "01" * 32) == (what == "digest")
    code, _, err = run_msdctl(capsys, "lineage", "kept", "--step", 8, "--state-dir", changed)
    assert code != 0
    assert "step 8 planned again is not what was journalled" in err


def test_steps_of_a_running_job_can_be_verified(run: Run, capsys: Any, node: Node) -> None:
    job = {
        "name": "kept",
        "tokenizer": {"file": str(run.folder / "data" / "tokenizer.json")},
        "sources": {"large": str(run.shards[0])},
        "batch": {"rows": 16, "row_tokens": 256, "microbatch_rows": 2},
    }
    with node.connect(job, {"dp": 1}, 0) as data:
        for step in data.train:
            if step.number == 3:
                break
        code, found, _ = run_msdctl(
            capsys, "verify", "kept", "--steps", "0:4", "--socket", node.socket
        )
    assert (code, found["verified"]) == (0, 4)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path / "n") as running:
        yield running


def change_token(shard: Path, corpus: Corpus, token: int) -> None:
    """Write another token of as many digits in its place."""
    content = shard.read_bytes()
    place = content.index(f" {token} ".encode()) + 1
    other = str(int(token) + 1 if int(token) % 10 < 9 else int(token) - 1).encode()
    shard.write_bytes(content[:place] + other + content[place + len(other) :])
    assert len(other) == len(str(token))


def holds(capsys: Any, run: Run, step: int, document: int) -> bool:
    """True where a step holds a part of a document of the first source, as its lineage says."""
    place = run.corpus.oracle_sources({"large": "", "small": ""})[0].shards[0][document].begin_bytes
    code, told, _ = run_msdctl(
        capsys, "lineage", "kept", "--step", step, "--state-dir", run.state_dir
    )
    assert code in (0, 1), told
    return any(row["place"] == place and row["source"] == "large" for row in told.get("rows", ()))
