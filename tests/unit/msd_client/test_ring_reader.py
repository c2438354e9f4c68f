"""Leases: checked at the start, alive as long as any view, released once and by the right process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from msd_client.batch import Batch
from msd_client.contract.errors import (
    BatchReleasedError,
    SegmentCorruptError,
    SegmentUnavailableError,
)
from msd_client.contract.ring_layout import RingLayout
from msd_client.numpy_adapter import view_field
from msd_client.ring_reader import RingReader, SlotLease
from tests.support.rings import GENERATION, SmallRing, sample_arrays, small_ring
from tests.support.shm_names import expect_no_names_left, shm_names


@pytest.fixture
def ring() -> Iterator[SmallRing]:
    with small_ring() as made:
        yield made


class FakeEvent:
    """An event that completes when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


def torch_field(lease: SlotLease, name: str) -> Any:
    pytest.importorskip("torch")
    from msd_client.torch_adapter import view_field

    return view_field(lease.memory, next(f for f in lease.table.fields if f.name == name))


def numpy_field(lease: SlotLease, name: str) -> Any:
    return view_field(lease.memory, next(f for f in lease.table.fields if f.name == name))


def test_a_released_lease_returns_its_slot_once(ring: SmallRing) -> None:
    lease = ring.lease(slot=2, sequence=9)
    assert ring.reader.held == {2: 9}
    lease.release()
    lease.release()
    assert ring.released == [(2, 9)]
    assert ring.reader.held == {}
    assert lease.is_released
    del lease
    gc.collect()
    assert ring.released == [(2, 9)]


def test_a_forgotten_lease_returns_its_slot_too(ring: SmallRing) -> None:
    lease = ring.lease()
    assert ring.released == []
    del lease
    gc.collect()
    assert ring.released == [(0, 1)]


def test_the_memory_of_a_released_lease_is_refused(ring: SmallRing) -> None:
    lease = ring.lease()
    lease.release()
    with pytest.raises(BatchReleasedError, match="clone"):
        _ = lease.memory


NUMPY_VIEWS: dict[str, Callable[[Any], Any]] = {
    "array": lambda a: a,
    "slice": lambda a: a[1:, 2:],
    "reshape": lambda a: a.reshape(-1),
    "transpose": lambda a: a.T,
    "other dtype": lambda a: a.view(np.uint8),
    "memoryview": memoryview,
    "iterator": lambda a: a.flat,
    "list of rows": list,
}


@pytest.mark.parametrize("name", NUMPY_VIEWS)
def test_any_numpy_view_holds_the_slot(ring: SmallRing, name: str) -> None:
    lease = ring.lease()
    view = NUMPY_VIEWS[name](numpy_field(lease, "tokens"))
    lease.release()
    del lease
    gc.collect()
    assert ring.released == []
    del view
    gc.collect()
    assert ring.released == [(0, 1)]


def saved_by_autograd(tensor: Any) -> Any:
    import torch

    weight = torch.ones(4, requires_grad=True)
    return (tensor.to(torch.float32) * 1, weight * tensor.view(torch.float32))[1].sum()


TORCH_VIEWS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda t: t,
    "slice": lambda t: t[0, 1:],
    "reshape": lambda t: t.reshape(1, -1),
    "detach": lambda t: t.detach(),
    "numpy": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
    "no-op to": lambda t: t.to(t.dtype).contiguous().cpu(),
    "dlpack capsule": lambda t: t.__dlpack__(),
    "numpy by dlpack": np.from_dlpack,
    "saved by autograd": saved_by_autograd,
}


@pytest.mark.parametrize("name", TORCH_VIEWS)
def test_any_torch_view_holds_the_slot(ring: SmallRing, name: str) -> None:
    lease = ring.lease()
    view = TORCH_VIEWS[name](torch_field(lease, "tokens"))
    lease.release()
    del lease
    gc.collect()
    assert ring.released == []
    del view
    gc.collect()
    assert ring.released == [(0, 1)]


def test_a_view_in_a_cycle_returns_its_slot_by_the_collector(ring: SmallRing) -> None:
    lease = ring.lease()
    cycle: dict[str, Any] = {"view": numpy_field(lease, "labels")}
    cycle["self"] = cycle
    lease.release()
    del lease, cycle
    gc.collect()
    assert ring.released == [(0, 1)]


def test_views_outlive_reader_and_descriptors() -> None:
    with small_ring() as ring:
        lease = ring.lease(sequence=100)
        view = numpy_field(lease, "tokens")
        released = ring.reader.released
        del lease
    del ring
    gc.collect()
    assert view.tolist() == sample_arrays(100)["tokens"].tolist()
    assert not released
    del view
    gc.collect()
    assert list(released) == [(0, 100)]


@pytest.mark.parametrize(
    ("sequence", "generation", "extra_bytes"),
    [(2, GENERATION, 0), (1, GENERATION + 1, 0), (1, GENERATION, 1)],
)
def test_a_slot_that_is_not_as_announced_is_refused_without_a_lease(
    ring: SmallRing, sequence: int, generation: int, extra_bytes: int
) -> None:
    payload_bytes = ring.fill(0, 1, **sample_arrays())
    with pytest.raises(SegmentCorruptError):
        ring.reader.open(0, sequence, generation, payload_bytes + extra_bytes)
    gc.collect()
    assert ring.released == []
    assert ring.reader.held == {}


def test_a_slot_that_the_ring_lacks_is_refused(ring: SmallRing) -> None:
    with pytest.raises(SegmentCorruptError, match="slots 0 to 3"):
        ring.reader.open(4, 1, GENERATION, 0)


def test_a_slot_written_while_leased_is_noticed(ring: SmallRing) -> None:
    lease = ring.lease()
    lease.check_unchanged()
    ring.fill(0, 2, **sample_arrays())
    with pytest.raises(SegmentCorruptError, match="written while leased"):
        lease.check_unchanged()


def test_a_closed_reader_opens_nothing(ring: SmallRing) -> None:
    payload_bytes = ring.fill(0, 1, **sample_arrays())
    ring.reader.close()
    ring.reader.close()
    with pytest.raises(BatchReleasedError, match="closed"):
        ring.reader.open(0, 1, GENERATION, payload_bytes)


def test_a_ring_that_says_something_else_is_refused(ring: SmallRing) -> None:
    other = RingLayout.for_payload(4096, 4, ring_id=1, generation=GENERATION + 1)
    with pytest.raises(SegmentCorruptError, match="announced"):
        RingReader(ring.segment.fd_read_only, other)


def test_a_segment_that_is_too_small_is_refused(ring: SmallRing) -> None:
    larger = RingLayout.for_payload(4096, 9, ring_id=1, generation=GENERATION)
    with pytest.raises(SegmentUnavailableError, match="are to be mapped"):
        RingReader(ring.segment.fd_read_only, larger)


def test_the_callback_gets_what_died(ring: SmallRing) -> None:
    seen: list[tuple[int, int]] = []
    reader = RingReader(
        ring.segment.fd_read_only, ring.layout, lambda *released: seen.append(released)
    )
    payload_bytes = ring.fill(3, 8, **sample_arrays())
    reader.open(3, 8, GENERATION, payload_bytes).release()
    assert seen == [(3, 8)]
    assert not reader.released
    reader.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_reads_its_views_and_releases_nothing(ring: SmallRing) -> None:
    told, tell = os.pipe()
    reader = RingReader(
        ring.segment.fd_read_only, ring.layout, lambda *_: os.write(tell, b"released") and None
    )
    lease = reader.open(0, 1, GENERATION, ring.fill(0, 1, **sample_arrays()))
    view = numpy_field(lease, "tokens")
    pid = os.fork()
    if pid == 0:
        is_right = view.tolist() == sample_arrays()["tokens"].tolist()
        lease.release()
        del view, lease
        gc.collect()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.set_blocking(told, False)
    with pytest.raises(BlockingIOError):
        os.read(told, 16)
    lease.release()
    del view
    gc.collect()
    assert os.read(told, 16) == b"released"
    os.close(told)
    os.close(tell)
    reader.close()


@pytest.mark.parametrize("end", ["pass", "sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_a_reader_that_ends_takes_nothing_from_the_others(ring: SmallRing, end: str) -> None:
    # python/cpython#82300 (BUGS.md H13): an attaching process deleted the segment at its exit.
    payload_bytes = ring.fill(0, 1, **sample_arrays())
    names = shm_names()
    code = f"""
    import os, sys
    from msd_client.batch import Batch
    from msd_client.contract.ring_layout import RingLayout
    from msd_client.ring_reader import RingReader
    layout = RingLayout.decode({ring.layout.encode()})
    lease = RingReader(0, layout).open(0, 1, layout.generation, {payload_bytes})
    batch = Batch.from_lease(lease, as_="numpy")
    print(batch.tokens.sum(), flush=True)
    {end}
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        stdin=ring.segment.fd_read_only,
        env=os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("28\n", "")
    assert done.returncode == {"pass": 0, "sys.exit(1)": 1}.get(end, -9)
    expect_no_names_left(names)
    lease = ring.reader.open(0, 1, GENERATION, payload_bytes)
    assert numpy_field(lease, "tokens").sum() == 28


def test_a_slot_waits_for_the_event_of_its_device_copy(ring: SmallRing) -> None:
    lease, event = ring.lease(), FakeEvent()
    lease.hold_until(event, [numpy_field(lease, "tokens")])
    lease.release()
    del lease
    gc.collect()
    assert ring.reader.poll() == 1
    assert ring.released == []
    event.is_done = True
    assert ring.reader.pending_count == 1
    assert ring.reader.poll() == 0
    assert ring.released == [(0, 1)]


def test_opening_the_next_slot_lets_go_of_completed_copies(ring: SmallRing) -> None:
    events = [FakeEvent(), FakeEvent()]
    for slot, event in enumerate(events):
        lease = ring.lease(slot, slot)
        lease.hold_until(event, lease.memory)
        del lease
    events[1].is_done = True
    lease = ring.lease(2, 2)
    assert ring.released == [(1, 1)]
    assert ring.reader.held == {0: 0, 2: 2}
    del lease


def test_waiting_for_a_copy_waits_for_the_oldest(ring: SmallRing) -> None:
    events = [FakeEvent(), FakeEvent()]
    for slot, event in enumerate(events):
        lease = ring.lease(slot, slot)
        lease.hold_until(event, lease.memory)
        del lease
    assert ring.reader.wait_oldest_copy()
    assert (events[0].is_done, events[1].is_done) == (True, False)
    assert ring.released == [(0, 0)]
    assert ring.reader.wait_oldest_copy()
    assert not ring.reader.wait_oldest_copy()
    assert ring.released == [(0, 0), (1, 1)]


def test_ten_thousand_leases_leave_nothing_behind(ring: SmallRing) -> None:
    payload_bytes = ring.fill(0, 1, **sample_arrays())
    for _ in range(10_000):
        Batch.from_lease(ring.reader.open(0, 1, GENERATION, payload_bytes), as_="numpy")
    assert len(ring.reader.released) == 10_000
    assert ring.reader.held == {}
