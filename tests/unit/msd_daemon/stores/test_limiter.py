"""The node's limit of requests to a host: shared by processes, given back by the dead, recovering."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from msd_daemon.stores.limiter import (
    DOUBLING_S,
    GROWTH_SLOTS_PER_S,
    HOLD_S,
    QUIET_S,
    HostGate,
    Window,
)

HOLDER = """
import sys, time
from pathlib import Path
from msd_daemon.stores.limiter import HostGate
gate = HostGate(Path(sys.argv[1]), "host", 3)
held = [gate.enter(time.monotonic() + 5) for _ in range(int(sys.argv[2]))]
print(len(held), flush=True)
sys.stdin.read()
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def gate_of(folder: Path, clock: Clock, host: str = "host", slots: int = 64) -> HostGate:
    return HostGate(folder, host, slots, clock=clock, sleep=clock.sleep, draw=lambda: 0.5)


def test_a_burst_of_throttling_cuts_once_and_a_lasting_one_goes_on() -> None:
    window = Window(64.0)
    for _ in range(50):
        window = window.after_throttling(10.0, 0.0, 64)
    assert window.slots_at(10.0, 64) == 32.0
    for step in range(1, 20):
        window = window.after_throttling(10.0 + step * HOLD_S, 0.0, 64)
    assert window.slots == pytest.approx(GROWTH_SLOTS_PER_S, abs=0.01)  # where growth meets cuts


def test_full_rate_is_back_within_seconds_once_it_is_quiet() -> None:
    window = Window(1.0, cut_at_s=10.0)
    assert window.slots_at(10.0, 64) == 1.0
    assert window.slots_at(11.0, 64) == 5.0
    assert window.slots_at(10.0 + QUIET_S, 64) == 13.0
    assert window.slots_at(10.0 + QUIET_S + DOUBLING_S, 64) == 26.0
    assert window.slots_at(10.0 + QUIET_S + 3 * DOUBLING_S, 64) == 64.0
    assert window.slots_at(1e9, 1024) == 1024.0
    assert window.slots_at(10.0 + 10.0, 1024) == 1024.0


def test_throttling_told_by_one_process_is_obeyed_by_all_and_by_no_other_host(
    tmp_path: Path,
) -> None:
    clock = Clock()
    mine, theirs = gate_of(tmp_path / "g", clock), gate_of(tmp_path / "g", clock)
    other = gate_of(tmp_path / "g", clock, host="elsewhere")
    mine.throttled(0.0)
    clock.now += HOLD_S
    mine.throttled(5.0)
    assert theirs.window().slots == (32.0 + GROWTH_SLOTS_PER_S * HOLD_S) / 2
    assert other.window() == Window(64.0)
    assert other.enter(clock.now + 1) is not None
    assert clock.sleeps == []
    begun = clock.now
    slot = theirs.enter(clock.now + 60)
    assert slot is not None
    assert clock.now - begun == 5.5  # Retry-After and its share of a second of spread
    for gate in (mine, theirs, other):
        gate.close()


def test_all_processes_use_fewer_slots_after_throttling_and_all_again_later(
    tmp_path: Path,
) -> None:
    clock = Clock()
    mine, theirs = gate_of(tmp_path / "g", clock, slots=8), gate_of(tmp_path / "g", clock, slots=8)
    mine.throttled(0.0)
    held = [theirs.enter(clock.now) for _ in range(4)]
    assert sorted(slot for slot in held if slot is not None) == [0, 1, 2, 3]
    assert mine.enter(clock.now) is None
    clock.now += QUIET_S
    held = [mine.enter(clock.now) for _ in range(4)]
    assert sorted(slot for slot in held if slot is not None) == [4, 5, 6, 7]
    mine.close()
    theirs.close()


def test_no_slot_before_the_deadline_is_told(tmp_path: Path) -> None:
    clock = Clock()
    gate = gate_of(tmp_path / "g", clock, slots=2)
    first, second = gate.enter(clock.now), gate.enter(clock.now)
    assert {first, second} == {0, 1}
    assert gate.enter(clock.now + 1.0) is None
    assert 1000.9 < clock.now <= 1001.0
    assert first is not None
    gate.leave(first)
    assert gate.enter(clock.now) == first
    gate.close()


def test_slots_are_shared_with_other_processes_and_outlive_no_one(tmp_path: Path) -> None:
    gate = HostGate(tmp_path / "g", "host", 3)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "g"), "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "2\n"
    mine = gate.enter(time.monotonic() + 5)
    assert mine is not None
    assert gate.enter(time.monotonic()) is None  # three are held
    holder.kill()
    holder.wait()
    again = {gate.enter(time.monotonic() + 5), gate.enter(time.monotonic() + 5)}
    assert len(again | {mine}) == 3
    holder.stdin.close()
    holder.stdout.close()
    gate.close()


@pytest.mark.parametrize("content", [b"", b"x" * 5, b"\xff" * 36, b"\0" * 100])
def test_a_torn_or_foreign_window_is_a_full_one(tmp_path: Path, content: bytes) -> None:
    clock = Clock()
    gate = gate_of(tmp_path / "g", clock)
    (file,) = (tmp_path / "g").glob("*/window")
    file.write_bytes(content)
    assert gate.window() == Window(64.0)
    gate.throttled(0.0)
    assert gate.window().slots == 32.0
    gate.close()


def test_times_of_an_earlier_boot_do_not_close_the_gate(tmp_path: Path) -> None:
    clock = Clock()
    gate = gate_of(tmp_path / "g", clock)
    gate.throttled(100.0)
    clock.now = 5.0
    assert gate.window() == Window(64.0)
    assert gate.enter(clock.now) is not None
    gate.close()
