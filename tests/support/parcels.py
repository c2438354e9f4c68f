"""Chunks with known content in a pool, and fragments of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msd_daemon.shm.chunk_layout import ChunkView, encode_chunk_columns, encoded_bytes
from msd_daemon.shm.field_layout import field_blocks, value_dtype
from msd_daemon.shm.fragment_columns import FragmentColumns
from msd_daemon.shm.media_layout import MediaColumn, has_items, media_blocks, media_sizes
from msd_daemon.workers.exchange_pool import FieldShape, MediaShape

FIELDS = (FieldShape("token", "float32"), FieldShape("segment", "int64"))
MEDIA = (MediaShape(6, "uint8"), MediaShape(3, "float32"))


@dataclass
class Source:
    """A chunk to be: records of given lengths, of one source."""

    index: int
    lengths: Sequence[int]
    token_bytes: int = 2
    items: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """By record: (rule, first token, tokens, units) of its items, in order."""
    has_fields: bool = True


@dataclass(frozen=True)
class Placed:
    """Where a chunk lies."""

    source: Source
    offset: int
    nbytes: int
    block_key: int


class FilledPool:
    """Chunks one after the other in a memory.

    Args:
        view: Of the pool.
        begin: Where the first chunk goes.
    """

    def __init__(
        self,
        view: memoryview,
        *,
        fields: Sequence[FieldShape] = (),
        media: Sequence[MediaShape] = (),
        begin: int = 0,
        seed: int = 0,
    ) -> None:
        self.view = view
        self.fields, self.media = fields, media
        self.end = begin
        self.chunks: list[Placed] = []
        self._rng = np.random.default_rng(seed)

    def put(self, source: Source) -> Placed:
        """Encode a chunk of random tokens, values and units."""
        rng, records = self._rng, len(source.lengths)
        offsets = np.concatenate([[0], np.cumsum(source.lengths)]).astype(np.int64)
        tokens = int(offsets[-1])
        fields = self.fields if source.has_fields else ()
        values = [
            rng.integers(0, 1000, tokens if rule.per == "token" else records).astype(
                value_dtype(rule)
            )
            for rule in fields
        ]
        media = [self._column(source, number, rule) for number, rule in enumerate(self.media)]
        media = media if has_items(media) else []
        blocks = [
            *field_blocks(fields, records, tokens),
            *media_blocks(records, media_sizes(media)),
        ]
        dtype = np.uint16 if source.token_bytes == 2 else np.int32
        nbytes = encoded_bytes(records, tokens * source.token_bytes, has_index=False, blocks=blocks)
        block_key = 1000 + len(self.chunks)
        payload = encode_chunk_columns(
            self.view[self.end : self.end + nbytes],
            token_bytes=source.token_bytes,
            source_index=source.index,
            block_key=block_key,
            first_index=0,
            flags=0,
            window_blocks=0,
            offsets=offsets,
            status=np.zeros(records, np.uint8),
            values=values,
            media=media,
        )
        np.frombuffer(payload, dtype)[:] = rng.integers(0, 60_000, tokens)
        placed = Placed(source, self.end, nbytes, block_key)
        self.chunks.append(placed)
        self.end += -(-nbytes // 4096) * 4096
        return placed

    def _column(self, source: Source, number: int, rule: MediaShape) -> MediaColumn:
        counts, rows, data = [], [], []
        for record in range(len(source.lengths)):
            own = [item[1:] for item in source.items.get(record, []) if item[0] == number]
            counts.append(len(own))
            rows += [(begin, tokens, units, 1, 1, units) for begin, tokens, units in own]
            data += [
                self._rng.integers(0, 200, (units, rule.unit_values)).astype(rule.unit_dtype)
                for _, _, units in own
            ]
        table = np.array(rows, np.int32).reshape(-1, 6)
        return MediaColumn(np.array(counts, np.int32), table, data)

    def fragments(self, picks: Sequence[tuple[int, int, int, int]]) -> FragmentColumns:
        """Return columns of (chunk number, record, first token, tokens)."""
        rows = [
            (
                self.chunks[chunk].source.index,
                self.chunks[chunk].block_key,
                record,
                first,
                tokens,
                self.chunks[chunk].offset,
                self.chunks[chunk].nbytes,
                record,
                first,
            )
            for chunk, record, first, tokens in picks
        ]
        return FragmentColumns(*(np.array(column) for column in zip(*rows, strict=True)))

    def content(self, pick: tuple[int, int, int, int]) -> tuple[Any, ...]:
        """Return what a fragment holds, in plain things."""
        number, record, first, tokens = pick
        chunk = self.chunks[number]
        view = ChunkView(self.view[chunk.offset : chunk.offset + chunk.nbytes])
        return record_content(view, record, first, tokens, self.fields, self.media)


def record_content(
    view: ChunkView,
    record: int,
    first: int,
    tokens: int,
    fields: Sequence[FieldShape],
    media: Sequence[MediaShape],
) -> tuple[Any, ...]:
    """Return tokens, values and items of a part of a record, in plain things."""
    begin = int(view.offsets[record]) + first
    values = [
        array[begin : begin + tokens].tolist() if rule.per == "token" else [array[record].item()]
        for rule, array in zip(fields, view.values(fields), strict=False)
    ]
    items = []
    for column in view.media(media):
        part = column.part(record, first, tokens)
        items.append((part.items.tolist(), [array.tolist() for array in part.data]))
    if not any(rows for rows, _ in items):
        items = []
    return view.tokens[begin : begin + tokens].tolist(), values, items
