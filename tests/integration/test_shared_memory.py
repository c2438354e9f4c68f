"""Shared memory that is small, that fills up, and whose readers come and go (H13, H14)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import SegmentUnavailableError
from tests.support.node import (
    Node,
    RankRecord,
    read_steps,
    run_ranks,
    text_job,
    wait_until,
    write_job,
)
from tests.support.shm_names import expect_no_names_left, shm_names
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes

BATCHES = int(os.environ.get("MSD_SOAK_BATCHES", "10000"))


# ---- a small file system (H14) -------------------------------------------------------------------


def on_small_shm(size: str) -> tuple[str, ...]:
    """Return the command that runs another one with a /dev/shm of its own."""
    unshare = ("unshare", "-m") if os.getuid() == 0 else ("unshare", "-rm")
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"'
    prefix = (*unshare, "sh", "-c", script)
    if not shutil.which("unshare"):
        pytest.skip("unshare is not here")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace of our own here: {tried.stderr.strip()}")
    return prefix


def shm_of(node: Node) -> Path:
    return Path(f"/proc/{node.process.pid}/root/dev/shm")


def free_bytes(node: Node) -> int:
    found = os.statvfs(shm_of(node))
    return found.f_bavail * found.f_frsize


def test_a_ring_larger_than_dev_shm_is_refused_at_once_with_the_numbers(
    start_node: Any, tmp_path: Path
) -> None:
    node = start_node(prefix=on_small_shm("16m"), environ={"MSD__MEMORY__SEGMENT": "shm"})
    job = text_job(
        tmp_path,
        batch={"rows": 16, "row_tokens": 65536, "microbatch_rows": 16, "packing": "concat"},
    )
    before = free_bytes(node)
    began = time.monotonic()
    with pytest.raises(SegmentUnavailableError) as caught:
        run_ranks(node, job, {"dp": 1}, 1)
    assert time.monotonic() - began < 5
    said = caught.value.attributes
    assert said["mount"] == "/dev/shm"
    assert said["needed_bytes"] > said["available_bytes"]  # type: ignore[operator]
    for number in ("needed_bytes", "available_bytes"):
        assert str(said[number]) in caught.value.message
    assert "memfd" in caught.value.message
    wait_until(node.is_at_rest, node.holdings)
    assert free_bytes(node) == before == 16 << 20
    assert os.listdir(shm_of(node)) == []
    descriptors = node.descriptors()
    small = text_job(tmp_path, name="little", batch={"rows": 4, "microbatch_rows": 1})
    with pytest.raises(SegmentUnavailableError, match="ring 0"):  # the pool alone fills it
        run_ranks(node, small, {"dp": 1}, 1)
    wait_until(node.is_at_rest, node.holdings)
    assert free_bytes(node) == 16 << 20
    wait_until(lambda: node.descriptors() <= descriptors, node.holdings)


def test_auto_goes_on_in_memory_files_and_says_so(start_node: Any, tmp_path: Path) -> None:
    node = start_node(prefix=on_small_shm("16m"))
    job = text_job(tmp_path)
    (oracle,) = run_ranks(start_node(), job, {"dp": 1}, 8)
    shown: list[Any] = []

    def look(data: Any, step: Any, _record: Any) -> None:
        if step.number == 3:
            shown.append(node.request("status")["jobs"][0]["rings"])
            told = subprocess.run(
                [sys.executable, "-m", "msd_client.msdctl.main", "status", "--socket", str(node.socket)],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            shown.append(told.stdout + told.stderr)

    (record,) = run_ranks(node, job, {"dp": 1}, 8, on_step=look)
    assert record.rows == oracle.rows
    assert {ring["segment"] for ring in shown[0]} == {"memfd"}
    assert "memfd" in shown[1]
    assert "/dev/shm has" in node.log
    assert "taking a sealed memory file instead" in node.log


@pytest.mark.parametrize(
    "batches", [400, pytest.param(BATCHES, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_a_file_system_filled_by_another_process_costs_nothing(
    start_node: Any, tmp_path: Path, batches: int
) -> None:
    node = start_node(prefix=on_small_shm("100m"), environ={"MSD__MEMORY__SEGMENT": "shm"})
    job = text_job(tmp_path, batch={"rows": 16, "row_tokens": 512, "microbatch_rows": 2})
    (oracle,) = run_ranks(start_node(), job, {"dp": 1}, batches // 8)
    left: list[int] = []

    def fill_up(data: Any, step: Any, _record: Any) -> None:
        if step.number == 0:
            with (
                (shm_of(node) / "hog").open("wb", buffering=0) as hog,
                contextlib.suppress(OSError),
            ):
                while hog.write(bytes(1 << 20)):
                    pass
            left.append(free_bytes(node))

    (record,) = run_ranks(node, job, {"dp": 1}, batches // 8, on_step=fill_up)
    assert left == [0]
    assert record.rows == oracle.rows
    assert node.process.poll() is None


# ---- readers that end (H13) ----------------------------------------------------------------------

READER = """
import os, signal, sys
import msd_client
job, daemon, how = sys.argv[1:]
data = msd_client.connect(job, mesh={"tp": 4}, rank=3, daemon=daemon, as_="numpy")
for step in data.train:
    for batch in step:
        tokens = batch.tokens
    if step.number >= 2:
        print("read", flush=True)
        if how == "exit 1":
            sys.exit(1)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        break
"""


def python_of(version: str) -> str:
    """Return this Python, or a 3.13 or later that has what the client needs."""
    if version == "this":
        return sys.executable
    for name in ("python3.13", "python3.14"):
        path = shutil.which(name)
        if path is None:
            continue
        tried = subprocess.run(
            [path, "-c", "import numpy, msgpack"], capture_output=True, check=False, cwd=ROOT
        )
        if not tried.returncode:
            return path
    pytest.skip("no other Python 3.13 or later with numpy and msgpack is here")


@pytest.mark.parametrize("version", ["this", "3.13"])
def test_readers_that_end_in_any_way_take_nothing_with_them(
    start_node: Any, tmp_path: Path, version: str
) -> None:
    python = python_of(version)
    node = start_node()
    path = write_job(tmp_path / "small.yaml", text_job(tmp_path))
    (oracle,) = run_ranks(node, path, {"dp": 1}, 40)
    names = shm_names()
    wanted = {"normal": 0, "exit 1": 1, "killed": -signal.SIGKILL}
    for how, status in wanted.items():
        # Started by a shell that ends: neither the daemon's child nor ours.
        err = tmp_path / f"err {how}"
        with err.open("wb") as stderr:
            reader = subprocess.Popen(
                [python, "-c", READER, str(path), str(node.socket), how],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            records = read_the_others(node, path)
            assert reader.wait(20) == status, err.read_text()
            assert reader.stdout is not None
            reader.stdout.close()
        for record in records:
            assert record.rows == oracle.rows
        said = err.read_text()
        assert said == "", said  # no "leaked shared_memory", no KeyError of a tracker
        expect_no_names_left(names)
        wait_until(node.is_at_rest, node.holdings)


def read_the_others(node: Node, path: Path) -> list[RankRecord]:
    """Let ranks 0-2 read 40 steps while the fourth comes and ends."""
    records = [RankRecord() for _ in range(3)]
    errors: list[BaseException] = []

    def read(rank: int) -> None:
        try:
            with node.connect(path, {"tp": 4}, rank) as data:
                read_steps(data, records[rank], 40, keep_states=False, on_step=None)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), node.log
    if errors:
        raise errors[0]
    return records
