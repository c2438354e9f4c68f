"""A run is found by its job's name, the same however often it is looked at; others are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation.journal import Journal
from federation.journal_reader import JournalReader
from msd_client.contract.errors import NotFoundError
from msd_daemon import lineage
from msd_daemon.config.resolve import resolve_job
from msd_daemon.history.runs import find_run
from msd_daemon.services.job_folder import JobFolder
from tests.support.journalled_run import planned_run
from tests.support.ledger import Corpus


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Two folders of one name, the older one ("zz") with steps 0 to 5, the newer with 0 to 2."""
    corpus = Corpus({"plain": [[20] * 300]})
    corpus.write_texts(tmp_path, {"plain": ""})
    job = resolve_job(
        {
            "name": "app",
            "tokenizer": {"file": "tokenizer.json"},
            "sources": {"plain": "plain-*.jsonl"},
            "batch": {"rows": 4, "row_tokens": 64, "microbatch_rows": 1},
        },
        tmp_path,
    )
    state = tmp_path / "state"
    for identity, steps in (("zz", 6), ("aa", 3)):
        planned_run(state, job, {"dp": 1}, steps, identity=identity)
        about = {"job": "app", "digest": job.digest(), "uid": "0"}
        JobFolder(state, identity).keep_resolved("", about)
    return state


def files(state_dir: Path) -> list[str]:
    return sorted(str(path) for path in state_dir.rglob("*"))


def test_reading_leaves_nothing_and_changes_no_answer(state_dir: Path) -> None:
    before = files(state_dir)
    for _ in range(3):
        run = find_run("app", state_dir)
        assert (run.identity, [other.identity for other in run.others]) == ("aa", ["zz"])
        for identity in ("aa", "zz"):
            assert lineage(identity, 1, state_dir=state_dir).rows
        assert files(state_dir) == before


def test_a_step_that_another_folder_keeps_is_named(state_dir: Path) -> None:
    with pytest.raises(NotFoundError, match="step 4 is kept in zz: give one of these") as caught:
        lineage("app", 4, state_dir=state_dir)
    assert caught.value.attributes["folders"] == "zz"
    assert lineage("zz", 4, state_dir=state_dir).rows
    with pytest.raises(NotFoundError) as caught:
        lineage("app", 9, state_dir=state_dir)
    assert "zz" not in caught.value.message


def test_what_a_planner_writes_meanwhile_is_seen(state_dir: Path) -> None:
    path = find_run("zz", state_dir).journal
    with JournalReader(path) as reader:
        assert [kept.generation for kept in reader.kept()] == [1]
        journal = Journal(path)
        journal.open_generation(6, b"state")
        assert [kept.generation for kept in reader.kept()] == [2, 1]
        journal.open_generation(6, b"state")
        journal.close()
        assert reader.kept()[0].generation == 3
