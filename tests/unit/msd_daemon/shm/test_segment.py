"""Segments: reserved, nameless, sealed, narrow; refusals name the bytes."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from msd_client.contract.errors import SegmentUnavailableError
from msd_daemon.shm.segment import available_memory_bytes, make_segment, shm_available_bytes
from tests.support.shm_names import expect_no_names_left, shm_names

KINDS = ["shm", "memfd"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_has_its_pages_and_no_name(kind: str) -> None:
    before = shm_names()
    segment = make_segment(100_000, kind, "pool")
    try:
        facts = os.fstat(segment.fd_read_write)
        assert segment.nbytes == facts.st_size == 102_400
        assert facts.st_blocks * 512 >= segment.nbytes, "pages are reserved, not just promised"
        assert facts.st_nlink == 0
        assert stat.S_IMODE(facts.st_mode) == 0o600
        expect_no_names_left(before)
        assert segment.kind == kind
    finally:
        segment.close()
        segment.close()
    assert segment.fd_read_write == -1


@pytest.mark.parametrize("kind", KINDS)
def test_the_readers_descriptor_cannot_write(kind: str) -> None:
    segment = make_segment(4096, kind, "ring 0")
    try:
        os.pwrite(segment.fd_read_write, b"msd", 0)
        assert os.pread(segment.fd_read_only, 3, 0) == b"msd"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(segment.fd_read_only, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(segment.fd_read_only, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)
        assert not os.get_inheritable(segment.fd_read_only)
        assert not os.get_inheritable(segment.fd_read_write)
    finally:
        segment.close()


def test_a_memfd_is_sealed_against_any_change_of_size() -> None:
    segment = make_segment(8192, "memfd", "ring 0")
    try:
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(segment.fd_read_write, fcntl.F_GET_SEALS) == wanted
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd_read_write, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.fd_read_write, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        segment.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_more_than_the_memory_is_refused_with_the_numbers(kind: str) -> None:
    before = open_descriptors()
    needed = available_memory_bytes() + (1 << 40)
    with pytest.raises(SegmentUnavailableError, match="pool needs") as caught:
        make_segment(needed, kind, "pool")
    assert caught.value.attributes["needed_bytes"] >= needed
    assert 0 < caught.value.attributes["available_bytes"] < needed
    assert open_descriptors() == before


def test_nothing_is_refused() -> None:
    with pytest.raises(SegmentUnavailableError):
        make_segment(0, "auto", "pool")


def test_without_a_tmpfs_auto_takes_a_memory_file_and_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    segment = make_segment(4096, "auto", "pool", shm_directory=missing)
    try:
        assert segment.kind == "memfd"
        assert missing in segment.fallback_reason
    finally:
        segment.close()
    assert shm_available_bytes(missing) == 0
    with pytest.raises(SegmentUnavailableError, match="memfd"):
        make_segment(4096, "shm", "pool", shm_directory=missing)


def run_on_small_tmpfs(size: str, code: str) -> str:
    """Run code in a mount namespace whose /dev/shm is a tmpfs of `size`; return what it prints."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unprivileged user namespaces are not permitted here")
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "mount:" in done.stderr:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_ring_larger_than_dev_shm_is_refused_and_leaves_nothing() -> None:
    out = run_on_small_tmpfs(
        "16m",
        """
        import os
        from msd_client.contract.errors import SegmentUnavailableError
        from msd_daemon.shm.segment import make_segment
        try:
            make_segment(64 << 20, "shm", "ring 2")
        except SegmentUnavailableError as error:
            print(error.attributes["needed_bytes"], error.attributes["available_bytes"], error)
        print(os.listdir("/dev/shm"), os.statvfs("/dev/shm").f_bfree * 4096)
        """,
    )
    refusal, left = out.splitlines()
    assert refusal.startswith(
        "67108864 16777216 ring 2 needs 67108864 bytes, /dev/shm has 16777216"
    )
    assert left == "[] 16777216"


def test_auto_falls_back_to_a_sealed_memory_file_on_a_small_dev_shm() -> None:
    out = run_on_small_tmpfs(
        "16m",
        """
        import os
        from msd_daemon.shm.mapping import map_read_write
        from msd_daemon.shm.segment import make_segment
        segment = make_segment(64 << 20, "auto", "ring 2")
        mapping = map_read_write(segment.fd_read_write, segment.nbytes)
        mapping.view[-1] = 7
        small = make_segment(1 << 20, "auto", "ring 3")
        print(segment.kind, small.kind, segment.fallback_reason)
        """,
    )
    assert out.startswith("memfd shm ring 2 needs 67108864 bytes, /dev/shm has 16777216")
    assert out.endswith("taking a sealed memory file instead")


def test_a_tmpfs_filled_up_later_never_costs_a_signal() -> None:
    out = run_on_small_tmpfs(
        "100m",
        """
        import contextlib
        from msd_daemon.shm.mapping import map_read_write
        from msd_daemon.shm.segment import make_segment
        segment = make_segment(64 << 20, "shm", "ring 2")
        with open("/dev/shm/hog", "wb", buffering=0) as hog, contextlib.suppress(OSError):
            while True:
                hog.write(bytes(1 << 20))
        mapping = map_read_write(segment.fd_read_write, segment.nbytes, should_populate=False)
        for at in range(0, segment.nbytes, 4096):
            mapping.view[at] = 1
        print("written")
        """,
    )
    assert out == "written"
