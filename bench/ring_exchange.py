"""Slots on their way from a constructor over the hub to readers, all in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.processes import ROOT

PAYLOAD_BYTES = 16 << 20
READERS = (1, 4)
PAUSE_MS = 0.5
QUIET_CORES = 0.1
PACE_MS = 4.0
"""From one announcement to the next build: every queue is empty by then."""
WARMUP = 20
END_S = 20.0


class Process:
    """One process of the bench; its output is JSON lines."""

    def __init__(self, module: str, *arguments: object, fds: tuple[int, ...] = ()) -> None:
        self._inside = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        self.pid = self._inside.pid

    def hear(self) -> dict[str, Any]:
        """Return the next line."""
        assert self._inside.stdout is not None
        line = self._inside.stdout.readline()
        if not line:
            raise RuntimeError(f"process {self.pid} ended: status {self._inside.wait()}")
        words: dict[str, Any] = json.loads(line)
        return words

    def close_input(self) -> None:
        assert self._inside.stdin is not None
        with contextlib.suppress(OSError):
            self._inside.stdin.close()

    def end(self) -> None:
        """Wait for its end, kill it where it does not come."""
        self.close_input()
        try:
            self._inside.wait(END_S)
        except subprocess.TimeoutExpired:
            self._inside.kill()
            self._inside.wait()
        assert self._inside.stdout is not None
        self._inside.stdout.close()

    def kill(self) -> None:
        self._inside.kill()

    def cpu_ns(self) -> int:
        """CPU of all its threads; the kernel counts in ns and adds up at every switch."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks)


@dataclass
class Group:
    """Hub, constructor and readers of one run."""

    hub: Process
    constructor: Process
    readers: list[Process]


@contextlib.contextmanager
def running(
    readers: int, count: int, *, idle_s: float = 0.0, pause_ms: float = 0.0
) -> Iterator[Group]:
    """Start the processes of one run; end them all."""
    with tempfile.TemporaryDirectory(prefix="msd-bench-") as folder:
        path = f"{folder}/ring.sock"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        started: list[Process] = []

        def start(*arguments: object, fds: tuple[int, ...] = ()) -> Process:
            started.append(Process(*arguments, fds=fds))  # type: ignore[arg-type]
            return started[-1]

        try:
            numbers = ("--count", count, "--warmup", WARMUP)
            hub = start(
                "bench.ring_hub", "--fd", ours.fileno(), "--socket", path, "--readers", readers,
                "--payload-bytes", PAYLOAD_BYTES, *numbers, fds=(ours.fileno(),),
            )  # fmt: skip
            fd = theirs.fileno()
            constructor = start(
                "bench.ring_roles", "constructor", "--fd", fd, "--pace-ms", PACE_MS, fds=(fd,)
            )
            ours.close()
            theirs.close()
            hub.hear()
            ranks = [
                start(
                    "bench.ring_roles",
                    "reader",
                    "--socket",
                    path,
                    "--rank",
                    rank,
                    "--idle-s",
                    idle_s,
                    "--pause-ms",
                    pause_ms,
                    *numbers,
                )
                for rank in range(readers)
            ]
            yield Group(hub, constructor, ranks)
        except BaseException:
            for process in started:
                process.kill()
            raise
        finally:
            for process in started:
                process.end()


def _busy_s() -> float:
    """CPU seconds of the whole machine so far."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass
class Exchange:
    """What one run of slots showed, in microseconds."""

    wake: float
    """Slot committed -> the last reader is awake with the announcement in hand."""
    opened: float
    """Slot committed -> the last reader holds a checked lease of it."""
    wake_p99: float
    daemon_cpu: float
    reader_cpu: float
    foreign_cores: float
    """Cores that other processes used meanwhile: above some tenths it's no idle machine."""


def exchange(readers: int, count: int, pause_ms: float) -> Exchange:
    """Run `count` slots; the first `WARMUP` of them do not count.

    Args:
        readers: Reader processes.
        count: Slots.
        pause_ms: What a reader waits between waking up and opening the slot. With more readers than
            cores the last one's wake-up would else wait for the others' use of the slot as well.
    """
    with running(readers, count, pause_ms=pause_ms) as group:
        for reader in group.readers:
            assert reader.hear()["at"] == "warm"
        own = [group.hub, group.constructor, *group.readers]
        began, busy_s, own_ns = time.monotonic(), _busy_s(), sum(p.cpu_ns() for p in own)
        daemon_cpu_us = group.hub.hear()["cpu_us"]
        own_s = (sum(p.cpu_ns() for p in own) - own_ns) / 1e9
        foreign_cores = (_busy_s() - busy_s - own_s) / (time.monotonic() - began)
        told = [reader.hear() for reader in group.readers]
        group.hub.close_input()
        committed = np.array(group.constructor.hear()["stamps_ns"])[WARMUP:]
    spans = {
        key: (np.array([t[key] for t in told])[:, WARMUP:].max(axis=0) - committed) / 1e3
        for key in ("taken_ns", "opened_ns")
    }
    return Exchange(
        wake=float(np.median(spans["taken_ns"])),
        opened=float(np.median(spans["opened_ns"])),
        wake_p99=float(np.percentile(spans["taken_ns"], 99)),
        daemon_cpu=daemon_cpu_us,
        reader_cpu=median(t["cpu_ns"] for t in told) / 1e3 / (count - WARMUP),
        foreign_cores=max(foreign_cores, 0.0),
    )


def run_exchanges(*, is_quick: bool, say: Callable[..., None]) -> dict[str, float]:
    """Return wake-up times and CPU with 1 and with 4 readers; medians over alternating runs."""
    runs, count = (2, 320) if is_quick else (5, 1020)
    seen: dict[int, list[Exchange]] = {readers: [] for readers in READERS}
    used: dict[int, list[Exchange]] = {readers: [] for readers in READERS}
    for number in range(runs):
        for readers in READERS:
            one = exchange(readers, count, PAUSE_MS)
            busy = exchange(readers, count, 0.0)
            seen[readers].append(one)
            used[readers].append(busy)
            say(
                f"  run {number}, {readers} readers: wake {one.wake:.0f} us (p99 {one.wake_p99:.0f}); "
                f"opening at once: wake {busy.wake:.0f}, opened {busy.opened:.0f}; "
                f"daemon {one.daemon_cpu:.0f} us, reader {one.reader_cpu:.0f} us, "
                f"others {one.foreign_cores:.2f} cores"
            )
    figures: dict[str, float] = {}
    for readers in READERS:
        results, opening = _quiet(seen[readers]), _quiet(used[readers])
        figures[f"wake_p50_us_{readers}"] = _middle(results, "wake")
        figures[f"wake_opening_p50_us_{readers}"] = _middle(opening, "wake")
        figures[f"opened_p50_us_{readers}"] = _middle(opening, "opened")
        figures[f"daemon_cpu_us_{readers}"] = _middle(results, "daemon_cpu")
        figures[f"reader_cpu_us_{readers}"] = _middle(results, "reader_cpu")
    figures["foreign_cores"] = round(
        median(one.foreign_cores for results in seen.values() for one in _quiet(results)), 2
    )
    figures["daemon_cpu_us"] = max(figures[f"daemon_cpu_us_{readers}"] for readers in READERS)
    figures["reader_cpu_us"] = max(figures[f"reader_cpu_us_{readers}"] for readers in READERS)
    return figures


def _quiet(results: list[Exchange]) -> list[Exchange]:
    """Return the runs of an idle machine; all, where others kept it busy (`foreign_cores` says so)."""
    return [one for one in results if one.foreign_cores < QUIET_CORES] or results


def _middle(results: list[Exchange], name: str) -> float:
    return round(median(getattr(result, name) for result in results), 1)


def run_idle(*, is_quick: bool, say: Callable[..., None]) -> dict[str, float]:
    """Return the share of a core that a rank takes while it waits for a slot that never comes."""
    seconds = 3.0 if is_quick else 6.0
    with running(1, WARMUP + 1, idle_s=seconds + 1.5) as group:
        (reader,) = group.readers
        while reader.hear()["at"] != "idle":
            continue
        time.sleep(0.3)
        began, used_ns = time.monotonic(), reader.cpu_ns()
        time.sleep(seconds)
        used_ns = reader.cpu_ns() - used_ns
        percent = 100 * used_ns / 1e9 / (time.monotonic() - began)
        told = reader.hear()
        assert told["at"] == "deadline", told
        say(f"  {percent:.4f} % of a core; then: {told['text']}")
        group.hub.close_input()
    return {"idle_cpu_pct": round(percent, 4)}
