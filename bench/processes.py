"""Processes of a bench: started, marked, measured as whole trees, ended."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from msd_daemon.services.processes import memory_of

ROOT = Path(__file__).resolve().parent.parent


def tree_of(pids: list[int]) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                found[member.pid] = member
    return list(found.values())


def cpu_s(pids: list[int]) -> float:
    return sum(cpu_s_of(process.pid) for process in tree_of(pids))


def cpu_s_of(pid: int) -> float:
    """Seconds on a CPU of all threads of a process, user and system, to the nanosecond."""
    total = 0
    for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def wait_idle(pids: list[int], timeout_s: float = 60.0) -> None:
    """Wait until a second passes in which the processes used less than a twentieth of a core."""
    deadline = time.monotonic() + timeout_s
    before = cpu_s(pids)
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = cpu_s(pids)
        if now - before < 0.05:
            return
        before = now


@dataclass
class Memory:
    """Bytes of a process tree."""

    anon_and_shmem: int = 0
    file: int = 0
    by_pid: dict[int, int] = field(default_factory=dict)


def memory(pids: list[int]) -> Memory:
    total = Memory()
    for process in tree_of(pids):
        row = memory_of(process.pid)
        if row:
            own = row["pss_anon"] + row["pss_shmem"]
            total.anon_and_shmem += own
            total.by_pid[process.pid] = own
            total.file += row["pss_file"]
    return total


class Ranks:
    """Rank processes that pause at marks."""

    def __init__(
        self, kind: str, ranks: int, arguments: list[str], module: str = "bench.rank"
    ) -> None:
        self.processes = []
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ["PYTHONWARNINGS"] = "ignore"  # a DataLoader's on how many workers it has
        for rank in range(ranks):
            command = [
                sys.executable,
                "-m",
                module,
                kind,
                "--rank",
                str(rank),
                "--ranks",
                str(ranks),
                *arguments,
            ]
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environ,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def wait_mark(self) -> int:
        """Wait until all ranks pause; return the tokens they reported before."""
        tokens = 0
        for process in self.processes:
            while True:
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"rank process {process.pid} ended: status {process.wait()}")
                words = json.loads(line)
                tokens += words.get("tokens", 0)
                if "at" in words:
                    break
        return tokens

    def go(self) -> None:
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.close()
        for process in self.processes:
            process.wait(60)
            process.stdout.close()


class Daemon:
    """A daemon of the bench's own, in a folder of its own."""

    def __init__(self, *arguments: str, **settings: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="msd-bench-")
        folder = Path(self._folder.name)
        os.chmod(folder, 0o750)
        self.socket = folder / "d.sock"
        self.log = (folder / "log").open("wb")
        command = [
            sys.executable, "-m", "msd_daemon", "--socket", str(self.socket), "--runtime-dir", str(folder),
            "--state-dir", str(folder / "state"), *arguments,
        ]  # fmt: skip
        environ = {**os.environ, **settings}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stderr=self.log, stdout=self.log
        )
        deadline = time.monotonic() + 20
        while not self.socket.exists():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"daemon did not start: {self.log_text()}")
            time.sleep(0.02)

    def log_text(self) -> str:
        return (Path(self._folder.name) / "log").read_text()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.log.close()
        self._folder.cleanup()
