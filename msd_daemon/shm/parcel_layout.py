"""Byte layout of a parcel: chunks one after the other, one for each (source, token width).

A record of such a chunk is a fragment, with its values and the items that lie whole in it, so a
constructor reads it like any other. Nothing is copied here: a layout says which bytes of the pool go
where, and any range of the parcel is gathered from it in one pass. The same fragments give the same
layout wherever they lie.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federation.exchange_messages import (
    FRAGMENTS_MAX,
    PARCEL_BYTES_MAX,
    PARTS_MAX,
    ParcelTable,
)
from msd_client.contract.errors import BudgetError, ChunkCorruptError
from msd_client.contract.slot_fields import align_up
from msd_daemon.gather import sort_rows
from msd_daemon.gather.spans import Spans, join_spans
from msd_daemon.shm.chunk_header import (
    CHUNK_ALIGN_BYTES,
    FLAG_HAS_FIELDS,
    FLAG_HAS_MEDIA,
    ChunkHeader,
)
from msd_daemon.shm.chunk_layout import (
    ChunkView,
    column_offsets,
    encoded_bytes,
    put_head,
)
from msd_daemon.shm.field_layout import FieldRow, block_places, field_blocks, value_dtype
from msd_daemon.shm.fragment_columns import FragmentColumns
from msd_daemon.shm.fragment_places import FragmentPlaces, find_places
from msd_daemon.shm.media_layout import (
    BLOCKS_PER_RULE,
    ITEM_COLUMNS,
    MediaColumn,
    MediaRow,
    has_items,
    media_blocks,
    media_sizes,
    put_media_tables,
)

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ParcelLayout:
    """Where every byte of a parcel comes from."""

    size_bytes: int
    table: ParcelTable
    pooled: Spans
    """From the pool."""
    owned: Spans
    """From `own`: headers, tables, and the zeros between blocks."""
    own: bytes
    pool_bytes: int

    def gather(self, pool: memoryview, begin: int, out: memoryview) -> None:
        """Write the bytes of the parcel from `begin` on into `out`, all of it."""
        self.pooled.gather(pool, begin, out)
        self.owned.gather(memoryview(self.own), begin, out)

    @functools.cached_property
    def lying(self) -> Spans:
        """All bytes of the parcel in their order; `own` is counted from the end of the pool on."""
        targets = np.concatenate([self.pooled.target, self.owned.target])
        order = np.argsort(targets, kind="stable")
        sources = np.concatenate([self.pooled.source, self.owned.source + self.pool_bytes])
        nbytes = np.concatenate([self.pooled.nbytes, self.owned.nbytes])
        return Spans(targets[order], sources[order], nbytes[order])

    @property
    def digest(self) -> int:
        """A number that differs where the table does."""
        digest = hashlib.sha256(self.size_bytes.to_bytes(8, "little"))
        for frame in self.table.encode():
            digest.update(frame)
        return int.from_bytes(digest.digest()[:8], "little") >> 1


def lay_out(
    pool: memoryview,
    fragments: FragmentColumns,
    fields: Sequence[FieldRow] = (),
    media: Sequence[MediaRow] = (),
    *,
    has_units: bool = True,
) -> ParcelLayout:
    """Return the layout of a parcel of these fragments.

    Args:
        pool: The mapped pool.
        fragments: At least one.
        fields: The job's, in its order.
        media: The job's rules, in their order.
        has_units: False leaves the units of media out; tables say where items stand all the same.

    Raises:
        ChunkCorruptError: A fragment lies outside its record, or its chunk is none.
        BudgetError: The parcel is larger than one may be.
    """
    count = len(fragments)
    if not 1 <= count <= FRAGMENTS_MAX:
        raise BudgetError(
            f"a parcel of {count} fragments, expected 1 to {FRAGMENTS_MAX}: "
            "take fewer tokens a step, or more nodes",
            limit=FRAGMENTS_MAX,
        )
    places = find_places(pool, fragments, fields, media)
    if not has_units:
        for row, columns in places.media.items():
            places.media[row] = tuple(column.without_units() for column in columns)
    kinds = fragments.source.astype(np.int64) * 16 + places.token_bytes * 2 + places.has_fields
    # Within a chunk in their order of reading: records follow each other so in the pool, too, so that
    # runs of them are one span and memory is read forwards.
    order = sort_rows(fragments.offset, fragments.index, fragments.block_key, kinds)
    cuts = np.flatnonzero(np.diff(kinds[order])) + 1
    builder = _Builder(pool, fragments, places, fields, len(media))
    for rows in np.split(order, cuts):
        builder.add(rows)
    return builder.finish(order)


class _Builder:
    """Puts chunks one after the other."""

    def __init__(
        self,
        pool: memoryview,
        fragments: FragmentColumns,
        places: FragmentPlaces,
        fields: Sequence[FieldRow],
        media_count: int,
    ) -> None:
        self._pool_bytes = len(pool)
        self._pool_address = _address(np.frombuffer(pool, np.uint8))
        self._fragments = fragments
        self._places = places
        self._fields = fields
        self._media_count = media_count
        self._parts: list[tuple[int, int, int, int]] = []
        self._end = 0
        self._pooled: list[tuple[Int64, Int64, Int64]] = []
        """(place in the parcel, place in the pool, bytes), runs of spans."""
        self._owned: list[tuple[int, int, int]] = []
        self._own = bytearray(CHUNK_ALIGN_BYTES)  # zeros
        self._covered: list[tuple[int, int]] = []
        """(first byte, byte behind the last) of what was put."""

    def add(self, rows: Int64) -> None:
        """Add a chunk of these fragments, which are of one kind."""
        places, records = self._places, len(rows)
        token_bytes = int(places.token_bytes[rows[0]])
        lengths = self._fragments.length[rows].astype(np.int64)
        offsets = np.zeros(records + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        payload_bytes = int(offsets[-1]) * token_bytes
        fields = self._fields if places.has_fields[rows[0]] else ()
        media = self._media_of(rows)
        value_sizes = field_blocks(fields, records, int(offsets[-1]))
        media_sizes_ = media_blocks(records, media_sizes(media)) if media else []
        payload = column_offsets(records, has_index=False).payload
        blocks = block_places(payload + payload_bytes, [*value_sizes, *media_sizes_])
        size = encoded_bytes(
            records, payload_bytes, has_index=False, blocks=[*value_sizes, *media_sizes_]
        )
        begin, source = self._end, int(self._fragments.source[rows[0]])
        self._parts.append((source, begin, size, records))
        self._end += size
        value_places, media_places = blocks[: len(fields)], blocks[len(fields) :]
        fields_end = value_places[-1] + value_sizes[-1] if fields else 0
        header = ChunkHeader(
            token_bytes=token_bytes,
            source_index=source,
            records=records,
            block_key=0,
            first_index=0,
            flags=(FLAG_HAS_FIELDS if fields else 0) | (FLAG_HAS_MEDIA if media else 0),
            window_blocks=0,
            payload_offset=payload,
            payload_bytes=payload_bytes,
            fields_bytes=fields_end - value_places[0] if fields else 0,
            fields=len(fields),
            media=len(media),
        )
        head = bytearray(payload)
        put_head(memoryview(head), header, offsets, np.zeros(records, np.uint8))
        self._put_own(begin, head)
        self._put_pooled(
            begin + payload + offsets[:-1] * token_bytes,
            places.payload[rows],
            lengths * token_bytes,
        )
        for rule, place, found in zip(fields, value_places, places.values, strict=False):
            size_bytes = value_dtype(rule).itemsize
            is_token = rule.per == "token"
            at = offsets[:-1] if is_token else np.arange(records, dtype=np.int64)
            spans = lengths if is_token else np.ones(records, np.int64)
            self._put_pooled(begin + place + at * size_bytes, found[rows], spans * size_bytes)
        if media:
            self._put_media(begin, media_places, records, media)

    def _media_of(self, rows: Int64) -> list[MediaColumn]:
        """Return all items of the fragments, one column for each rule; none where there is no item."""
        if not self._places.media:
            return []
        found = [self._places.media.get(row) for row in rows.tolist()]
        columns = []
        for number in range(self._media_count):
            parts = [None if media is None else media[number] for media in found]
            counts = [0 if part is None else int(part.counts[0]) for part in parts]
            items = [part.items for part in parts if part is not None]
            columns.append(
                MediaColumn(
                    np.array(counts, np.int32),
                    np.concatenate([np.zeros((0, len(ITEM_COLUMNS)), np.int32), *items]),
                    [array for part in parts if part is not None for array in part.data],
                )
            )
        return columns if has_items(columns) else []

    def _put_media(
        self, begin: int, places: Sequence[int], records: int, media: Sequence[MediaColumn]
    ) -> None:
        # The tables are made where they would stand, in a copy that has no units.
        sizes = media_sizes(media)
        blocks = media_blocks(records, sizes)
        tables = [
            size for number, size in enumerate(blocks) if not number or number % BLOCKS_PER_RULE
        ]
        own_places = block_places(0, tables)
        own = memoryview(bytearray(own_places[-1] + tables[-1]))
        left = iter(own_places)
        put_places = [
            next(left) if not number or number % BLOCKS_PER_RULE else -1
            for number in range(len(blocks))
        ]
        put_media_tables(own, put_places, records, media)
        for place, put_place, size in zip(places, put_places, blocks, strict=True):
            if put_place >= 0:
                self._put_own(begin + place, own[put_place : put_place + size])
        for number, column in enumerate(media):
            if not sum(array.nbytes for array in column.data):
                continue
            sizes_bytes = np.array([array.nbytes for array in column.data], np.int64)
            ends = np.cumsum(sizes_bytes)
            target = begin + places[BLOCKS_PER_RULE * (number + 1)] + ends - sizes_bytes
            addresses = np.array([_address(array) for array in column.data], np.int64)
            self._put_pooled(target, addresses - self._pool_address, sizes_bytes)

    def _put_own(self, target: int, data: bytearray | memoryview) -> None:
        if len(data):
            self._owned.append((target, len(self._own), len(data)))
            self._own += data
            self._covered.append((target, target + len(data)))

    def _put_pooled(self, target: Int64, source: Int64, nbytes: Int64) -> None:
        begin, end = int(target[0]), int(target[-1] + nbytes[-1])
        assert int(nbytes.sum()) == end - begin, "spans of a block overlap, or leave room"
        self._pooled.append((target, source, nbytes))
        self._covered.append((begin, end))

    def finish(self, order: Int64) -> ParcelLayout:
        if self._end > PARCEL_BYTES_MAX or len(self._parts) > PARTS_MAX:
            raise BudgetError(
                f"a parcel of {self._end} bytes and {len(self._parts)} chunks, the limits are "
                f"{PARCEL_BYTES_MAX} and {PARTS_MAX}: take fewer tokens a step, or more nodes",
                needed_bytes=self._end,
                limit=PARCEL_BYTES_MAX,
            )
        pooled = join_spans(*(np.concatenate(run) for run in zip(*self._pooled, strict=True)))
        self._put_zeros()
        owned = join_spans(*np.array(self._owned, np.int64).T.copy())
        fragments = self._fragments
        table = ParcelTable(
            np.array(self._parts, np.int64),
            fragments.block_key.take(order),
            fragments.index.take(order),
            fragments.offset.take(order),
            fragments.length.take(order),
        )
        return ParcelLayout(self._end, table, pooled, owned, bytes(self._own), self._pool_bytes)

    def _put_zeros(self) -> None:
        """Cover what alignment leaves: no byte of a frame may be left as it was."""
        at = 0
        for begin, end in [*sorted(self._covered), (self._end, self._end)]:
            assert 0 <= begin - at < CHUNK_ALIGN_BYTES, "blocks of a parcel overlap"
            if begin > at:
                self._owned.append((at, 0, begin - at))
            at = end


def _address(array: npt.NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def check_parcel(
    parcel: memoryview,
    table: ParcelTable,
    fields: Sequence[FieldRow] = (),
    media: Sequence[MediaRow] = (),
) -> None:
    """Check that received bytes are the chunks that their table says; nothing of them is believed.

    Raises:
        ChunkCorruptError: They are not.
    """
    at = 0
    for source, begin, used, records in table.parts.tolist():
        view = ChunkView(parcel[begin : begin + used])
        header = view.header
        length = table.length[at : at + records]
        at += records
        is_sound = (
            header.source_index == source
            and header.records == records
            and not header.has_index
            and np.array_equal(view.lengths, length)
            and not view.status.any()
        )
        if not is_sound:
            raise ChunkCorruptError(
                f"a chunk of a parcel holds {header.records} records of source {header.source_index}, "
                f"its table says {records} of source {source}, or their lengths differ"
            )
        view.values(fields)
        view.media(media)
        end = header.payload_offset + header.payload_bytes
        end = max(end, header.fields_offset + header.fields_bytes if header.has_fields else 0)
        if align_up(end, CHUNK_ALIGN_BYTES) != used and not header.has_media:
            raise ChunkCorruptError(
                f"a chunk of a parcel ends at byte {end}, its table says {used}"
            )
