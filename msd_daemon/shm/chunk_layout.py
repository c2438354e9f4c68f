"""Byte layout of a chunk in the pool: a header, columns of records, then the tokens.

Owns the layout and nothing else: who allocates a chunk and who may read it is decided by the pool.
The C gather kernel reads the same bytes, so a change here is a change there and raises
`CHUNK_VERSION`. All numbers are little-endian; a chunk starts 64-byte aligned.

    +0   u32 magic "MSDK"     +4  u16 version      +6  u16 bytes of a token (2: uint16, 4: int32)
    +8   i32 source_index     +12 i32 records n    +16 i64 block_key
    +24  i32 first_index, -1 where the index column is there
    +28  u32 flags            +32 u32 payload_offset (64-aligned)   +36 u32 window_blocks
    +40  i64 payload_bytes    +48 16 bytes zero
    +64  i64 offsets[n + 1] in tokens, then u8 status[n] padded to 8,
         then (flag HAS_INDEX) i32 index[n] padded to 8, then the payload at payload_offset
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ChunkCorruptError

CHUNK_MAGIC = 0x4B44534D
CHUNK_VERSION = 1
CHUNK_ALIGN_BYTES = 64
HEADER_BYTES = 64

FLAG_BLOCK_END = 1
FLAG_LANE_END = 2
FLAG_HAS_INDEX = 4

_HEADER = struct.Struct("<IHHiiqiIIIq16x")
assert _HEADER.size == HEADER_BYTES

_TOKEN_BYTES = (2, 4)

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ColumnOffsets:
    """Byte offsets from the chunk's start."""

    offsets: int
    status: int
    index: int
    payload: int


def column_offsets(records: int, *, has_index: bool) -> ColumnOffsets:
    """Return where the columns and the payload of a chunk of `records` records begin."""
    status = HEADER_BYTES + 8 * (records + 1)
    index = status + _round_up(records, 8)
    payload = index + (_round_up(4 * records, 8) if has_index else 0)
    return ColumnOffsets(HEADER_BYTES, status, index, _round_up(payload, CHUNK_ALIGN_BYTES))


def encoded_bytes(records: int, payload_bytes: int, *, has_index: bool) -> int:
    """Return the bytes a chunk takes, rounded up so that the next one is aligned too."""
    payload = column_offsets(records, has_index=has_index).payload
    return _round_up(payload + payload_bytes, CHUNK_ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The 64 bytes at a chunk's start."""

    token_bytes: int
    source_index: int
    records: int
    block_key: int
    first_index: int
    flags: int
    window_blocks: int
    payload_offset: int
    payload_bytes: int

    @property
    def is_block_end(self) -> bool:
        """True on the chunk that ends its block."""
        return bool(self.flags & FLAG_BLOCK_END)

    @property
    def is_lane_end(self) -> bool:
        """True where the lane has no block after this one."""
        return bool(self.flags & FLAG_LANE_END)

    @property
    def has_index(self) -> bool:
        """True where the records are not consecutive and an index column lists them."""
        return bool(self.flags & FLAG_HAS_INDEX)


def encode_chunk_columns(
    view: memoryview,
    *,
    token_bytes: int,
    source_index: int,
    block_key: int,
    first_index: int,
    flags: int,
    window_blocks: int,
    offsets: npt.NDArray[np.int64],
    status: npt.NDArray[np.uint8],
    index: npt.NDArray[np.int32] | None = None,
) -> memoryview:
    """Write header and columns of a chunk and return its payload bytes, to be filled next.

    Args:
        view: Writable bytes, at least `encoded_bytes(...)` long; starts at the chunk's first byte.
        token_bytes: 2 (uint16) or 4 (int32).
        source_index: Index of the source in the job.
        block_key: See msd_client.contract.position.
        first_index: Index in the block of the first record; ignored where `index` is given.
        flags: FLAG_BLOCK_END and FLAG_LANE_END; FLAG_HAS_INDEX follows from `index`.
        window_blocks: Blocks of the window, 0 for streaming sources.
        offsets: Token offsets of the records. Shape (records + 1,), starts at 0.
        status: RecordStatus of each record. Shape (records,).
        index: Index in the block of each record, for records that are not consecutive.

    Raises:
        ChunkCorruptError: The view is too small or the columns do not belong together.
    """
    records = len(status)
    if token_bytes not in _TOKEN_BYTES or len(offsets) != records + 1:
        raise ChunkCorruptError(
            f"chunk of source {source_index}: {records} records with {len(offsets)} offsets and "
            f"{token_bytes} bytes a token do not belong together"
        )
    payload_bytes = int(offsets[-1]) * token_bytes
    places = column_offsets(records, has_index=index is not None)
    if len(view) < places.payload + payload_bytes:
        raise ChunkCorruptError(
            f"chunk of source {source_index} needs {places.payload + payload_bytes} bytes, "
            f"the pool lent {len(view)}"
        )
    _HEADER.pack_into(
        view,
        0,
        CHUNK_MAGIC,
        CHUNK_VERSION,
        token_bytes,
        source_index,
        records,
        block_key,
        -1 if index is not None else first_index,
        flags | (FLAG_HAS_INDEX if index is not None else 0),
        places.payload,
        window_blocks,
        payload_bytes,
    )
    np.frombuffer(view, "<i8", records + 1, places.offsets)[:] = offsets
    np.frombuffer(view, np.uint8, records, places.status)[:] = status
    if index is not None:
        np.frombuffer(view, "<i4", records, places.index)[:] = index
    return view[places.payload : places.payload + payload_bytes]


class ChunkView:
    """A chunk read in place: every array is a view of the pool and lives no longer than it.

    Args:
        view: Bytes from the chunk's first one on; may reach beyond the chunk's end.

    Raises:
        ChunkCorruptError: The header is not one, or it points outside the view.
    """

    __slots__ = ("_places", "_view", "header")

    def __init__(self, view: memoryview) -> None:
        self.header = _decode_header(view)
        self._places = column_offsets(self.header.records, has_index=self.header.has_index)
        self._view = view
        if self._places.payload != self.header.payload_offset:
            raise ChunkCorruptError(
                f"chunk header puts the payload at {self.header.payload_offset}, "
                f"{self.header.records} records put it at {self._places.payload}"
            )
        end = self.header.payload_offset + self.header.payload_bytes
        if end > len(view):
            raise ChunkCorruptError(f"chunk ends at byte {end} of {len(view)} mapped ones")
        offsets = self.offsets
        if offsets[0] != 0 or int(offsets[-1]) * self.header.token_bytes != self.payload_bytes:
            raise ChunkCorruptError(
                f"chunk offsets run from {offsets[0]} to {offsets[-1]} tokens, "
                f"its payload has {self.payload_bytes} bytes"
            )

    @property
    def records(self) -> int:
        """Number of records."""
        return self.header.records

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tokens."""
        return self.header.payload_bytes

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Token offsets of the records. Shape (records + 1,)."""
        array: npt.NDArray[np.int64] = np.frombuffer(
            self._view, "<i8", self.records + 1, self._places.offsets
        )
        return array

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each record. Shape (records,); a new array."""
        return np.diff(self.offsets)

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """RecordStatus of each record. Shape (records,)."""
        return np.frombuffer(self._view, np.uint8, self.records, self._places.status)

    @property
    def index(self) -> npt.NDArray[np.int32]:
        """Index in the block of each record. Shape (records,)."""
        if self.header.has_index:
            array: npt.NDArray[np.int32] = np.frombuffer(
                self._view, "<i4", self.records, self._places.index
            )
            return array
        first = self.header.first_index
        return np.arange(first, first + self.records, dtype=np.int32)

    @property
    def tokens(self) -> TokenArray:
        """All tokens of the chunk, records one after the other; uint16 or int32."""
        place = self._places.payload
        if self.header.token_bytes == 2:
            return np.frombuffer(self._view, "<u2", self.payload_bytes // 2, place)
        return np.frombuffer(self._view, "<i4", self.payload_bytes // 4, place)

    def record(self, number: int) -> TokenArray:
        """Return the tokens of record `number` of the chunk, a view."""
        start, end = self.offsets[number : number + 2]
        return self.tokens[start:end]


def _decode_header(view: memoryview) -> ChunkHeader:
    if len(view) < HEADER_BYTES:
        raise ChunkCorruptError(f"chunk header needs {HEADER_BYTES} bytes, {len(view)} are mapped")
    (
        magic,
        version,
        token_bytes,
        source_index,
        records,
        block_key,
        first_index,
        flags,
        payload_offset,
        window_blocks,
        payload_bytes,
    ) = _HEADER.unpack_from(view, 0)
    if magic != CHUNK_MAGIC or version != CHUNK_VERSION:
        raise ChunkCorruptError(
            f"chunk starts with magic {magic:#x} version {version}, "
            f"expected {CHUNK_MAGIC:#x} version {CHUNK_VERSION}"
        )
    if token_bytes not in _TOKEN_BYTES or records < 0 or payload_bytes < 0:
        raise ChunkCorruptError(
            f"chunk header says {records} records, {payload_bytes} payload bytes, "
            f"{token_bytes} bytes a token"
        )
    if HEADER_BYTES + 8 * (records + 1) > len(view):
        raise ChunkCorruptError(f"chunk of {records} records is longer than {len(view)} bytes")
    return ChunkHeader(
        token_bytes,
        source_index,
        records,
        block_key,
        first_index,
        flags,
        window_blocks,
        payload_offset,
        payload_bytes,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
