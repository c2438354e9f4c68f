"""What the media of a chunk's records take, told from its marks: the daemon maps no payload. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from federation.model.chunk import (
    MARK_BEGIN,
    MARK_KIND,
    MARK_TOKENS,
    MARK_UNITS,
    Marks,
)
from federation.model.media import MediaRule
from msd_client.contract.errors import InternalError
from msd_daemon.shm.media_layout import ITEM_BYTES, MediaSize


class ChunkMedia:
    """Items of a chunk's records, by their places.

    Args:
        table: Lines of marks (kind, begin, tokens, units) of all records in turn; items alone.
        starts: First line of each record. Shape (records + 1,).
        unit_bytes: Bytes of a unit, of each media rule of the job.
    """

    def __init__(
        self,
        table: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int64],
        unit_bytes: tuple[int, ...],
    ) -> None:
        self._table = table
        self._starts = starts
        self._unit_bytes = unit_bytes
        self._sizes: dict[tuple[int, int, int], tuple[MediaSize, ...]] = {}

    @classmethod
    def of(cls, marks: Marks | None, rules: Sequence[MediaRule]) -> ChunkMedia | None:
        """Return the media of a chunk, None where it holds no item.

        Raises:
            InternalError: A mark is of media that the job does not have.
        """
        if marks is None or not rules:
            return None
        is_item = marks.table[:, MARK_KIND] >= 0
        table = marks.table[is_item]
        if not len(table):
            return None
        if int(table[:, MARK_KIND].max()) >= len(rules):
            raise InternalError(
                f"a loader marked media of kind {table[:, MARK_KIND].max()}, the job has {len(rules)} kinds"
            )
        items_before = np.concatenate([[0], np.cumsum(is_item)])
        ends = np.concatenate([[0], np.cumsum(marks.counts, dtype=np.int64)])
        return cls(table, items_before[ends], tuple(rule.unit_bytes for rule in rules))

    def sizes(self, record: int, offset: int, tokens: int) -> tuple[MediaSize, ...]:
        """Return what the items that lie whole in a part of a record take, of each rule.

        Args:
            record: Number of the record.
            offset: First token of the part.
            tokens: Tokens of the part.
        """
        key = (record, offset, tokens)
        found = self._sizes.get(key)
        if found is None:
            lines = self._lines(record, offset, tokens)
            found = self._sizes[key] = tuple(
                _size(lines[lines[:, MARK_KIND] == kind], unit_bytes)
                for kind, unit_bytes in enumerate(self._unit_bytes)
            )
        return found

    def part_bytes(self, record: int, offset: int, tokens: int) -> int:
        """Return the bytes of the items of a part."""
        sizes = self.sizes(record, offset, tokens)
        return sum(ITEM_BYTES * size.items + size.data_bytes for size in sizes)

    def part(self, record: int, offset: int, tokens: int) -> ChunkMedia | None:
        """Return the media of a chunk that holds just that part, None where it has no item."""
        lines = self._lines(record, offset, tokens).copy()
        if not len(lines):
            return None
        lines[:, MARK_BEGIN] -= offset
        return ChunkMedia(lines, np.array([0, len(lines)]), self._unit_bytes)

    def _lines(self, record: int, offset: int, tokens: int) -> npt.NDArray[np.int32]:
        lines = self._table[self._starts[record] : self._starts[record + 1]]
        begins = lines[:, MARK_BEGIN]
        is_inside = (begins >= offset) & (begins + lines[:, MARK_TOKENS] <= offset + tokens)
        return lines[is_inside]


def _size(lines: npt.NDArray[np.int32], unit_bytes: int) -> MediaSize:
    return MediaSize(len(lines), unit_bytes * int(lines[:, MARK_UNITS].sum(dtype=np.int64)))
