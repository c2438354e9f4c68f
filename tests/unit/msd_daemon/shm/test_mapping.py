"""Mappings: aligned, read-only where they say so, never taken down under a live view."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest

from msd_client.contract.errors import SegmentUnavailableError
from msd_daemon.shm.mapping import HUGE_PAGE_BYTES, map_read_only, map_read_write
from msd_daemon.shm.segment import Segment, make_segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = make_segment(4 << 20, "auto", "test")
    yield made
    made.close()


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return any(
            int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
            for line in maps
        )


def test_writes_of_one_mapping_are_seen_by_the_other(segment: Segment) -> None:
    writer = map_read_write(segment.fd_read_write, segment.nbytes)
    reader = map_read_only(segment.fd_read_only, segment.nbytes, should_populate=True)
    assert writer.address % HUGE_PAGE_BYTES == 0
    assert reader.address % HUGE_PAGE_BYTES == 0
    writer.view[5:8] = b"msd"
    assert bytes(reader.view[4:9]) == b"\0msd\0"
    assert writer.close()
    assert reader.close()


def test_a_reader_cannot_write_through_its_view(segment: Segment) -> None:
    reader = map_read_only(segment.fd_read_only, segment.nbytes)
    with pytest.raises(TypeError, match="read-only"):
        reader.view[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(reader.view, np.uint8)[0] = 1
    assert reader.close()


def test_a_readers_descriptor_cannot_be_mapped_for_writing(segment: Segment) -> None:
    with pytest.raises(SegmentUnavailableError, match="Permission denied"):
        map_read_write(segment.fd_read_only, segment.nbytes)


def test_a_write_behind_pythons_back_kills_the_reader_and_spares_the_segment(
    segment: Segment,
) -> None:
    code = """
    import ctypes, os, resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from msd_daemon.shm.mapping import map_read_only
    mapping = map_read_only(0, 4 << 20)
    print(bytes(mapping.view[:3]).decode(), flush=True)
    ctypes.memset(mapping.address, 1, 1)
    """
    os.pwrite(segment.fd_read_write, b"msd", 0)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=segment.fd_read_only,
        env=os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "msd\n"
    assert done.returncode == -signal.SIGSEGV
    assert os.pread(segment.fd_read_write, 3, 0) == b"msd"


def test_closing_waits_for_the_last_view(segment: Segment) -> None:
    mapping = map_read_write(segment.fd_read_write, segment.nbytes)
    address = mapping.address
    array = np.frombuffer(mapping.view, np.int32, 10)
    part = array[2:4].reshape(2, 1)
    del array
    assert not mapping.close()
    part[:] = 9
    assert mapping.is_mapped
    assert is_mapped(address)
    del part
    gc.collect()
    assert not mapping.is_mapped
    assert not is_mapped(address)
    assert mapping.close()
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.view


def test_a_forgotten_mapping_goes_with_its_object(segment: Segment) -> None:
    mapping = map_read_write(segment.fd_read_write, segment.nbytes)
    address = mapping.address
    del mapping
    gc.collect()
    assert not is_mapped(address)


def test_nothing_of_the_reserved_slack_stays_mapped(segment: Segment) -> None:
    def mapped_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * 4096

    mapping = map_read_only(segment.fd_read_only, segment.nbytes)
    mapping.close()
    before = mapped_bytes()
    for _ in range(50):
        mapping = map_read_only(segment.fd_read_only, segment.nbytes)
        assert mapping.close()
    assert mapped_bytes() - before < segment.nbytes


def test_the_descriptor_may_close_before_the_mapping() -> None:
    made = make_segment(4096, "memfd", "test")
    mapping = map_read_write(made.fd_read_write, made.nbytes)
    made.close()
    mapping.view[0] = 3
    assert mapping.view[0] == 3
    assert mapping.close()


@pytest.mark.parametrize("nbytes", [0, -4096, (4 << 20) + 4096])
def test_more_than_the_segment_is_refused_before_it_can_be_a_bus_error(
    segment: Segment, nbytes: int
) -> None:
    with pytest.raises(SegmentUnavailableError):
        map_read_only(segment.fd_read_only, nbytes)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_mapping_alone(segment: Segment) -> None:
    mapping = map_read_write(segment.fd_read_write, segment.nbytes)
    mapping.view[0] = 42
    pid = os.fork()
    if pid == 0:
        closed = mapping.close()
        # The range must still be there: had it been unmapped, something else could lie in it now.
        os._exit(0 if closed and is_mapped(mapping.address) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mapping.view[0] == 42
    assert mapping.close()
