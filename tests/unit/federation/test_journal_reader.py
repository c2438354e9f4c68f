"""The journal read beside its writer: what is kept, what is refused, and by which words."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from federation.journal import Journal, StepRecord
from federation.journal_reader import JournalReader
from federation.model.job import encode_job
from msd_client.contract.codec import pack
from msd_client.contract.errors import (
    JournalDamagedError,
    JournalUnavailableError,
    NotFoundError,
    ResourceError,
)
from msd_client.contract.state import DELIVERED_TOKENS, StateDelta, StreamState
from msd_daemon.config.resolve import resolve_job


@pytest.fixture
def job(tmp_path: Path) -> object:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    batch = {"rows": 2, "row_tokens": 8, "microbatch_rows": 1}
    return resolve_job(
        {"tokenizer": {"bytes": True}, "sources": {"a": "a.jsonl"}, "batch": batch}, tmp_path
    )


def delta_of(step: int) -> StateDelta:
    """Return a difference that counts five tokens and an own digest."""
    progress = np.zeros((11, 1), np.int64)
    progress[DELIVERED_TOKENS] = 5 * (step + 1)
    empty = np.zeros(0, np.int64)
    return StateDelta(
        step=step + 1,
        event_number=0,
        changed=np.zeros(1, np.int64),
        progress=progress,
        dropped_changed=empty,
        dropped=np.zeros((20, 0), np.int64),
        accumulators=empty,
        carried_out=empty,
        carried_in=np.zeros((6, 0), np.int64),
        stream_digest=bytes([step % 256]) * 32,
        ending="",
        schedule_index=0,
    )


def begin(journal: Journal, job: object, step: int, state: StreamState) -> int:
    return journal.open_generation(
        step,
        state.encode(),
        job_digest=job.digest(),
        job=pack(encode_job(job)),
        mesh=pack({"mesh": [["dp", 2]]}),
    )


def state_of(job: object, step: int) -> StreamState:
    state = StreamState.initial(job.digest(), ("a",), 1, sample_digest=job.sample_digest())
    progress = state.progress.copy()
    progress[DELIVERED_TOKENS] = 5 * step
    return replace(state, step=step, progress=progress)


def append(journal: Journal, job: object, generation: int, first: int, end: int) -> None:
    """Append steps, with a snapshot at each multiple of 16."""
    for step in range(first, end):
        delta = delta_of(step)
        due = (step + 1) % 16 == 0
        snapshot = (step + 1, state_of(job, step + 1).encode()) if due else None
        record = StepRecord(step, delta.encode(), delta.stream_digest.hex())
        journal.append_steps(generation, 1, [record], snapshot)


def test_states_before_any_kept_step_are_read_while_the_planner_writes(
    tmp_path: Path, job: object
) -> None:
    path = tmp_path / "journal.db"
    with closing(Journal(path)) as journal:
        append(journal, job, begin(journal, job, 0, state_of(job, 0)), 0, 40)
        with JournalReader(path) as reader:
            assert str(reader.kept()[0]) == "generation 1: steps 0 to 39"
            for step in (0, 1, 15, 16, 17, 39, 40):
                state = reader.state_before(step, 1)
                assert (state.step, state.progress[DELIVERED_TOKENS, 0]) == (step, 5 * step)
            append(journal, job, 1, 40, 50)
            assert reader.holding(49).end == 50
            generation = reader.generation(1)
            assert generation.job == job
            assert generation.tree.describe() == "dp 2"
            assert reader.newest_job() == (job.name, job.digest())
            with pytest.raises(NotFoundError, match="lacks step 50"):
                reader.state_before(90, 1)


def test_generations_that_overlap_and_what_is_let_go(tmp_path: Path, job: object) -> None:
    path = tmp_path / "journal.db"
    with closing(Journal(path, steps_kept=32)) as journal:
        append(journal, job, begin(journal, job, 0, state_of(job, 0)), 0, 100)
        append(journal, job, begin(journal, job, 90, state_of(job, 90)), 90, 94)
    with JournalReader(path) as reader:
        second, first = reader.kept()
        assert (second.generation, second.first, second.end) == (2, 90, 94)
        assert (first.generation, first.first, first.end) == (1, 64, 100)
        assert [reader.holding(step).generation for step in (64, 89, 90, 93, 94, 99)] == [
            1, 1, 2, 2, 1, 1,
        ]  # fmt: skip
        assert reader.holding(91, 1).generation == 1
        with pytest.raises(NotFoundError, match=r"step 63 is not kept any more.*steps 64 to 99"):
            reader.holding(63)
        with pytest.raises(NotFoundError, match="step 100 is not planned yet"):
            reader.holding(100)
        with pytest.raises(NotFoundError, match="step 95 of generation 2 is not planned yet"):
            reader.holding(95, 2)
        assert reader.state_before(64, 1).step == 64


def test_damage_is_named_row_by_row(tmp_path: Path, job: object) -> None:
    path = tmp_path / "journal.db"
    with closing(Journal(path)) as journal:
        append(journal, job, begin(journal, job, 0, state_of(job, 0)), 0, 40)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE steps SET delta = ? WHERE step = 5", (delta_of(6).encode(),))
        db.execute("DELETE FROM steps WHERE step = 20")
        db.execute("UPDATE snapshots SET state = x'00' WHERE step = 32")
    with JournalReader(path) as reader:
        assert [(row.step, row.what.split(":")[0]) for row in reader.damage(0, 40, 1)] == [
            (32, "snapshot before step 32"), (5, "step 5"), (20, "step 20 is missing"),
        ]  # fmt: skip
        assert [row.step for row in reader.damage(17, 30, 1)] == [20]
        assert reader.state_before(5, 1).step == 5
        assert reader.state_before(18, 1).step == 18
        with pytest.raises(JournalDamagedError, match="step 5, generation 1 is damaged"):
            reader.state_before(7, 1)
        with pytest.raises(NotFoundError, match="lacks step 20 of generation 1"):
            reader.state_before(25, 1)
        with pytest.raises(JournalDamagedError, match="snapshot of step 32"):
            reader.state_before(33, 1)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalUnavailableError, match="is not there"):
        JournalReader(tmp_path / "journal.db")
    other = tmp_path / "other.db"
    other.write_bytes(b"no database at all, just words" * 9)
    with pytest.raises(ResourceError, match=r"other.db can't be read"):
        JournalReader(other)
    path = tmp_path / "newer.db"
    Journal(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = '99'")
    with pytest.raises(ResourceError, match="has schema 99, this release reads"):
        JournalReader(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user has to look at it")
def test_a_journal_in_a_folder_that_may_only_be_read_is_read(job: object) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        with closing(Journal(path)) as journal:
            append(journal, job, begin(journal, job, 0, state_of(job, 0)), 0, 5)
        os.chmod(folder, 0o755)
        os.chmod(path, 0o644)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setgid(65534)
                os.setuid(65534)
                with JournalReader(path) as reader:
                    code = 0 if reader.state_before(4, 1).step == 4 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [file.name for file in Path(folder).iterdir()] == ["journal.db"]
