"""A job that runs, ranks that read it at a pace, and the verdict that its daemon has on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msd_client.contract.errors import NotFoundError
from tests.support.node import Node, wait_until, write_job
from tests.support.sources import ROOT

VERDICT_S = 40.0
"""Most time that a verdict may take on a machine that has other things to do."""


class Trainer:
    """Ranks as threads: each holds a batch for a while and gives it back."""

    def __init__(self, node: Node, job: Any, mesh: dict[str, int], hold_s: float) -> None:
        self.hold_s = hold_s
        self.hang = threading.Event()
        """Set: no rank gives back what it has."""
        self.go_on = threading.Event()
        self._end = threading.Event()
        self.errors: list[BaseException] = []
        ranks = 1
        for size in mesh.values():
            ranks *= size
        self._threads = [
            threading.Thread(target=self._read, args=(node, job, mesh, rank))
            for rank in range(ranks)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, node: Node, job: Any, mesh: dict[str, int], rank: int) -> None:
        try:
            with node.connect(job, mesh, rank) as data:
                for step in data.train:
                    for batch in step:
                        if self.hang.is_set():
                            self.go_on.wait()
                        self._end.wait(self.hold_s)
                        del batch
                    if self._end.is_set():
                        return
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def close(self) -> None:
        self._end.set()
        self.go_on.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def trainer(
    node: Node, job: Any, mesh: dict[str, int], *, hold_s: float = 0.0
) -> Iterator[Trainer]:
    ranks = Trainer(node, job, mesh, hold_s)
    try:
        yield ranks
    finally:
        ranks.close()


_RANK = """
import sys
from pathlib import Path
from tests.support.node import Node
import json
node = Node(None, Path(sys.argv[1]), Path("."))
with node.connect(json.loads(Path(sys.argv[2]).read_text()), {"dp": int(sys.argv[4])}, int(sys.argv[3])) as data:
    for step in data.train:
        for batch in step:
            del batch
"""


@contextlib.contextmanager
def rank_process(
    node: Node, job: dict[str, Any], folder: Path, rank: int, dp: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a rank that reads as fast as it can, as a process that may be stopped."""
    path = write_job(folder / "job.json", job)
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(node.socket), str(path), str(rank), str(dp)], cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def verdict_of(node: Node) -> dict[str, Any]:
    try:
        found: dict[str, Any] = node.request("why").get("verdict", {})
    except NotFoundError:
        return {}  # it has yet to begin
    return found


def has_begun(node: Node) -> bool:
    """True where a job runs and its ranks were given batches, whatever the verdict is."""
    jobs = node.request("status")["jobs"]
    return bool(jobs) and any(ring["published"] for ring in jobs[0].get("rings", ()))


def wait_begun(node: Node) -> None:
    wait_until(lambda: has_begun(node), lambda: f"a first batch\n{node.log[-3000:]}", 60)


def wait_fine(node: Node) -> None:
    """Wait until a job runs and nobody waits for long."""
    wait_begun(node)
    wait_until(
        lambda: verdict_of(node).get("cause") in ("none", "trainer_paced"),
        lambda: f"a fine verdict, it is {verdict_of(node)}",
        60,
    )


def wait_cause(node: Node, cause: str, level: str = "") -> dict[str, Any]:
    """Wait for a verdict of this cause, and of a level where one is given; return it."""
    last: dict[str, Any] = {}

    def is_there() -> bool:
        last.clear()
        last.update(verdict_of(node))
        return last.get("cause") == cause and level in ("", last["level"])

    wait_until(is_there, lambda: f"{cause}, the verdict is {last}\n{node.log[-3000:]}", VERDICT_S)
    return last


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process by SIGSTOP for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
