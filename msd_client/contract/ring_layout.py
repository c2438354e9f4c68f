"""How a ring lies in its segment: superblock, slots, slot headers. Pure byte layout, no mapping.

    0            superblock (one page used)
    first slot   slot 0, slot 1, ... each `stride_bytes` apart
    slot   +0    header, 64 bytes     +64  field table (msgpack, at most 4,032 bytes)
           +4096 payload

Everything is little endian. The header is for validation: who owns a slot is known to the daemon
alone, and a reader learns of a slot from the socket, never by looking at memory (RINGS.md 6).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from msd_client.contract.errors import BudgetError, SegmentCorruptError
from msd_client.contract.slot_fields import TABLE_BYTES_MAX, align_up

Buffer = bytes | bytearray | memoryview

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
SLOT_HEADER_BYTES = 64
TOC_BYTES_MAX = TABLE_BYTES_MAX
PAYLOAD_OFFSET = PAGE_BYTES
SLOTS_MAX = 64
"""With at most this many messages a peer its socket buffer never fills (RINGS.md 6c)."""
SLOT_BYTES_MAX = 4 << 30
SEQUENCE_OPEN = (1 << 64) - 1
"""Closing sequence of a slot that is being written; no slot is ever announced with it."""

_SUPERBLOCK = struct.Struct("<8sIIQQQQQQII16s")
_SUPERBLOCK_MAGIC = b"MSDRING\x00"
_SUPERBLOCK_VERSION = 1
_HEADER = struct.Struct("<IHHQQqIIQIIQ")
_HEADER_MAGIC = 0x5244534D  # "MSDR"
_HEADER_VERSION = 1
assert _HEADER.size == SLOT_HEADER_BYTES == PAGE_BYTES - TOC_BYTES_MAX
SEQUENCE_END_OFFSET = SLOT_HEADER_BYTES - 8
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class RingLayout:
    """Places of a ring's slots; build it with `for_payload`."""

    ring_id: int
    generation: int
    slots: int
    stride_bytes: int
    first_slot_offset: int
    ring_bytes: int

    @classmethod
    def for_payload(
        cls, payload_bytes_max: int, slots: int, *, ring_id: int, generation: int
    ) -> RingLayout:
        """Return the layout of a ring whose slots hold payloads of up to `payload_bytes_max`.

        Strides round to 4 KiB below 1 MiB, to 64 KiB below 16 MiB and to 2 MiB above: huge pages
        need only the ring to be 2 MiB-aligned, and rounding every slot would double small rings.

        Raises:
            BudgetError: More than 64 slots, none, or a slot beyond 4 GiB.
        """
        if not 1 <= slots <= SLOTS_MAX:
            raise BudgetError(
                f"ring {ring_id} is to have {slots} slots, allowed are 1 to {SLOTS_MAX}: "
                "lower ring.slots or the microbatches that the trainer keeps",
                slots=slots,
                slots_max=SLOTS_MAX,
            )
        needed = PAYLOAD_OFFSET + payload_bytes_max
        if payload_bytes_max < 1 or needed > SLOT_BYTES_MAX:
            raise BudgetError(
                f"a slot of ring {ring_id} is to have {needed} bytes, at most {SLOT_BYTES_MAX}: "
                "lower batch.microbatch_rows",
                needed_bytes=needed,
                available_bytes=SLOT_BYTES_MAX,
            )
        rounding = _stride_rounding(needed)
        stride = align_up(needed, rounding)
        first = HUGE_PAGE_BYTES if rounding == HUGE_PAGE_BYTES else PAGE_BYTES
        total = first + slots * stride
        total = align_up(total, HUGE_PAGE_BYTES if total >= 16 << 20 else PAGE_BYTES)
        return cls(ring_id, generation, slots, stride, first, total)

    @property
    def payload_bytes_max(self) -> int:
        """Most payload bytes of a slot."""
        return self.stride_bytes - PAYLOAD_OFFSET

    def slot_offset(self, slot: int) -> int:
        """Return the first byte of a slot in the segment.

        Raises:
            SegmentCorruptError: The ring has no such slot.
        """
        if not 0 <= slot < self.slots:
            raise SegmentCorruptError(
                f"ring {self.ring_id} has slots 0 to {self.slots - 1}, slot {slot} was announced",
                ring=self.ring_id,
                slot=slot,
            )
        return self.first_slot_offset + slot * self.stride_bytes

    def encode(self) -> dict[str, int]:
        """Return the layout as a plain map."""
        return {
            "ring_id": self.ring_id,
            "generation": self.generation,
            "slots": self.slots,
            "stride_bytes": self.stride_bytes,
            "first_slot_offset": self.first_slot_offset,
            "ring_bytes": self.ring_bytes,
        }

    @classmethod
    def decode(cls, plain: object) -> RingLayout:
        """Return the layout from its plain form.

        Raises:
            SegmentCorruptError: Keys, types or sums are wrong.
        """
        keys = ("ring_id", "generation", "slots", "stride_bytes", "first_slot_offset", "ring_bytes")
        if not isinstance(plain, dict) or set(plain) != set(keys):
            raise SegmentCorruptError(f"ring layout: expected the keys {sorted(keys)}")
        for key in keys:
            if type(plain[key]) is not int:
                raise SegmentCorruptError(f"ring layout: {key} is {plain[key]!r}, expected int")
        layout = cls(*(plain[key] for key in keys))
        layout._check()
        return layout

    def _check(self) -> None:
        end = self.first_slot_offset + self.slots * self.stride_bytes
        is_sound = (
            1 <= self.slots <= SLOTS_MAX
            and PAGE_BYTES < self.stride_bytes <= SLOT_BYTES_MAX + HUGE_PAGE_BYTES
            and self.stride_bytes % PAGE_BYTES == 0
            and self.first_slot_offset in (PAGE_BYTES, HUGE_PAGE_BYTES)
            and end <= self.ring_bytes < end + HUGE_PAGE_BYTES
            and 0 <= self.generation < SEQUENCE_OPEN
            and 0 <= self.ring_id < SEQUENCE_OPEN
        )
        if not is_sound:
            raise SegmentCorruptError(f"ring layout does not add up: {self}")


def _stride_rounding(needed: int) -> int:
    if needed < 1 << 20:
        return PAGE_BYTES
    return 64 << 10 if needed < 16 << 20 else HUGE_PAGE_BYTES


def encode_superblock(
    layout: RingLayout, *, created_ns: int, page_bytes: int, daemon_pid: int, boot_id: bytes
) -> bytes:
    """Return the first bytes of a ring's segment (checksum last).

    Args:
        layout: Places of the slots.
        created_ns: Wall clock, for people.
        page_bytes: Page size that the mapping really got (4096 or 2 MiB).
        daemon_pid: For people.
        boot_id: 16 bytes that tell boots of the machine apart.
    """
    body = _SUPERBLOCK.pack(
        _SUPERBLOCK_MAGIC,
        _SUPERBLOCK_VERSION,
        layout.slots,
        layout.ring_id,
        layout.generation,
        layout.stride_bytes,
        layout.first_slot_offset,
        layout.ring_bytes,
        created_ns,
        page_bytes,
        daemon_pid,
        boot_id[:16].ljust(16, b"\0"),
    )
    return body + struct.pack("<I", zlib.crc32(body))


def decode_superblock(buffer: Buffer) -> RingLayout:
    """Return the layout that a segment states.

    Raises:
        SegmentCorruptError: Too short, another magic or version, wrong checksum or sums.
    """
    body = bytes(memoryview(buffer)[: _SUPERBLOCK.size])
    tail = bytes(memoryview(buffer)[_SUPERBLOCK.size : _SUPERBLOCK.size + 4])
    if len(body) < _SUPERBLOCK.size or len(tail) < 4:
        raise SegmentCorruptError(f"a ring's superblock needs {_SUPERBLOCK.size + 4} bytes")
    magic, version, slots, ring_id, generation, stride, first, ring_bytes, *_ = _SUPERBLOCK.unpack(
        body
    )
    if magic != _SUPERBLOCK_MAGIC or version != _SUPERBLOCK_VERSION:
        raise SegmentCorruptError(
            f"no ring of version {_SUPERBLOCK_VERSION}: magic {magic!r}, version {version}"
        )
    if struct.unpack("<I", tail)[0] != zlib.crc32(body):
        raise SegmentCorruptError(f"checksum of ring {ring_id}'s superblock is wrong")
    layout = RingLayout(ring_id, generation, slots, stride, first, ring_bytes)
    layout._check()
    return layout


class SlotHeader(NamedTuple):
    """What a slot says of itself (64 bytes, little endian)."""

    generation: int
    sequence: int
    step: int
    microbatch: int
    toc_bytes: int
    payload_bytes: int
    toc_checksum: int
    """crc32 of the field table."""
    sequence_end: int
    """Written last; equals `sequence` once the slot is complete."""


class TocField(NamedTuple):
    """One array of a slot, placed from the start of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


class SlotTable(NamedTuple):
    """A slot's field table: arrays, and scalars beside them."""

    fields: tuple[TocField, ...]
    scalars: Mapping[str, int]


def encode_slot_header(header: SlotHeader) -> bytes:
    """Return the 64 bytes of a slot header."""
    return _HEADER.pack(
        _HEADER_MAGIC,
        _HEADER_VERSION,
        0,
        header.generation,
        header.sequence,
        header.step,
        header.microbatch,
        header.toc_bytes,
        header.payload_bytes,
        header.toc_checksum,
        0,
        header.sequence_end,
    )


def encode_sequence_end(sequence: int) -> bytes:
    """Return the closing eight bytes of a slot header, written after all else."""
    return _U64.pack(sequence)


def decode_slot_header(buffer: Buffer) -> SlotHeader:
    """Return the header at the start of a slot.

    Raises:
        SegmentCorruptError: Too short, or another magic or version.
    """
    if len(buffer) < SLOT_HEADER_BYTES:
        raise SegmentCorruptError(f"a slot header needs {SLOT_HEADER_BYTES} bytes")
    magic, version, _, generation, sequence, step, microbatch, toc, payload, crc, _, end = (
        _HEADER.unpack_from(buffer)
    )
    if magic != _HEADER_MAGIC or version != _HEADER_VERSION:
        raise SegmentCorruptError(
            f"slot header has magic {magic:#x} and version {version}, "
            f"expected {_HEADER_MAGIC:#x} and {_HEADER_VERSION}"
        )
    return SlotHeader(generation, sequence, step, microbatch, toc, payload, crc, end)


def encode_table(fields: Sequence[TocField], scalars: Mapping[str, int]) -> bytes:
    """Return the field table of a slot.

    Raises:
        BudgetError: It exceeds the 4,032 bytes between header and payload.
    """
    packed: bytes = msgpack.packb([[list(field) for field in fields], dict(scalars)])
    if len(packed) > TOC_BYTES_MAX:
        raise BudgetError(
            f"field table of {len(fields)} fields has {len(packed)} bytes, at most {TOC_BYTES_MAX}",
            needed_bytes=len(packed),
            available_bytes=TOC_BYTES_MAX,
        )
    return packed


def check_slot(
    slot: Buffer, *, generation: int, sequence: int, payload_bytes: int
) -> tuple[SlotHeader, SlotTable]:
    """Return header and field table of a slot after comparing them with what was announced.

    Args:
        slot: The whole slot, header page first.
        generation: As announced.
        sequence: As announced.
        payload_bytes: As announced.

    Raises:
        SegmentCorruptError: Any of it differs, the slot was not closed, its table's checksum is
            wrong, or a field lies outside the payload.
    """
    header = decode_slot_header(slot)
    announced = (generation, sequence, sequence, payload_bytes)
    seen = (header.generation, header.sequence, header.sequence_end, header.payload_bytes)
    if seen != announced:
        names = ("generation", "sequence", "closing sequence", "payload bytes")
        differing = ", ".join(
            f"{name} {have} instead of {want}"
            for name, have, want in zip(names, seen, announced, strict=True)
            if have != want
        )
        raise SegmentCorruptError(
            f"slot does not hold what was announced: {differing}",
            generation=generation,
            sequence=sequence,
            payload_bytes=payload_bytes,
        )
    if payload_bytes > len(slot) - PAYLOAD_OFFSET or header.toc_bytes > TOC_BYTES_MAX:
        raise SegmentCorruptError(
            f"slot {sequence} states {payload_bytes} payload bytes and a field table of "
            f"{header.toc_bytes}, its slot has {len(slot)} bytes"
        )
    toc = bytes(slot[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + header.toc_bytes])
    if zlib.crc32(toc) != header.toc_checksum:
        raise SegmentCorruptError(f"checksum of the field table of slot {sequence} is wrong")
    return header, decode_table(toc, payload_bytes)


def decode_table(toc: bytes, payload_bytes: int) -> SlotTable:
    """Return a field table, every field checked against the payload.

    Raises:
        SegmentCorruptError: Not a field table, or a field is misaligned, outside, or its bytes are
            not those of its shape and dtype.
    """
    try:
        raw_fields, scalars = msgpack.unpackb(toc, raw=False, strict_map_key=True, use_list=False)
        fields = tuple([_decode_field(raw, payload_bytes) for raw in raw_fields])
        for name, value in scalars.items():
            if type(name) is not str or type(value) is not int:
                raise TypeError("scalars are not integers")
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise SegmentCorruptError(f"field table of a slot is unreadable: {error}") from error
    return SlotTable(fields, scalars)


_ITEM_BYTES: dict[str, int] = {
    name: np.dtype(name).itemsize
    for name in ("uint8", "uint16", "int32", "int64", "float16", "float32", "float64")
}


def _decode_field(raw: Any, payload_bytes: int) -> TocField:
    # Every reader does this for every slot between its wake-up and its first view: hence plain code.
    field = TocField(*raw)
    name, dtype, shape, offset_bytes, nbytes = field
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None or type(name) is not str or type(shape) is not tuple:
        raise ValueError(f"field {name!r} of dtype {dtype!r} and shape {shape!r}")
    size = item_bytes
    for number in (offset_bytes, nbytes, *shape):
        if type(number) is not int or number < 0:
            raise ValueError(f"field {name} has a number that is no count: {number!r}")
    for extent in shape:
        size *= extent
    if size != nbytes or offset_bytes % item_bytes or offset_bytes + nbytes > payload_bytes:
        raise ValueError(
            f"field {name} {shape} at {offset_bytes} with {nbytes} bytes "
            f"does not fit a payload of {payload_bytes}"
        )
    return field


def encode_closed_header(
    *, generation: int, sequence: int, step: int, microbatch: int, toc: bytes, payload_bytes: int
) -> bytes:
    """Return the header of a slot as it is just before its closing sequence is written."""
    return encode_slot_header(
        SlotHeader(
            generation,
            sequence,
            step,
            microbatch,
            len(toc),
            payload_bytes,
            zlib.crc32(toc),
            SEQUENCE_OPEN,
        )
    )
