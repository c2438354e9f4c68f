"""Names records instead of encoding them: for people who ask which records a step held.

The same walks, blocks and windows as a run's, so a record stands where it stood; no tokenizer runs
and no image is decoded. Every record comes as one of one token whose `BadRecord` says its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from msd_daemon.sources.bad_record import BadRecord, shown_key
from msd_daemon.sources.encoded import EncodedRecords, named
from msd_daemon.sources.json_text import read_object
from msd_daemon.sources.record import Extracted, RawRecord
from msd_daemon.sources.record_encoder import RecordEncoder
from msd_daemon.sources.record_fault import RecordFault
from msd_daemon.sources.record_identity import record_key
from msd_daemon.sources.sample_encoder import SampleEncoder


@dataclass(frozen=True)
class NamingRecordEncoder(RecordEncoder):
    """Names records that are read without fields."""

    key_field: str = ""
    """Of lines of JSON; a parquet's key comes with the record."""

    def encode(self, records: list[RawRecord]) -> EncodedRecords:
        """Return the names of records, in their order."""
        names = [_name(record, self.path, self.place_name, self.key_field) for record in records]
        return named(names, self.dtype)


@dataclass(frozen=True)
class NamingSampleEncoder(SampleEncoder):
    """Names records with fields."""

    @property
    def encode_records_max(self) -> int | None:
        """A whole window: nothing is decoded."""
        return None

    def encode(self, records: list[RawRecord]) -> EncodedRecords:
        """Return the names of records, in their order."""
        field = self.spec.key_field
        names = [_name(record, self.path, self.place_name, field) for record in records]
        return named(names, self.dtype)


def _name(record: RawRecord, path: str, place_name: str, key_field: str) -> BadRecord:
    key = record.key
    if key is None and key_field:
        if record.fields is None and record.raw:
            value = read_object(record.raw, is_exact=True)
            record.fields = None if isinstance(value, Extracted) else value
        try:
            key = record_key(record, key_field)
        except RecordFault:
            key = None
    return BadRecord(record.fault, path, place_name, record.place, shown_key(key))
