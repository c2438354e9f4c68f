"""The 64 bytes at the start of a chunk; `chunk_layout` says where they stand and what follows them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ChunkCorruptError
from msd_client.contract.slot_fields import align_up
from msd_daemon.shm.field_layout import BLOCK_ALIGN_BYTES

CHUNK_MAGIC = 0x4B44534D
CHUNK_VERSION = 1
"""Of what the C kernel reads: header, columns, tokens. Blocks behind the tokens have flags."""
CHUNK_ALIGN_BYTES = BLOCK_ALIGN_BYTES
HEADER_BYTES = 64

FLAG_BLOCK_END = 1
FLAG_LANE_END = 2
FLAG_HAS_INDEX = 4
FLAG_HAS_FIELDS = 8
FLAG_HAS_MEDIA = 16

TOKEN_BYTES = (2, 4)
"""Widths of a token."""

_HEADER = struct.Struct("<IHHiiqiIIIqqII")
assert _HEADER.size == HEADER_BYTES


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
    fields_bytes: int = 0
    fields: int = 0
    media: int = 0

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

    @property
    def has_fields(self) -> bool:
        """True where the values of the job's fields lie behind the payload."""
        return bool(self.flags & FLAG_HAS_FIELDS)

    @property
    def has_media(self) -> bool:
        """True where items of the job's media lie behind the fields."""
        return bool(self.flags & FLAG_HAS_MEDIA)

    @property
    def fields_offset(self) -> int:
        """Where the first field's block begins, from the chunk's start."""
        return align_up(self.payload_offset + self.payload_bytes, CHUNK_ALIGN_BYTES)

    @property
    def media_offset(self) -> int:
        """Where the blocks of media begin, from the chunk's start."""
        fields_bytes = self.fields_bytes if self.has_fields else 0
        return align_up(self.fields_offset + fields_bytes, CHUNK_ALIGN_BYTES)

    def pack_into(self, view: memoryview) -> None:
        """Write the header at the start of a chunk."""
        _HEADER.pack_into(
            view,
            0,
            CHUNK_MAGIC,
            CHUNK_VERSION,
            self.token_bytes,
            self.source_index,
            self.records,
            self.block_key,
            self.first_index,
            self.flags,
            self.payload_offset,
            self.window_blocks,
            self.payload_bytes,
            self.fields_bytes,
            self.fields,
            self.media,
        )


def decode_header(view: memoryview) -> ChunkHeader:
    """Return the header at the start of a chunk.

    Raises:
        ChunkCorruptError: Too short, another magic or version, or a size that cannot be.
    """
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
        fields_bytes,
        fields,
        media,
    ) = _HEADER.unpack_from(view, 0)
    if magic != CHUNK_MAGIC or version != CHUNK_VERSION:
        raise ChunkCorruptError(
            f"chunk starts with magic {magic:#x} version {version}, "
            f"expected {CHUNK_MAGIC:#x} version {CHUNK_VERSION}"
        )
    if token_bytes not in TOKEN_BYTES or records < 0 or payload_bytes < 0:
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
        fields_bytes,
        fields,
        media,
    )


_COLUMNS = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("token_bytes", "<u2"),
        ("source_index", "<i4"),
        ("records", "<i4"),
        ("block_key", "<i8"),
        ("first_index", "<i4"),
        ("flags", "<u4"),
        ("payload_offset", "<u4"),
        ("window_blocks", "<u4"),
        ("payload_bytes", "<i8"),
        ("fields_bytes", "<i8"),
        ("fields", "<u4"),
        ("media", "<u4"),
    ]
)
assert _COLUMNS.itemsize == HEADER_BYTES


class HeaderColumns:
    """Headers of many chunks of a memory, as columns.

    Args:
        view: The memory; its first byte is 64-byte aligned as its chunks are.
        chunks: Where they begin. Shape (chunks,).
        sizes: Bytes of each.

    Raises:
        ChunkCorruptError: One lies outside the memory, is no chunk, or its columns or tokens do not
            lie in it.
    """

    def __init__(
        self, view: memoryview, chunks: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> None:
        whole = len(view) // HEADER_BYTES * HEADER_BYTES
        is_sound = (chunks >= 0) & (chunks % CHUNK_ALIGN_BYTES == 0) & (sizes >= HEADER_BYTES)
        is_sound &= (sizes <= whole) & (chunks <= whole - np.minimum(sizes, whole))
        if not is_sound.all():
            place = int(np.flatnonzero(~is_sound)[0])
            raise ChunkCorruptError(
                f"a chunk at byte {chunks[place]} of {sizes[place]} bytes is not one of "
                f"{len(view)} mapped ones"
            )
        rows = np.frombuffer(view[:whole], np.uint8).reshape(-1, HEADER_BYTES)
        self._heads = np.ascontiguousarray(rows[chunks // HEADER_BYTES]).view(_COLUMNS)[:, 0]
        self._check(view, chunks, sizes)

    def _check(
        self, view: memoryview, chunks: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> None:
        records, payload_bytes = self.of("records"), self.of("payload_bytes")
        has_index = (self.of("flags") & FLAG_HAS_INDEX) != 0
        columns = HEADER_BYTES + 8 * (records + 1) + -(-records // 8) * 8
        columns += np.where(has_index, -(-records // 2) * 8, 0)
        payload = -(-columns // CHUNK_ALIGN_BYTES) * CHUNK_ALIGN_BYTES
        is_sound = (self.of("magic") == CHUNK_MAGIC) & (self.of("version") == CHUNK_VERSION)
        token_bytes = self.of("token_bytes")
        is_sound &= (token_bytes == TOKEN_BYTES[0]) | (token_bytes == TOKEN_BYTES[1])
        is_sound &= records >= 0
        is_sound &= (self.of("payload_offset") == payload) & (payload_bytes >= 0)
        is_sound &= payload_bytes <= sizes - payload
        if is_sound.all():
            return
        place = int(np.flatnonzero(~is_sound)[0])
        begin = int(chunks[place])
        decode_header(view[begin : begin + int(sizes[place])])  # says what is wrong, mostly
        raise ChunkCorruptError(
            f"the chunk at byte {begin} has {payload_bytes[place]} bytes of tokens at "
            f"{self.of('payload_offset')[place]}, in {sizes[place]} bytes"
        )

    def of(self, name: str) -> npt.NDArray[np.int64]:
        """Return a number of each header, by its name in `ChunkHeader`. Shape (chunks,)."""
        values: npt.NDArray[np.int64] = self._heads[name].astype(np.int64)
        return values
