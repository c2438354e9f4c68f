"""Readers of one ring: slow, stuck, greedy, dead; the others get every microbatch, once, in order."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from msd_client.contract.errors import (
    CorruptRecordError,
    DeadlineError,
    LeaseExhausted,
    UsageError,
)
from tests.support.node import DEADLINES, own_segments, run_ranks, text_job, wait_until
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes


def test_keeping_every_slot_raises_at_once_with_the_remedies(start_node, tmp_path):
    job = text_job(tmp_path, batch={"rows": 32, "row_tokens": 128, "microbatch_rows": 1})
    with start_node().connect(job, {"dp": 1}, 0) as data:
        kept = []
        began = time.monotonic()
        with pytest.raises(LeaseExhausted, match="copy=True"):
            for step in data.train:
                kept.extend(step)
        assert len(kept) == 4
        assert time.monotonic() - began < DEADLINES["next_batch_s"]


def test_copies_never_hold_a_slot(start_node, tmp_path):
    job = text_job(tmp_path, batch={"rows": 32, "row_tokens": 128, "microbatch_rows": 1})
    with start_node().connect(job, {"dp": 1}, 0, copy=True) as data:
        kept = list(next(iter(data.train)))
    assert len(kept) == 32
    kept[0].tokens[:] = 1


def test_views_outlive_release_step_and_loader(start_node, tmp_path):
    job = text_job(tmp_path)
    oracle = run_ranks(start_node(), job, {"dp": 1}, 3)[0]
    data = start_node().connect(job, {"dp": 1}, 0)
    steps = iter(data.train)
    batch = next(iter(next(steps)))
    row = batch.tokens[1]
    batch.release()
    del batch
    for _ in range(2):
        for _ in next(steps):
            pass
    data.close()
    gc.collect()
    assert row.tobytes() == oracle.rows[0][1]


def test_a_step_cannot_be_iterated_after_the_next_began(start_node, tmp_path):
    with start_node().connect(text_job(tmp_path), {"dp": 1}, 0) as data:
        steps = iter(data.train)
        first = next(steps)
        next(steps)
        with pytest.raises(UsageError, match="is over"):
            [data.train.next_batch(first) for _ in range(1)]


def test_a_step_left_early_is_skipped_and_the_stream_goes_on(start_node, tmp_path):
    job = text_job(tmp_path)
    oracle = run_ranks(start_node(), job, {"dp": 1}, 3)[0]
    with start_node().connect(job, {"dp": 1}, 0) as data:
        rows = []
        for step in data.train:
            for batch in step:
                rows.append(batch.tokens[0].tobytes())
                break
            if step.number == 2:
                break
    assert rows == [oracle.rows[step][0] for step in range(3)]


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_microbatches_left_without_a_word_are_counted_and_told_once(start_node, tmp_path, caplog):
    with start_node().connect(text_job(tmp_path), {"dp": 1}, 0) as data:
        for step in data.train:
            if step.number == 0:
                for batch in step:
                    batch.release()
            elif step.number < 3:
                next(iter(step))
            elif step.number == 3:
                step.skip_rest()
            else:
                break
        assert data.train.skipped_microbatches == 14
    (told,) = warnings_in(caplog)
    assert "step 1 of job 'small': 7 of 8 microbatches were not taken" in told
    assert "step.skip_rest()" in told


def test_a_skip_that_is_meant_and_a_middle_stage_are_told_nothing(start_node, tmp_path, caplog):
    def leave(data, step):
        if data.train.stage == "middle":
            return
        next(iter(step)).release()
        step.skip_rest()

    counts = {}

    def count(data):
        counts[data.rank] = data.train.skipped_microbatches

    run_ranks(start_node(), text_job(tmp_path), {"pp": 3}, 4, read_step=leave, at_end=count)
    assert warnings_in(caplog) == []
    assert (counts[0], counts[2]) == (0, 0)


def test_a_step_is_given_once(start_node, tmp_path):
    with start_node().connect(text_job(tmp_path), {"dp": 1}, 0) as data:
        step = next(iter(data.train))
        for batch in step:
            batch.release()
        with pytest.raises(UsageError, match=r"8 microbatches of step 0 .*clone\(\)"):
            list(step)


def test_a_state_loaded_inside_a_step_ends_that_step(start_node, tmp_path):
    job = text_job(tmp_path)
    oracle = run_ranks(start_node(), job, {"dp": 1}, 2)[0]
    with start_node().connect(job, {"dp": 1}, 0) as data:
        fresh = data.train.state_dict()
        for old in data.train:
            batches = iter(old)
            next(batches)
            if old.number == 1:
                break
            old.skip_rest()
        data.train.load_state_dict(fresh)
        with pytest.raises(UsageError, match="a state was loaded since: go on with the next step"):
            next(batches)
        step = next(iter(data.train))
        assert step.number == 0
        assert [row.tobytes() for batch in step for row in batch.tokens] == oracle.rows[0]
        with pytest.raises(UsageError, match="a state was loaded since"):
            old.skip_rest()


def in_a_child(act) -> str:
    """Return the name and text of what `act` raises in a forked child."""
    begin, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            told = "nothing"
        except BaseException as error:  # noqa: BLE001 - handed to the test
            told = f"{type(error).__name__}: {error}"
        os.write(end, told.encode())
        os._exit(0)
    os.close(end)
    with open(begin, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(pid, 0)
    return told


def test_a_forked_child_is_refused_and_its_parent_goes_on(start_node, tmp_path):
    loaders = {"val": {"from": "s0", "part": "all"}}
    job = text_job(tmp_path, loaders=loaders)
    oracle = run_ranks(start_node(), job, {"dp": 1}, 3)[0]
    refusal = "SessionClosedError: a forked child may not use its parent's loader: connect there"
    with start_node().connect(job, {"dp": 1}, 0) as data:
        assert in_a_child(lambda: next(iter(data.train))) == refusal
        rows: dict[int, list[bytes]] = {}
        for step in data.train:
            batches = iter(step)
            rows[step.number] = [row.tobytes() for row in next(batches).tokens]
            assert in_a_child(lambda: next(batches)) == refusal  # noqa: B023 - called at once
            assert in_a_child(step.skip_rest) == refusal
            assert in_a_child(lambda: next(iter(data.train))) == refusal
            assert in_a_child(lambda: next(data.val.once())) == refusal
            assert in_a_child(lambda: data.set_mixture({"s0": 1})) == refusal
            assert in_a_child(data.close) == "nothing"
            rows[step.number] += [row.tobytes() for batch in batches for row in batch.tokens]
            if step.number == 2:
                break
    assert rows == oracle.rows


def test_a_random_slow_reader_delays_and_changes_nothing(start_node, tmp_path):
    job = text_job(tmp_path)
    oracle = run_ranks(start_node(), job, {"dp": 1}, 10)[0]
    rng = np.random.default_rng(1)

    def drowse(data, step, record):
        if data.rank == 3:
            time.sleep(rng.uniform(0, 0.02))  # the slowness is the subject

    records = run_ranks(start_node(), job, {"tp": 4}, 10, on_step=drowse)
    for record in records:
        assert record.rows == oracle.rows


READER = """
import sys, json
import msd_client
data = msd_client.connect(sys.argv[1], mesh={"tp": 2}, rank=int(sys.argv[2]), daemon=sys.argv[3], as_="numpy")
for step in data.train:
    for batch in step:
        pass
    print(step.number, flush=True)
    if step.number == 3:
        sys.stdin.readline()
"""


def test_a_killed_rank_frees_its_slots_and_the_others_go_on(start_node, tmp_path):
    from tests.support.node import write_job

    node = start_node()
    job = text_job(tmp_path)
    oracle = run_ranks(start_node(), job, {"dp": 1}, 12)[0]
    path = write_job(tmp_path / "small.yaml", {**job, "name": "small"})
    victim = subprocess.Popen(
        [sys.executable, "-c", READER, str(path), "1", str(node.socket)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen: list[str] = []

    def kill_when_waiting() -> None:
        for line in victim.stdout:
            seen.append(line)
            if line.strip() == "3":
                victim.kill()
                return

    killer = threading.Thread(target=kill_when_waiting)
    killer.start()
    try:
        with node.connect(path, {"tp": 2}, 0) as data:
            rows = {}
            for step in data.train:
                rows[step.number] = [row.tobytes() for batch in step for row in batch.tokens]
                if step.number == 11:
                    break
    finally:
        victim.kill()
        victim.wait(10)
        killer.join(10)
        victim.stdin.close()
        victim.stdout.close()
    assert rows == oracle.rows
    assert f"rank 1 (pid {victim.pid}) is gone" in node.log


def test_a_missing_rank_is_named_when_the_join_deadline_passes(start_node, tmp_path):
    node = start_node()
    with (
        node.connect(text_job(tmp_path), {"dp": 2}, 0, deadlines={"join_s": 1.0}) as data,
        pytest.raises(DeadlineError, match="ranks 1 of job"),
    ):
        next(iter(data.train))


def test_a_rank_that_joined_and_does_not_start_is_named_too(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path)
    with (
        node.connect(job, {"dp": 2}, 1),
        node.connect(job, {"dp": 2}, 0, deadlines={"join_s": 1.0}) as data,
        pytest.raises(DeadlineError, match="ranks 1 of job"),
    ):
        next(iter(data.train))


def test_a_rank_that_holds_slots_is_named_to_the_waiting_ones(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path, batch={"rows": 16, "row_tokens": 128, "microbatch_rows": 2})
    release = threading.Event()

    def hold() -> None:
        with node.connect(job, {"tp": 2}, 1) as data:
            batch = next(iter(next(iter(data.train))))
            release.wait(30)
            del batch

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        with (
            node.connect(job, {"tp": 2}, 0, deadlines={**DEADLINES, "next_batch_s": 1.0}) as data,
            pytest.raises(DeadlineError, match="rank 1"),
        ):
            for step in data.train:
                for _ in step:
                    pass
    finally:
        release.set()
        holder.join(20)


def test_a_stuck_reader_is_cut_off_after_its_time_and_the_others_go_on(start_node, tmp_path):
    node = start_node(environ={"MSD__DEADLINES__READER_STUCK_S": "1"})
    job = text_job(tmp_path)
    release = threading.Event()
    stuck = threading.Event()

    def hold() -> None:
        data = node.connect(job, {"tp": 2}, 1)
        batch = next(iter(next(iter(data.train))))
        stuck.set()
        release.wait(60)
        del batch
        data.close()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        with node.connect(job, {"tp": 2}, 0) as data:
            for step in data.train:
                for _ in step:
                    pass
                if step.number == 8:
                    break
    finally:
        release.set()
        holder.join(20)
    assert "rank 1" in node.log
    assert "cut off" in node.log


def test_torch_batches_are_views_and_idle_ranks_wait_without_work(start_node, tmp_path):
    torch = pytest.importorskip("torch")
    node = start_node()
    with node.connect(text_job(tmp_path), {"dp": 1}, 0, as_="torch") as data:
        batch = next(iter(next(iter(data.train))))
        assert isinstance(batch.tokens, torch.Tensor)
        assert batch.tokens.shape == (2, 256)
        assert batch.labels.dtype == torch.int64
        flat = batch.flat.tokens
        assert flat.shape == (1, 512)
        assert flat.data_ptr() == batch.tokens.data_ptr()


def test_importing_the_client_loads_neither_torch_nor_the_daemon():
    code = (
        "import sys, msd_client, msd_client.loader;"
        "print([m for m in ('torch','zmq','pydantic','msd_daemon','federation','asyncio') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_status_shows_ranks_sources_rings_and_memory(start_node, tmp_path):
    node = start_node()
    found = {}

    def look(data, step, record):
        if step.number == 3 and data.rank == 0:
            found.update(node.request("status"))

    run_ranks(node, text_job(tmp_path), {"dp": 2}, 16, on_step=look)
    (job,) = found["jobs"]
    assert {row["rank"] for row in job["ranks"]} == {0, 1}
    assert job["state"] == "running"
    assert abs(sum(source["wanted"] for source in job["sources"]) - 1) < 1e-9
    assert len(job["rings"]) == 2
    assert {worker["role"] for worker in job["workers"]} >= {"loader", "constructor"}
    assert all(worker["memory"]["pss_anon"] > 0 for worker in job["workers"])
    wait_until(lambda: not node.request("jobs")["jobs"], "the job to end")


def test_a_failed_stream_lets_go_of_the_slots_its_loop_held(start_node, tmp_path):
    """The error knows the trainer's frames, which hold a batch; nothing may hold the error."""
    (tmp_path / "t.jsonl").write_text('{"text": "abcdefgh"}\n' * 40 + "{broken\n")
    job = {
        "name": "failing",
        "tokenizer": {"bytes": True},
        "batch": {"rows": 2, "row_tokens": 8},
        "sources": {"t": {"paths": str(tmp_path / "t.jsonl"), "shuffle": False}},
        "defaults": {"on_error": "fail"},
    }
    node = start_node()
    before = own_segments()

    def train():
        with node.connect(job, {"dp": 1}, 0) as data:
            for step in data.train:
                for batch in step:
                    kept = batch.tokens
                    assert own_segments() - before
            return kept

    with pytest.raises(CorruptRecordError):
        train()
    assert not own_segments() - before
