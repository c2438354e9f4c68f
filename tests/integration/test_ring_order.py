"""A full ring keeps its order: depth 1, 2 and 8, four readers, one slow at random (H15)."""

from __future__ import annotations

import os
import queue
import random
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from msd_client.numpy_adapter import view_field
from msd_client.ring_reader import RingReader, SlotLease
from msd_daemon.core.slots import RingState
from tests.support.node import run_ranks, text_job, wait_until, write_job
from tests.support.rings import GENERATION, SmallRing, small_ring
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes

SEED = int(os.environ.get("MSD_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
PAYLOAD_BYTES = 64 << 10
READERS = 4
COUNTS = [400, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


@dataclass
class Reading:
    """What one reader saw."""

    number: int
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    sequences: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def read(self, ring: SmallRing, releases: queue.SimpleQueue[tuple[int, int, int]]) -> None:
        """Read what is announced until the end."""
        slow = random.Random(SEED)
        reader = RingReader(ring.segment.fd_read_only, ring.layout)
        try:
            while (event := self.inbox.get(timeout=30)) is not None:
                slot, sequence, payload_bytes = event
                lease = reader.open(slot, sequence, GENERATION, payload_bytes)
                check_content(lease, sequence)
                if self.number == 3 and sequence % 37 == 5:
                    time.sleep(slow.uniform(0, 0.05))  # the slowness is the subject
                lease.release()
                del lease
                self.sequences.append(sequence)
                releases.put((self.number, slot, sequence))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.errors.append(error)
            releases.put((self.number, -1, -1))
        finally:
            reader.close()


def check_content(lease: SlotLease, sequence: int) -> None:
    """Check that a slot holds the batch of this number, whole."""
    (entry,) = lease.table.fields
    data = view_field(lease.memory, entry).tobytes()
    body, crc = data[:-4], int.from_bytes(data[-4:], "little")
    assert zlib.crc32(body) == crc, f"batch {sequence} is torn"
    assert int.from_bytes(body[:8], "little") == sequence


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_every_reader_gets_every_batch_once_and_in_order(slots: int, count: int) -> None:
    """The daemon's slot states, the constructor's writer and the clients' readers on one segment."""
    print(f"MSD_TEST_SEED={SEED}")
    rng = np.random.default_rng(SEED)
    readings = [Reading(number) for number in range(READERS)]
    releases: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
    with small_ring(payload_bytes=PAYLOAD_BYTES, slots=slots) as ring:
        threads = [
            threading.Thread(target=reading.read, args=(ring, releases)) for reading in readings
        ]
        for thread in threads:
            thread.start()
        state = RingState(slots, frozenset(range(READERS)))
        held_back = 0
        for sequence in range(count):
            while not state.has_free():
                held_back += 1
                reader, slot, released = releases.get(timeout=30)
                assert slot >= 0, readings[reader].errors
                state.released(slot, released, reader)
            slot, taken = state.begin_fill(0)
            assert taken == sequence
            size = int(rng.integers(16, PAYLOAD_BYTES - 4))
            body = sequence.to_bytes(8, "little") + rng.bytes(size - 8)
            data = np.frombuffer(body + zlib.crc32(body).to_bytes(4, "little"), np.uint8)
            payload_bytes = ring.fill(slot, sequence, data=data)
            for publication in state.fill_ended(slot, sequence, payload_bytes, 0):
                for reading in readings:
                    reading.inbox.put(tuple(publication))
            state.check()
        for reading in readings:
            reading.inbox.put(None)
        for thread in threads:
            thread.join(60)
    for reading in readings:
        assert reading.errors == []
        assert reading.sequences == list(range(count))
    assert held_back > count // (2 * slots), "the ring was never full"


@pytest.mark.parametrize(
    "steps", [12, pytest.param(625, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("slots", [2, 8])
def test_a_slow_reader_holds_the_daemon_back_and_changes_nothing(
    start_node: Any, tmp_path: Path, slots: int, steps: int
) -> None:
    """16 microbatches a step over real sockets: 10,000 of them in `make soak`."""
    node = start_node(environ={"MSD__MEMORY__RING_SLOTS": str(slots)})
    job = text_job(tmp_path, batch={"rows": 16, "row_tokens": 128, "microbatch_rows": 1})
    (oracle,) = run_ranks(start_node(), job, {"dp": 1}, steps)
    slow = random.Random(SEED)
    ahead: list[int] = []

    def drowse(data: Any, step: Any, _record: Any) -> None:
        if data.rank == 3:
            time.sleep(slow.uniform(0, 0.01))  # the slowness is the subject
            (job_status,) = node.request("status")["jobs"] if step.number % 5 == 1 else (None,)
            if job_status is not None:
                (ring,) = job_status["rings"]
                ahead.append(ring["published"] - 16 * (step.number + 1))

    for record in run_ranks(node, job, {"tp": READERS}, steps, on_step=drowse):
        assert record.rows == oracle.rows
    assert max(ahead) <= slots


IDLE = """
import sys, resource, time
import msd_client
data = msd_client.connect(sys.argv[1], mesh={"tp": 2}, rank=1, daemon=sys.argv[2], as_="numpy")
for step in data.train:
    for batch in step:
        del batch
    if step.number == 3:
        print("waits", flush=True)
"""


def test_a_waiting_reader_uses_no_cpu(start_node: Any, tmp_path: Path) -> None:
    node = start_node()
    path = write_job(
        tmp_path / "j.yaml",
        text_job(tmp_path, batch={"rows": 4, "row_tokens": 128, "microbatch_rows": 4}),
    )
    idle = subprocess.Popen(
        [sys.executable, "-c", IDLE, str(path), str(node.socket)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        with node.connect(path, {"tp": 2}, 0) as data:
            kept = []
            for step in data.train:
                kept += list(step)  # its peer waits once all slots are held
                if len(kept) == 4:
                    break
            assert idle.stdout is not None
            assert idle.stdout.readline() == b"waits\n"
            process = psutil.Process(idle.pid)
            idle_s = 1.0

            def busy_s() -> float:
                return sum(process.cpu_times()[:2])

            wait_until(lambda: process.status() == psutil.STATUS_SLEEPING, "the reader to wait")
            before = busy_s()
            time.sleep(idle_s)  # what is measured is doing nothing
            assert busy_s() - before < 0.05 * idle_s
            kept.clear()
    finally:
        idle.kill()
        idle.wait(10)
        assert idle.stdout is not None
        idle.stdout.close()
