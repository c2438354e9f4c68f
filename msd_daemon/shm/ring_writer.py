"""Writes slots of a ring: begin, fill, commit or abort. Knows bytes, never states of slots.

Which slot may be written is the daemon's decision. The header is opened first and closed last, so
a writer that dies in between leaves a slot that no check accepts.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import BudgetError
from msd_client.contract.ring_layout import (
    PAYLOAD_OFFSET,
    SEQUENCE_END_OFFSET,
    SEQUENCE_OPEN,
    SLOT_HEADER_BYTES,
    RingLayout,
    TocField,
    encode_closed_header,
    encode_sequence_end,
    encode_superblock,
    encode_table,
)
from msd_client.contract.slot_fields import FIELD_ALIGN_BYTES, align_up
from msd_daemon.shm.mapping import Mapping

_OPEN_END = encode_sequence_end(SEQUENCE_OPEN)


@dataclass
class SlotWrite:
    """A slot between `begin` and `commit` or `abort`."""

    slot: int
    sequence: int
    step: int
    microbatch: int
    payload: memoryview
    """Writable bytes of the payload."""


class RingWriter:
    """One process's writing side of a ring.

    Args:
        mapping: The ring's segment, mapped for writing; stays the caller's.
        layout: Places of the slots.
    """

    def __init__(self, mapping: Mapping, layout: RingLayout) -> None:
        if mapping.nbytes < layout.ring_bytes:
            raise BudgetError(
                f"ring {layout.ring_id} needs {layout.ring_bytes} bytes, its segment has "
                f"{mapping.nbytes}",
                needed_bytes=layout.ring_bytes,
                available_bytes=mapping.nbytes,
            )
        self.layout = layout
        self._slots = [
            mapping.view[start : start + layout.stride_bytes]
            for start in map(layout.slot_offset, range(layout.slots))
        ]

    def payload(self, slot: int) -> memoryview:
        """Return the writable payload bytes of a slot."""
        return self._slots[slot][PAYLOAD_OFFSET:]

    def begin(self, slot: int, sequence: int, *, step: int = 0, microbatch: int = 0) -> SlotWrite:
        """Open a slot for writing: from here until `commit` no reader's check accepts it.

        Raises:
            SegmentCorruptError: The ring has no such slot.
            ValueError: The sequence is outside [0, 2^64 - 1).
        """
        self.layout.slot_offset(slot)
        if not 0 <= sequence < SEQUENCE_OPEN:
            raise ValueError(f"sequence {sequence} is outside [0, {SEQUENCE_OPEN})")
        self._slots[slot][SEQUENCE_END_OFFSET:SLOT_HEADER_BYTES] = _OPEN_END
        return SlotWrite(slot, sequence, step, microbatch, self.payload(slot))

    def commit(self, write: SlotWrite, toc: bytes, payload_bytes: int) -> int:
        """Write field table and header, the closing sequence last; return the payload bytes.

        Raises:
            BudgetError: The payload exceeds the slot.
        """
        if payload_bytes > self.layout.payload_bytes_max:
            raise BudgetError(
                f"payload of {payload_bytes} bytes exceeds the {self.layout.payload_bytes_max} of "
                f"a slot of ring {self.layout.ring_id}",
                needed_bytes=payload_bytes,
                available_bytes=self.layout.payload_bytes_max,
            )
        memory = self._slots[write.slot]
        memory[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + len(toc)] = toc
        memory[:SLOT_HEADER_BYTES] = encode_closed_header(
            generation=self.layout.generation,
            sequence=write.sequence,
            step=write.step,
            microbatch=write.microbatch,
            toc=toc,
            payload_bytes=payload_bytes,
        )
        memory[SEQUENCE_END_OFFSET:SLOT_HEADER_BYTES] = encode_sequence_end(write.sequence)
        return payload_bytes

    def abort(self, write: SlotWrite) -> None:
        """Leave the slot open: its content is void and the slot can be begun again."""
        self._slots[write.slot][SEQUENCE_END_OFFSET:SLOT_HEADER_BYTES] = _OPEN_END

    def fill(
        self,
        slot: int,
        sequence: int,
        arrays: MappingType[str, npt.NDArray[Any]],
        scalars: MappingType[str, int],
        *,
        step: int = 0,
        microbatch: int = 0,
    ) -> int:
        """Copy ready arrays into a slot and close it; return the payload bytes.

        Raises:
            BudgetError: The arrays exceed the slot.
        """
        fields = _place(arrays)
        payload_bytes = fields[-1].offset_bytes + fields[-1].nbytes if fields else 0
        toc = encode_table(fields, scalars)
        write = self.begin(slot, sequence, step=step, microbatch=microbatch)
        if payload_bytes <= self.layout.payload_bytes_max:
            for field, array in zip(fields, arrays.values(), strict=True):
                if not array.size:
                    continue  # numpy refuses an empty view
                place = np.frombuffer(write.payload, array.dtype, array.size, field.offset_bytes)
                np.copyto(place.reshape(array.shape), array)
        return self.commit(write, toc, payload_bytes)

    def close(self) -> None:
        """Let go of the slots; the mapping stays its owner's."""
        self._slots.clear()


def write_superblock(
    mapping: Mapping, layout: RingLayout, *, created_ns: int, daemon_pid: int, boot_id: bytes
) -> None:
    """Write what the ring says of itself at the segment's start; the daemon does so once."""
    block = encode_superblock(
        layout,
        created_ns=created_ns,
        page_bytes=2 << 20 if mapping.is_huge else 4096,
        daemon_pid=daemon_pid,
        boot_id=boot_id,
    )
    mapping.view[: len(block)] = block


def _place(arrays: MappingType[str, npt.NDArray[Any]]) -> list[TocField]:
    fields, end = [], 0
    for name, array in arrays.items():
        offset = align_up(end, FIELD_ALIGN_BYTES)
        fields.append(TocField(name, array.dtype.name, array.shape, offset, array.nbytes))
        end = offset + array.nbytes
    return fields
