"""Byte layout of a chunk in the pool: a header, columns of records, then the tokens.

Owns the layout and nothing else: who allocates a chunk and who may read it is decided by the pool.
The C gather kernel reads the same bytes, so a change here is a change there and raises
`CHUNK_VERSION`; blocks behind the tokens it never sees. All numbers are little-endian; a chunk
starts 64-byte aligned.

    +0   u32 magic "MSDK"     +4  u16 version      +6  u16 bytes of a token (2: uint16, 4: int32)
    +8   i32 source_index     +12 i32 records n    +16 i64 block_key
    +24  i32 first_index, -1 where the index column is there
    +28  u32 flags            +32 u32 payload_offset (64-aligned)   +36 u32 window_blocks
    +40  i64 payload_bytes    +48 i64 fields_bytes    +56 u32 fields    +60 u32 media rules
    +64  i64 offsets[n + 1] in tokens, then u8 status[n] padded to 8,
         then (flag HAS_INDEX) i32 index[n] padded to 8, then the payload at payload_offset,
         then (flag HAS_FIELDS) one block for each field of the job, in the job's order, each 64-byte
         aligned: a value per token of the payload, or a value per record. `fields_bytes` runs from
         the first block's start to the last one's end. Their types stand in the job.
         Then (flag HAS_MEDIA) the blocks of `media_layout`, 64-byte aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ChunkCorruptError
from msd_client.contract.slot_fields import align_up
from msd_daemon.shm.chunk_header import (
    CHUNK_ALIGN_BYTES,
    FLAG_HAS_FIELDS,
    FLAG_HAS_INDEX,
    FLAG_HAS_MEDIA,
    HEADER_BYTES,
    TOKEN_BYTES,
    ChunkHeader,
    decode_header,
)
from msd_daemon.shm.field_layout import (
    FieldRow,
    ValueArray,
    block_places,
    field_blocks,
    value_dtype,
)
from msd_daemon.shm.media_layout import (
    MediaColumn,
    MediaRow,
    MediaSize,
    MediaView,
    has_items,
    media_blocks,
    media_sizes,
    put_media,
    read_media,
)

UNTRAINED_BIT = 1 << 30
"""Set in an int32 id of a source with masks: the token is no target. Ids are below it."""

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


def single_bytes(
    tokens: int,
    token_bytes: int,
    fields: Sequence[FieldRow] = (),
    media: Sequence[MediaSize] = (),
) -> int:
    """Return the bytes of a chunk of one record: what a carried fragment's copy takes.

    Args:
        tokens: Its tokens.
        token_bytes: Bytes of one.
        fields: The job's fields.
        media: What its items take, of each media rule of the job; none where it has no items.
    """
    blocks = [*field_blocks(fields, 1, tokens), *media_blocks(1, media)]
    return encoded_bytes(1, tokens * token_bytes, has_index=False, blocks=blocks)


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
    index = status + align_up(records, 8)
    payload = index + (align_up(4 * records, 8) if has_index else 0)
    return ColumnOffsets(HEADER_BYTES, status, index, align_up(payload, CHUNK_ALIGN_BYTES))


def encoded_bytes(
    records: int, payload_bytes: int, *, has_index: bool, blocks: Sequence[int] = ()
) -> int:
    """Return the bytes a chunk takes, rounded up so that the next one is aligned too.

    Args:
        records: Number of records.
        payload_bytes: Bytes of the tokens.
        has_index: Whether an index column is there.
        blocks: Bytes of each block behind the tokens, see `field_blocks` and `media_blocks`.
    """
    payload = column_offsets(records, has_index=has_index).payload
    end = align_up(payload + payload_bytes, CHUNK_ALIGN_BYTES)
    return end + sum(align_up(size, CHUNK_ALIGN_BYTES) for size in blocks)


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
    values: Sequence[ValueArray] = (),
    media: Sequence[MediaColumn] = (),
) -> memoryview:
    """Write all of a chunk but its payload, and return the payload's bytes, to be filled next.

    Args:
        view: Writable bytes, at least `encoded_bytes(...)` long; starts at the chunk's first byte.
        token_bytes: 2 (uint16) or 4 (int32).
        source_index: Index of the source in the job.
        block_key: See msd_client.contract.position.
        first_index: Index in the block of the first record; ignored where `index` is given.
        flags: FLAG_BLOCK_END and FLAG_LANE_END; the others follow from what else is given.
        window_blocks: Blocks of the window, 0 for streaming sources.
        offsets: Token offsets of the records. Shape (records + 1,), starts at 0.
        status: RecordStatus of each record. Shape (records,).
        index: Index in the block of each record, for records that are not consecutive.
        values: Values of each field of the job, little endian. Shapes (tokens,) or (records,).
        media: Items of each media rule of the job; left out where there is no item.

    Raises:
        ChunkCorruptError: The view is too small or the columns do not belong together.
    """
    records = len(status)
    if token_bytes not in TOKEN_BYTES or len(offsets) != records + 1:
        raise ChunkCorruptError(
            f"chunk of source {source_index}: {records} records with {len(offsets)} offsets and "
            f"{token_bytes} bytes a token do not belong together"
        )
    payload_bytes = int(offsets[-1]) * token_bytes
    places = column_offsets(records, has_index=index is not None)
    fields_count = len(values)
    sizes = [array.nbytes for array in values]
    if media and has_items(media):
        sizes += media_blocks(records, media_sizes(media))
    blocks = block_places(places.payload + payload_bytes, sizes)
    end = blocks[-1] + sizes[-1] if blocks else places.payload + payload_bytes
    if len(view) < end:
        raise ChunkCorruptError(
            f"chunk of source {source_index} needs {end} bytes, the pool lent {len(view)}"
        )
    field_places, media_places = blocks[:fields_count], blocks[fields_count:]
    fields_end = field_places[-1] + sizes[fields_count - 1] if field_places else 0
    flags |= FLAG_HAS_INDEX if index is not None else 0
    flags |= FLAG_HAS_FIELDS if field_places else 0
    flags |= FLAG_HAS_MEDIA if media_places else 0
    header = ChunkHeader(
        token_bytes=token_bytes,
        source_index=source_index,
        records=records,
        block_key=block_key,
        first_index=-1 if index is not None else first_index,
        flags=flags,
        window_blocks=window_blocks,
        payload_offset=places.payload,
        payload_bytes=payload_bytes,
        fields_bytes=fields_end - field_places[0] if field_places else 0,
        fields=fields_count,
        media=len(media) if media_places else 0,
    )
    put_head(view, header, offsets, status, index)
    for place, array in zip(field_places, values, strict=True):
        np.frombuffer(view, array.dtype, len(array), place)[:] = array
    if media_places:
        put_media(view, media_places, records, media)
    return view[places.payload : places.payload + payload_bytes]


def put_head(
    view: memoryview,
    header: ChunkHeader,
    offsets: npt.NDArray[np.int64],
    status: npt.NDArray[np.uint8],
    index: npt.NDArray[np.int32] | None = None,
) -> None:
    """Write what stands before a chunk's payload: header and columns; see `encode_chunk_columns`."""
    records = header.records
    places = column_offsets(records, has_index=index is not None)
    header.pack_into(view)
    np.frombuffer(view, "<i8", records + 1, places.offsets)[:] = offsets
    np.frombuffer(view, np.uint8, records, places.status)[:] = status
    if index is not None:
        np.frombuffer(view, "<i4", records, places.index)[:] = index


class ChunkView:
    """A chunk read in place: every array is a view of the pool and lives no longer than it.

    Args:
        view: Bytes from the chunk's first one on; may reach beyond the chunk's end.

    Raises:
        ChunkCorruptError: The header is not one, or it points outside the view.
    """

    __slots__ = ("_places", "_view", "header")

    def __init__(self, view: memoryview) -> None:
        self.header = decode_header(view)
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
        if self.header.has_fields:
            end = self.header.fields_offset + self.header.fields_bytes
            if self.header.fields_bytes < 0 or end > len(view):
                raise ChunkCorruptError(
                    f"chunk has {self.header.fields_bytes} bytes of fields that end at byte {end} "
                    f"of {len(view)} mapped ones"
                )
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

    def values(self, fields: Sequence[FieldRow]) -> tuple[ValueArray, ...]:
        """Return the values of each field, views; none where the chunk carries no fields.

        Args:
            fields: The job's, in its order.

        Raises:
            ChunkCorruptError: The chunk carries other fields than these.
        """
        header = self.header
        if not header.has_fields:
            return ()
        tokens = header.payload_bytes // header.token_bytes
        sizes = field_blocks(fields, header.records, tokens)
        places = block_places(header.fields_offset, sizes)
        end = places[-1] + sizes[-1] if places else header.fields_offset
        if len(sizes) != header.fields or end != header.fields_offset + header.fields_bytes:
            raise ChunkCorruptError(
                f"chunk of source {header.source_index} carries {header.fields} fields in "
                f"{header.fields_bytes} bytes, the job has {len(sizes)} in "
                f"{end - header.fields_offset}"
            )
        return tuple(
            np.frombuffer(self._view, dtype, size // dtype.itemsize, place)
            for dtype, size, place in zip(map(value_dtype, fields), sizes, places, strict=True)
        )

    def media(self, rules: Sequence[MediaRow]) -> tuple[MediaView, ...]:
        """Return the items of each media rule, views; none where the chunk carries no media.

        Args:
            rules: The job's, in its order.

        Raises:
            ChunkCorruptError: The chunk carries other media than these, or damaged ones.
        """
        header = self.header
        if not header.has_media:
            return ()
        return read_media(self._view, header.media_offset, self.offsets, header.media, rules)

    def record(self, number: int) -> TokenArray:
        """Return the tokens of record `number` of the chunk, a view."""
        start, end = self.offsets[number : number + 2]
        return self.tokens[start:end]
