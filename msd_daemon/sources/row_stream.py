"""Rows of a row group, whose reader may be put away between two of them and opened again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, Generic, Self, TypeVar

READERS_MAX = 2
"""Readers of small row groups that a process keeps open."""
_PUT_AWAY_BYTES_MAX = 16 << 20

Item = TypeVar("Item")


class RowStream(Generic[Item]):
    """Rows of one row group, whose reader may be put away between two items.

    An open pyarrow reader keeps 4 to 7 MiB (a page, its dictionary, a batch), so a worker that hosts
    many sources keeps only the last few readers open. Another row of a stream that was put away
    opens it again and decodes up to there once more; that is cheap beside tokenizing as long as the
    row group is small, and larger ones are not put away. All streams of a process share the limit.

    Args:
        open_at: Opens the row group at a row; yields its bytes, then items. Gets what it calls
            before its last item where that is a damage: it is met once, however often the reader
            was put away.
        rows_of: Rows that an item stands for; None: one each.
    """

    _open: ClassVar[list[RowStream[Any]]] = []
    """Streams with an open reader that may be put away, least recently used first."""

    def __init__(
        self,
        open_at: Callable[[int, Callable[[], None]], Iterator[Item | int]],
        rows_of: Callable[[Item], int] | None = None,
    ) -> None:
        self._open_at = open_at
        self._rows_of = rows_of
        self._given = 0
        self._items: Iterator[Item | int] | None = None
        self._is_last = False
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if self._is_over:
            raise StopIteration
        if self._items is None:
            self._items = self._open_at(self._given, self._end)
        item = next(self._items, None)
        if item is None:
            self.close()
            raise StopIteration
        if isinstance(item, int):
            self._limit_readers(item)
            return next(self)
        self._given += 1 if self._rows_of is None else self._rows_of(item)
        if self._is_last:
            self.close()
        return item

    def _end(self) -> None:
        self._is_last = True

    def _limit_readers(self, group_bytes: int) -> None:
        if group_bytes > _PUT_AWAY_BYTES_MAX:
            return
        RowStream._open.append(self)
        while len(RowStream._open) > READERS_MAX:
            RowStream._open[0].put_away()

    def put_away(self) -> None:
        """Close the reader; the next row opens it again."""
        if self in RowStream._open:
            RowStream._open.remove(self)
        items, self._items = self._items, None
        if isinstance(items, Generator):
            items.close()

    def close(self) -> None:
        """Close the reader for good."""
        self._is_over = True
        self.put_away()
