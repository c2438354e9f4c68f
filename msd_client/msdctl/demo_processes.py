"""Processes of the demo: its own daemon, the ranks, and the search for anything left behind.

Every process carries a mark in its environment, so the search at the end finds also what was
forked, orphaned or renamed. All run in sessions of their own: Ctrl-C reaches the demo alone, which
ends them in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msd_client.contract.errors import DaemonUnavailableError

MARK = "MSD_DEMO_MARK"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
KILL_AFTER_S = 5.0
LOOK_S = 0.05
SHM_DIR = Path("/dev/shm")  # noqa: S108 - only looked at
SEMAPHORE_PREFIX = "sem."
"""Of POSIX semaphores: msd has none."""

_LAUNCHER_KEYS = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LD_PRELOAD",
    }
)
_LAUNCHER_PREFIXES = (
    "MSD_", "TORCHELASTIC_", "SLURM", "OMPI_", "MV2_", "PMI_", "PMIX_", "RAY_"
)  # fmt: skip


def marked_environ(mark: str, **more: str) -> dict[str, str]:
    """Return the environment of a process of the demo, without a launcher's or another daemon's."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCHER_KEYS and not key.startswith(_LAUNCHER_PREFIXES)
    }
    # The package is found also where the demo runs from a source tree that is not installed.
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return kept | one | {MARK: mark, "PYTHONPATH": os.pathsep.join(paths)} | more


class DaemonProcess:
    """The demo's own daemon; `stop` ends it.

    Args:
        folder: Socket, lock, state and log are put there.
        environ: From `marked_environ`.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.socket = folder / "d.sock"
        self.log = folder / "daemon.log"
        command = [
            sys.executable, "-m", "msd_daemon", "--socket", str(self.socket), "--runtime-dir",
            str(folder), "--state-dir", str(folder / "state"), "--idle-exit-s", "60",
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environ),
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait for its socket.

        Raises:
            DaemonUnavailableError: It ended, or took too long; the end of its log is told.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.socket.exists():
            status = self.process.poll()
            if status is not None or time.monotonic() > deadline:
                what = f"ended with status {status}" if status is not None else "does not answer"
                raise DaemonUnavailableError(f"the demo's daemon {what}:\n{tail(self.log)}")
            time.sleep(LOOK_S)

    def stop(self) -> bool:
        """End it; True where it drained and ended by itself with status 0."""
        return _end([self.process], STOP_TIMEOUT_S) and self.process.returncode == 0


class RankProcesses:
    """The ranks of the trainer and what they say, one JSON object a line."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], count: int, environ: Mapping[str, str]
    ) -> None:
        self.logs = [folder / f"rank-{rank}.log" for rank in range(count)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._rests: dict[int, bytes] = {}
        command = [sys.executable, "-m", "msd_client.msdctl.demo_trainer", *arguments]
        for rank, log_path in enumerate(self.logs):
            own = {**environ, "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=own,
                    start_new_session=True,
                )
            self.processes.append(process)
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, rank)
            self._rests[rank] = b""

    @property
    def is_talking(self) -> bool:
        """True while at least one rank has not closed its output."""
        return bool(self._selector.get_map())

    def messages(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Give what ranks said, after waiting at most so long for the first word."""
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                continue
            *lines, self._rests[key.data] = (self._rests[key.data] + data).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def failed(self) -> list[tuple[int, int]]:
        """Return (rank, status) of ranks that ended otherwise than with 0."""
        statuses = [(rank, process.poll()) for rank, process in enumerate(self.processes)]
        return [(rank, status) for rank, status in statuses if status]

    def wait(self, timeout_s: float) -> bool:
        """Wait for all to end by themselves; True where they did."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def stop(self) -> None:
        """End those that still run, and close their pipes."""
        _end(self.processes, KILL_AFTER_S)
        self._selector.close()
        for process in self.processes:
            if process.stdout is not None:
                process.stdout.close()


def _end(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Terminate, wait, and kill what is still there; True where nothing had to be killed."""
    is_clean = True
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            is_clean = False
    return is_clean


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Return (pid, name) of living processes that carry the mark, this one aside."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours
            environ = Path(entry.path, "environ").read_bytes()
            if wanted in environ.split(b"\0"):
                name = Path(entry.path, "comm").read_text(errors="replace").strip()
                found.append((int(entry.name), name))
    return sorted(found)


def shared_names() -> set[str]:
    """Return the names of this user's segments in /dev/shm."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM_DIR):
            if entry.name.startswith(SEMAPHORE_PREFIX):
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.add(entry.name)
    return found


def leftovers(mark: str, names_before: set[str], timeout_s: float = 5.0) -> list[str]:
    """Return what the demo left behind, after giving it a moment to go: processes, names in /dev/shm."""
    deadline = time.monotonic() + timeout_s
    names = shared_names() - names_before
    while True:
        found = [f"process {pid} ({name})" for pid, name in marked_processes(mark)]
        # Not those that came meanwhile: another daemon's segment has a name for a moment, too.
        names &= shared_names()
        found += [f"{SHM_DIR}/{name}" for name in sorted(names)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(LOOK_S)


def tail(path: Path, lines: int = 12) -> str:
    """Return the last lines of a log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({path}: {error.strerror})"
