"""How many requests this node has open to a host: one limit for all its processes.

A request holds the flock of one of `count` slot files: the kernel gives it back when its holder
dies. How many of them may be used (the window) is a function of time since the host last throttled,
which stands in a small file beside them: halved then, growing by some slots a second, and doubling
once it has been quiet for QUIET_S, so that full rate is back within seconds. A function of time and
not of answers: fast answers would undo a cut at once. Each host has a folder of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from msd_client.contract.paths import PRIVATE_DIR_MODE, prepare_private_dir

HOLD_S = 1.0
"""Throttling within it of the last cut is the same overload, seen by several requests."""
GROWTH_SLOTS_PER_S = 4.0
QUIET_S = 3.0
DOUBLING_S = 0.5
RETRY_AFTER_MAX_S = 120.0
_IDLE_FILES_MAX = 8
_POLL_MIN_S = 0.001
_POLL_MAX_S = 0.05
_STATE = struct.Struct("<8sdddI")
_MAGIC = b"MSDGATE1"

_RANDOM = random.SystemRandom()  # waits must differ between forked processes


@dataclass(frozen=True)
class Window:
    """What was left at the last cut, and when that was. Times are monotonic seconds of the node."""

    slots: float
    cut_at_s: float = -1e9
    closed_until_s: float = -1e9

    def slots_at(self, now_s: float, slots_max: int) -> float:
        """Return how many slots may be used, 1 to `slots_max`."""
        since_s = max(0.0, now_s - self.cut_at_s)
        slots = self.slots + GROWTH_SLOTS_PER_S * min(since_s, QUIET_S)
        doublings = min((since_s - QUIET_S) / DOUBLING_S, 30.0)
        if doublings > 0:
            slots *= 2.0**doublings
        return min(slots, float(slots_max))

    def after_throttling(self, now_s: float, retry_after_s: float, slots_max: int) -> Window:
        """Return the window after a request was throttled."""
        until_s = self.closed_until_s
        if retry_after_s > 0:
            until_s = max(until_s, now_s + min(retry_after_s, RETRY_AFTER_MAX_S))
        if now_s - self.cut_at_s < HOLD_S:
            return replace(self, closed_until_s=until_s)
        return Window(max(1.0, self.slots_at(now_s, slots_max) / 2), now_s, until_s)


class HostGate:
    """Slots of one host, shared by the processes that name the same folder; safe in any thread.

    Args:
        folder: Folder of all hosts' gates.
        host: The host; its name does not appear in file names.
        slots_max: Most requests of the node at a time.
        clock: Monotonic seconds, the same in all processes.
        sleep: Waits so many seconds.
        draw: Gives numbers in [0, 1).

    Raises:
        PermissionDeniedError: The folder belongs to another user or cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        slots_max: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = _RANDOM.random,
    ) -> None:
        prepare_private_dir(folder, os.geteuid())
        name = hashlib.sha256(host.encode()).hexdigest()[:16]
        self._folder = folder / name
        self._folder.mkdir(mode=PRIVATE_DIR_MODE, exist_ok=True)
        self._slots_max = slots_max
        self._clock = clock
        self._sleep = sleep
        self._draw = draw
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}  # slot to the descriptor that holds its flock
        self._idle: dict[int, int] = {}  # slot to its open, unlocked descriptor
        self._state = os.open(self._folder / "window", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def enter(self, deadline_s: float) -> int | None:
        """Return a slot once there is one, None where the deadline (of the clock) passed before."""
        poll_s = _POLL_MIN_S
        while True:
            window = self.window()
            now_s = self._clock()
            closed_s = window.closed_until_s - now_s
            if closed_s <= 0:
                slot = self._take(int(window.slots_at(now_s, self._slots_max)))
                if slot is not None:
                    return slot
            # A closed gate opens for all waiters at once: they come in spread over a second.
            wait_s = poll_s * (0.5 + self._draw()) if closed_s <= 0 else closed_s + self._draw()
            if now_s + wait_s >= deadline_s:
                return None
            self._sleep(wait_s)
            poll_s = min(2 * poll_s, _POLL_MAX_S)

    def leave(self, slot: int) -> None:
        """Give a slot back."""
        with self._lock:
            descriptor = self._slots.pop(slot)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            self._set_aside(slot, descriptor)

    def throttled(self, retry_after_s: float) -> None:
        """Tell that the host asked for fewer requests; the node's other processes obey too."""
        now_s = self._clock()
        with self._lock:
            fcntl.flock(self._state, fcntl.LOCK_EX)
            try:
                window = self.window().after_throttling(now_s, retry_after_s, self._slots_max)
                values = (window.slots, window.cut_at_s, window.closed_until_s)
                head = _STATE.pack(_MAGIC, *values, 0)[:-4]
                os.pwrite(self._state, head + struct.pack("<I", zlib.crc32(head)), 0)
            finally:
                fcntl.flock(self._state, fcntl.LOCK_UN)

    def window(self) -> Window:
        """Return the window; full where nothing sound is written."""
        raw = os.pread(self._state, _STATE.size, 0)
        if len(raw) == _STATE.size:
            magic, slots, cut_at_s, closed_until_s, crc = _STATE.unpack(raw)
            is_sound = magic == _MAGIC and zlib.crc32(raw[:-4]) == crc
            # Times beyond now are of another boot: the folder outlived it.
            now_s = self._clock()
            if is_sound and cut_at_s <= now_s and closed_until_s <= now_s + RETRY_AFTER_MAX_S:
                return Window(max(1.0, slots), cut_at_s, closed_until_s)
        return Window(float(self._slots_max))

    def close(self) -> None:
        """Close all files; slots still held are given back."""
        with self._lock:
            for descriptor in [*self._slots.values(), *self._idle.values(), self._state]:
                with suppress(OSError):
                    os.close(descriptor)
            self._slots.clear()
            self._idle.clear()

    def _take(self, count: int) -> int | None:
        """Return a slot below `count` that no one holds, now flocked, or None."""
        with self._lock:
            first = int(self._draw() * count)
            for step in range(count):
                slot = (first + step) % count
                if slot in self._slots:
                    continue
                descriptor = self._idle.pop(slot, -1)
                if descriptor < 0:
                    descriptor = self._open_slot(slot)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._set_aside(slot, descriptor)
                    continue
                self._slots[slot] = descriptor
                return slot
            return None

    def _set_aside(self, slot: int, descriptor: int) -> None:
        if len(self._idle) < _IDLE_FILES_MAX:
            self._idle[slot] = descriptor
        else:
            os.close(descriptor)

    def _open_slot(self, slot: int) -> int:
        path = self._folder / f"slot-{slot:04}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
