"""The page in which a loader worker says what it works on, for whoever finds it dead or hung.

One per worker process, a memory file made by the daemon. The first part is the mark, written with
one `pack_into` before a record is touched and cleared behind it; the last is where the worker's
fault handler writes its stack, on a crash or when it is asked to. The daemon reads both without the
worker's help. Between them stands a number that the daemon raises where it sent what the worker
should hear of in the middle of a chunk: which record killed another worker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

PAGE_BYTES = 32 << 10
STACK_OFFSET = 4096
NEWS_OFFSET = STACK_OFFSET - 8
KEY_BYTES_MAX = 200
_MARK = struct.Struct("=QIIIqqQI200sI")
"""sequence, source, shard, epoch, first place, last place, since (ns, monotonic), key bytes, key,
state. The state stands last: it is written once all else is."""
_STATE = struct.Struct("=I")
_SEQUENCE = struct.Struct("=Q")
_STATE_OFFSET = _MARK.size - _STATE.size


class MarkState(IntEnum):
    """What a worker does with what is marked."""

    IDLE = 0
    RECORD = 1
    """Works on one record, first place = last place."""
    WINDOW = 2
    """Works on all records of a shard between two places at once."""
    AWAY = 3
    """Waits for the user's code on one record; that has a limit of its own."""
    READING = 4
    """Reads on in a shard, behind any record; a store may take its time."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a worker worked on."""

    sequence: int
    state: MarkState
    source: int
    """Index in the job."""
    shard: int
    """Number in the source."""
    epoch: int
    first_place: int
    last_place: int
    since_ns: int
    key: str


class InFlight:
    """A worker's end of its page.

    Args:
        page: Writable, PAGE_BYTES long; None: nothing is noted (no daemon looks).
    """

    __slots__ = ("_heard", "_is_marked", "_page", "_sequence", "user_ns")

    def __init__(self, page: memoryview | mmap.mmap | None = None) -> None:
        self._page = page
        self._sequence = 0
        self._is_marked = False
        self._heard = 0
        self.user_ns = 0
        """How long the user's code had records of this process, all together."""

    def has_news(self) -> bool:
        """True once for each word of the daemon that should not wait for the end of a chunk."""
        if self._page is None:
            return False
        told: int = _SEQUENCE.unpack_from(self._page, NEWS_OFFSET)[0]
        is_news = told != self._heard
        self._heard = told
        return is_news

    def begin(
        self,
        source: int,
        shard: int,
        epoch: int,
        first_place: int,
        last_place: int,
        key: bytes = b"",
        state: MarkState = MarkState.RECORD,
    ) -> None:
        """Say what is worked on from now on."""
        if self._page is None:
            return
        self._sequence += 1
        self._is_marked = True
        _MARK.pack_into(
            self._page, 0, self._sequence, source, shard, epoch, first_place, last_place,
            time.monotonic_ns(), min(len(key), KEY_BYTES_MAX), key[:KEY_BYTES_MAX], state,
        )  # fmt: skip

    def end(self) -> None:
        """Say that nothing is worked on."""
        if self._page is not None and self._is_marked:
            self._is_marked = False
            _STATE.pack_into(self._page, _STATE_OFFSET, MarkState.IDLE)

    def leave(self) -> None:
        """The user's code works on the record now, in a process and under a limit of its own."""
        if self._page is not None and self._is_marked:
            _STATE.pack_into(self._page, _STATE_OFFSET, MarkState.AWAY)

    def back(self) -> None:
        """The user's code is done with it; the record's time starts anew."""
        if self._page is not None and self._is_marked:
            self._sequence += 1
            _SEQUENCE.pack_into(self._page, 0, self._sequence)
            _STATE.pack_into(self._page, _STATE_OFFSET, MarkState.RECORD)


class MarkPage:
    """The daemon's end: makes the page, reads it at any time."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("msd:mark", os.MFD_CLOEXEC)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, PAGE_BYTES)
        except OSError:
            os.close(self.fd)
            raise
        self._told = 0

    def tell(self) -> None:
        """Have the worker listen: something was sent that it should know before the next record."""
        if self.fd >= 0:
            self._told += 1
            os.pwrite(self.fd, _SEQUENCE.pack(self._told), NEWS_OFFSET)

    def mark(self) -> Mark | None:
        """Return what the worker is, or was, at; None: nothing. Hostile bytes give None too."""
        if self.fd < 0:
            return None
        data = os.pread(self.fd, _MARK.size, 0)
        if len(data) < _MARK.size:
            return None
        sequence, source, shard, epoch, first, last, since, key_bytes, key, state = _MARK.unpack(
            data
        )
        if state == MarkState.IDLE or state not in MarkState._value2member_map_:
            return None
        shown = key[: min(key_bytes, KEY_BYTES_MAX)].decode("utf-8", "replace")
        return Mark(sequence, MarkState(state), source, shard, epoch, first, last, since, shown)

    def stack(self) -> str:
        """Return what the worker's fault handler wrote, empty where it did not."""
        if self.fd < 0:
            return ""
        data = os.pread(self.fd, PAGE_BYTES - STACK_OFFSET, STACK_OFFSET)
        return data.rstrip(b"\0").decode("utf-8", "replace").strip()

    def clear_stack(self) -> None:
        """Forget what was written so far."""
        with contextlib.suppress(OSError):
            os.pwrite(self.fd, bytes(PAGE_BYTES - STACK_OFFSET), STACK_OFFSET)

    def close(self) -> None:
        """Close it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
