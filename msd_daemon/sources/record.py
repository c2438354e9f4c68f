"""One raw record on its way from a shard to the tokenizer, and the meter of what was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import CorruptRecordError

OK = int(RecordStatus.OK)


@dataclass(slots=True)
class RawRecord:
    """Bytes of a record as they lie, or why there are none."""

    place: int
    """Where it begins: a byte offset (decompressed in a stream), a row in parquet."""
    raw: bytes
    status: int = OK
    fault: str = ""
    """What is wrong, for people; empty where the status is OK."""

    @property
    def size_bytes(self) -> int:
        """Raw bytes, which record windows count."""
        return len(self.raw)


@dataclass(slots=True)
class Extracted:
    """Text of a record, or its fault."""

    text: str
    status: int = OK
    fault: str = ""


Extractor = Callable[[bytes], Extracted]
"""Turns the raw bytes of a record into text; never raises on bad bytes."""


@dataclass(slots=True)
class ReadMeter:
    """Counts what a source loader read; shared by all its readers."""

    read_bytes: int = 0


def unreadable(place: int, error: CorruptRecordError | OSError) -> RawRecord:
    """Return the record that stands for damage of the container."""
    if isinstance(error, CorruptRecordError):
        return RawRecord(place, b"", int(RecordStatus.UNREADABLE), error.message)
    reason = error.strerror or str(error)
    return RawRecord(place, b"", int(RecordStatus.UNREADABLE), f"cannot be read: {reason}")
