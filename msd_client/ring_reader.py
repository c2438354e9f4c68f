"""Reads slots of a ring in place, and knows when the last view of a slot has died.

Owns the mapping of one ring in this process and its leases. It knows no socket: what was announced
comes in as arguments, and a slot that nobody uses any more goes out through `on_release`.

Why ctypes: an array export with a finalizer is the one technique that holds for every numpy, torch
and DLPack view, for slices, and for tensors that autograd saved (RINGS.md 3). `memoryview.release()`
and `mmap.close()` both succeed under a live torch tensor.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from msd_client.contract.errors import BatchReleasedError, SegmentCorruptError
from msd_client.contract.ring_layout import (
    RingLayout,
    SlotHeader,
    SlotTable,
    check_slot,
    decode_slot_header,
    decode_superblock,
)
from msd_client.read_only_map import map_read_only

SUPERBLOCK_BYTES = 4096


class DeviceEvent(Protocol):
    """What is asked of a recorded event (torch.cuda.Event has it)."""

    def query(self) -> bool:
        """Return True once everything recorded before the event has completed."""

    def synchronize(self) -> None:
        """Wait until it has."""


class SlotLease:
    """This process's hold on one slot; made by `RingReader.open`.

    The slot returns to the daemon when this lease was released (or collected) and every view made
    from `memory` is dead, whichever is last.
    """

    __slots__ = ("__weakref__", "_memory", "_reader", "header", "slot", "table")

    def __init__(
        self, reader: RingReader, slot: int, header: SlotHeader, table: SlotTable, memory: Any
    ) -> None:
        self._reader = reader
        self._memory: Any = memory
        self.slot = slot
        self.header = header
        self.table = table

    @property
    def memory(self) -> Any:
        """Byte array (ctypes) over the whole slot, header page included; views come from it.

        Raises:
            BatchReleasedError: The lease was released.
        """
        if self._memory is None:
            raise BatchReleasedError(
                f"slot {self.slot} (sequence {self.header.sequence}) was released; "
                "clone() the batch before releasing it",
                slot=self.slot,
                sequence=self.header.sequence,
            )
        return self._memory

    @property
    def is_released(self) -> bool:
        """True after `release`; views may still hold the slot."""
        return self._memory is None

    def release(self) -> None:
        """Give up the lease's own hold; live views keep theirs. Idempotent."""
        self._memory = None

    def hold_until(self, event: DeviceEvent, views: object) -> None:
        """Keep `views` of the slot until `event` completed, even if all else lets go of them.

        For copies to a device that still read host memory. Legal after `release` too.
        """
        self._reader.hold(views, event)

    def check_unchanged(self) -> None:
        """Compare the slot with what was leased: nobody may have written it meanwhile.

        Raises:
            SegmentCorruptError: The header differs from the one at the start of the lease.
            BatchReleasedError: The lease was released.
        """
        seen = decode_slot_header(memoryview(self.memory).cast("B"))
        if seen != self.header:
            raise SegmentCorruptError(
                f"slot {self.slot} was written while leased: {seen} instead of {self.header}",
                slot=self.slot,
                sequence=self.header.sequence,
            )


class RingReader:
    """Maps one ring read-only and leases its slots.

    `on_release` is called once per lease when the last view has died: from any thread, from inside
    the garbage collector, so it may only append to a deque or send without blocking, and takes no
    lock. It is not called in a forked child, nor at interpreter exit. Opening and polling belong
    to one thread.

    Args:
        fd: The ring's descriptor, opened for reading; may be closed afterwards.
        layout: As announced by the daemon; the ring's superblock must say the same.
        on_release: Called with (slot, sequence); without it they collect in `released`.

    Raises:
        SegmentUnavailableError: The segment cannot be mapped.
        SegmentCorruptError: The superblock says something else than `layout`.
    """

    def __init__(
        self,
        fd: int,
        layout: RingLayout,
        on_release: Callable[[int, int], None] | None = None,
    ) -> None:
        self.layout = layout
        self.released: deque[tuple[int, int]] = deque()
        self._on_release = on_release if on_release is not None else self._collect
        self._base: Any = map_read_only(fd, layout.ring_bytes)
        self._address = ctypes.addressof(self._base)
        self._view: memoryview | None = memoryview(self._base).cast("B").toreadonly()
        stated = decode_superblock(self._view[:SUPERBLOCK_BYTES])
        if stated != layout:
            raise SegmentCorruptError(f"ring says {stated}, the daemon announced {layout}")
        # One array type for all slots: ctypes keeps every length it has seen for ever.
        self._slot_type: Any = ctypes.c_uint8 * layout.stride_bytes
        self._held: dict[int, int] = {}
        self._pending: deque[tuple[DeviceEvent, Any]] = deque()

    def open(self, slot: int, sequence: int, generation: int, payload_bytes: int) -> SlotLease:
        """Lease a slot that the daemon announced, after checking that it holds just that.

        Never blocks. Also lets go of slots whose device copies have completed.

        Raises:
            SegmentCorruptError: The slot's header or field table differs from the announcement.
            BatchReleasedError: The reader was closed.
        """
        self.poll()
        if self._view is None:
            raise BatchReleasedError(f"ring {self.layout.ring_id} was closed by this reader")
        start = self.layout.slot_offset(slot)
        header, table = check_slot(
            self._view[start : start + self.layout.stride_bytes],
            generation=generation,
            sequence=sequence,
            payload_bytes=payload_bytes,
        )
        memory = self._slot_type.from_address(self._address + start)
        memory.ring = self._base  # a view must keep the mapping, not just the slot
        finalizer = weakref.finalize(memory, self._let_go, slot, sequence, os.getpid())
        finalizer.atexit = False
        self._held[slot] = sequence
        return SlotLease(self, slot, header, table, memory)

    @property
    def held(self) -> dict[int, int]:
        """Slots that views of this process still hold, with their sequences; a copy."""
        return dict(self._held)

    @property
    def pending_count(self) -> int:
        """Device copies whose events have not completed yet."""
        return len(self._pending)

    def hold(self, views: object, event: DeviceEvent) -> None:
        """Keep views of a slot until `event` completed and `poll` saw it."""
        self._pending.append((event, views))

    def poll(self) -> int:
        """Let go of views whose events have completed; return how many are still pending."""
        for _ in range(len(self._pending)):
            entry = self._pending.popleft()
            if not entry[0].query():
                self._pending.append(entry)
            del entry  # or this frame would hold the last slot a little longer
        return len(self._pending)

    def wait_oldest_copy(self) -> bool:
        """Wait for the oldest device copy and let go of what it held; False where none is pending.

        The one call here that blocks: for a reader whose slots are all held by copies in flight.
        """
        if not self._pending:
            return False
        self._pending[0][0].synchronize()
        self.poll()
        return True

    def close(self) -> None:
        """Give up the mapping; it goes when the last view has died. Idempotent."""
        self._view = None
        self._base = None

    def _let_go(self, slot: int, sequence: int, pid: int) -> None:
        if os.getpid() != pid:
            return  # a forked child's copy died; the parent still reads the slot
        if self._held.get(slot) == sequence:
            del self._held[slot]
        self._on_release(slot, sequence)

    def _collect(self, slot: int, sequence: int) -> None:
        self.released.append((slot, sequence))
