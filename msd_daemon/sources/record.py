"""One raw record on its way from a shard to the tokenizer, and the meter of what was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import CorruptRecordError

OK = int(RecordStatus.OK)

FieldValue = npt.NDArray[Any] | float
"""Of one field of one record: an array with a number per token, or one number."""


@dataclass(slots=True)
class RawRecord:
    """Bytes of a record as they lie, or why there are none."""

    place: int
    """Where it begins: a byte offset (decompressed in a stream), a row in parquet."""
    raw: bytes
    status: int = OK
    fault: str = ""
    """What is wrong, for people; empty where the status is OK."""
    key: bytes | None = None
    """What names it, where a column of its own holds that (parquet)."""
    values: tuple[FieldValue, ...] = ()
    """Of the job's fields, where columns of their own hold them (parquet)."""
    fields: Mapping[str, Any] | None = None
    """What the record is made of, where the source has a recipe or its format has no plain text:
    by name bytes, text, numbers, booleans, None, lists, maps, arrays, and MediaPath for media that
    lie in files of their own. `raw` is empty then."""
    fields_bytes: int = 0
    """Raw bytes of the fields."""
    is_continuing: bool = False
    """True where it belongs to the group of the record before it."""

    @property
    def size_bytes(self) -> int:
        """Raw bytes, which record windows count."""
        return len(self.raw) + self.fields_bytes


@dataclass(frozen=True, slots=True)
class MediaPath:
    """An image, sound or video that lies in a file of its own."""

    path: str
    """As the record has it; relative ones start at the source's media root."""


@dataclass(slots=True)
class Extracted:
    """What a record holds, or its fault."""

    text: str
    status: int = OK
    fault: str = ""
    ids: npt.NDArray[np.int64] | None = None
    """Token ids of a pre-tokenized record, in place of a text."""
    key: bytes | None = None
    """What names it; there beside a fault too, wherever it could be read."""
    values: tuple[FieldValue, ...] = ()
    """Of the job's fields, in its order, of their dtypes."""


Extractor = Callable[[RawRecord], Extracted]
"""Takes out of a raw record what is in it; never raises on bad bytes."""


@dataclass(slots=True)
class ReadMeter:
    """Counts what a source loader read; shared by all its readers."""

    read_bytes: int = 0
    lost: set[str] = field(default_factory=set)
    """Paths of shards that could not be opened, or had another size than the manifest says."""

    def uncounted(self) -> ReadMeter:
        """Return one for bytes that are counted elsewhere."""
        return ReadMeter(lost=self.lost)


def unreadable(place: int, error: CorruptRecordError | OSError) -> RawRecord:
    """Return the record that stands for damage of the container."""
    if isinstance(error, CorruptRecordError):
        return RawRecord(place, b"", int(RecordStatus.UNREADABLE), error.message)
    reason = error.strerror or str(error)
    return RawRecord(place, b"", int(RecordStatus.UNREADABLE), f"cannot be read: {reason}")


def lost_shard(error: CorruptRecordError | OSError, records: int | None = None) -> RawRecord:
    """Return the one record that stands for a shard that cannot be opened at all.

    Args:
        error: What is wrong with it.
        records: How many records it had, as an index or footer says; None where nothing does.
    """
    record = unreadable(0, error)
    record.fault += f"; {lost_records(records)}"
    return record


def lost_records(records: int | None) -> str:
    """Return what the loss of a shard costs, for people."""
    if records is None or records < 0:
        return "an unknown number of records is lost"
    return f"all its {records} records are lost"
