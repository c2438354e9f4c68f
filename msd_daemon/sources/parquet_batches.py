"""How many rows of a row group are read at once, and rows pulled from a reader that lags behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from msd_daemon.sources.parquet_file import OpenParquet

_BATCH_BYTES = 256 * 1024
_BATCH_ROWS_MIN = 8
_BATCH_ROWS_MAX = 256
_ROW_GROUP_ROWS_MAX = 1 << 31
_VALUE_BYTES = 64
"""What levels and lengths of a value may take beside it."""


@dataclass(frozen=True)
class BatchRule:
    """Rows of a row group, and of a batch."""

    rows: int
    batch_rows: int

    @classmethod
    def of(cls, opened: OpenParquet, block: int, record_bytes_max: int) -> BatchRule:
        """Return the rule of a row group: batches of bounded bytes.

        Raises:
            CorruptRecordError: The row group's size is beyond belief.
        """
        rows, group_bytes = opened.measure(block)
        if not 0 <= rows < _ROW_GROUP_ROWS_MAX:
            raise opened.damage(block, f"claims {rows} rows")
        values = max(rows, 1) * max(len(opened.schema), 1)
        if group_bytes > (record_bytes_max + _VALUE_BYTES) * values:
            raise opened.damage(
                block,
                f"has {group_bytes} bytes in {rows} rows, over record_bytes_max = "
                f"{record_bytes_max} a value: raise it if they are that large",
            )
        fitting = _BATCH_BYTES * max(rows, 1) // max(group_bytes, 1)
        return cls(rows, min(max(fitting, _BATCH_ROWS_MIN), _BATCH_ROWS_MAX))


class PullRows:
    """Rows of a row group by their places, in ascending order; opened at the first need.

    Args:
        open_at: Yields the batches from a row on.
    """

    def __init__(self, open_at: Callable[[int], Iterator[Any]]) -> None:
        self._open_at = open_at
        self._batches: Iterator[Any] | None = None
        self._batch: Any = None
        self._row = 0
        """Of the first row of the batch."""

    def rows(self, first: int, count: int) -> Iterator[Any]:
        """Yield batches of the rows [first, first + count), fewer where the reader ends before."""
        end = first + count
        while first < end:
            if self._batch is None or first >= self._row + self._batch.num_rows:
                if not self._advance(first):
                    return
                continue
            begin = first - self._row
            part = self._batch.slice(begin, end - first)
            yield part
            first += part.num_rows

    def _advance(self, first: int) -> bool:
        if self._batches is None:
            self._batches = self._open_at(first)
            self._row = first
        elif self._batch is not None:
            self._row += self._batch.num_rows
        self._batch = next(self._batches, None)
        return self._batch is not None
