"""Where the segments of one microbatch lie in the pool and where they go. Pure columns, no payload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SEGMENT_COLUMNS: tuple[tuple[str, str], ...] = (
    ("chunk_offset", "<i8"),
    ("sample", "<i4"),
    ("sample_offset", "<i4"),
    ("length", "<i4"),
    ("row", "<i4"),
    ("column", "<i4"),
    ("source", "<i4"),
)
"""Columns in the order in which they travel: int64 first, so that all are aligned."""
SEGMENT_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in SEGMENT_COLUMNS)


@dataclass(frozen=True, slots=True)
class SegmentColumns:
    """Segments of one microbatch, sorted by (row, column); all columns have shape (segments,).

    Raises:
        ValueError: A column has another length or dtype than stated here.
    """

    chunk_offset: npt.NDArray[np.int64]
    """First byte of the segment's chunk in the pool."""
    sample: npt.NDArray[np.int32]
    """Number of the record inside the chunk."""
    sample_offset: npt.NDArray[np.int32]
    """First token of the segment inside the record."""
    length: npt.NDArray[np.int32]
    """Tokens, at least 1."""
    row: npt.NDArray[np.int32]
    """Row inside the microbatch."""
    column: npt.NDArray[np.int32]
    """First token inside the row."""
    source: npt.NDArray[np.int32]
    """Index of the source in the job."""

    def __post_init__(self) -> None:
        shape = self.chunk_offset.shape
        for name, dtype in SEGMENT_COLUMNS:
            column = getattr(self, name)
            if column.dtype != dtype or column.shape != shape or column.ndim != 1:
                raise ValueError(
                    f"segment column {name} is {column.dtype}{column.shape}, "
                    f"expected {np.dtype(dtype)}{shape}"
                )

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self.chunk_offset)

    def encode(self) -> bytes:
        """Return the columns one after the other, little endian (36 bytes a segment)."""
        return self.encode_part(0, self.count)

    def encode_part(self, start: int, end: int) -> bytes:
        """Return the columns of the segments from `start` up to `end`, as `encode` does."""
        return b"".join(
            (
                self.chunk_offset[start:end].tobytes(),
                self.sample[start:end].tobytes(),
                self.sample_offset[start:end].tobytes(),
                self.length[start:end].tobytes(),
                self.row[start:end].tobytes(),
                self.column[start:end].tobytes(),
                self.source[start:end].tobytes(),
            )
        )

    def part(self, start: int, end: int) -> SegmentColumns:
        """Return the segments from `start` up to `end`, as views."""
        return SegmentColumns(*(getattr(self, name)[start:end] for name, _ in SEGMENT_COLUMNS))

    @classmethod
    def decode(cls, buffer: bytes | memoryview, count: int, offset: int = 0) -> SegmentColumns:
        """Return views of `count` segments that lie in `buffer` from byte `offset` on.

        Raises:
            ValueError: The buffer is too short, or `count` is negative.
        """
        if count < 0 or offset + count * SEGMENT_BYTES > len(buffer):
            raise ValueError(
                f"{count} segments need {count * SEGMENT_BYTES} bytes from {offset} on, "
                f"the task has {len(buffer)}"
            )
        columns = []
        for _, dtype in SEGMENT_COLUMNS:
            columns.append(np.frombuffer(buffer, dtype, count, offset) if count else _EMPTY[dtype])
            offset += count * np.dtype(dtype).itemsize
        return cls(*columns)


_EMPTY = {dtype: np.empty(0, dtype) for _, dtype in SEGMENT_COLUMNS}
