"""Turns raw records into tokens and field values: hold-out, text or ids, one value per token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule, TokenizerSpec
from msd_daemon.shm.field_layout import value_dtype
from msd_daemon.sources.bad_record import BadRecord, shown_key
from msd_daemon.sources.block_cursor import Pace
from msd_daemon.sources.chunk_draft import TokenDtype, Tokens
from msd_daemon.sources.encoded import EncodedRecords, FieldColumn, join_records
from msd_daemon.sources.hold_out import HoldOut
from msd_daemon.sources.record import Extracted, Extractor, FieldValue, RawRecord
from msd_daemon.sources.record_guard import NO_GUARD, ShardGuard, SourceGuard
from msd_daemon.transforms.tokenizer import Tokenizer

_HELD_OUT = int(RecordStatus.HELD_OUT)
_FIELD_MISSING = int(RecordStatus.FIELD_MISSING)
_QUARANTINED = int(RecordStatus.QUARANTINED)


@dataclass
class _Read:
    """Records of one call: what is in the good ones, what is wrong with the others, by number."""

    status: npt.NDArray[np.uint8]
    good: dict[int, Extracted] = field(default_factory=dict)
    faults: dict[int, BadRecord] = field(default_factory=dict)
    keys: dict[int, bytes] = field(default_factory=dict)

    def hold_out(self, number: int) -> None:
        """Make a record one of the other part, whatever is wrong with it."""
        self.status[number] = _HELD_OUT
        self.good.pop(number, None)
        self.faults.pop(number, None)


@dataclass(frozen=True)
class RecordEncoder:
    """Turns raw records of one shard into token arrays.

    Values of fields are checked against the tokens: a list has one number for each, the added BOS
    and EOS not counted.
    """

    extract: Extractor
    tokenizer: Tokenizer
    is_tokenized: bool = False
    """True where records hold ids: no tokenizer runs, nothing is added."""
    hold_out: HoldOut | None = None
    fields: tuple[FieldRule, ...] = ()
    path: str = ""
    place_name: str = "byte offset"
    """What `RawRecord.place` counts."""
    source_guard: SourceGuard = NO_GUARD.source
    guard: ShardGuard = NO_GUARD
    """Of the shard that the records lie in."""
    pace: Pace = field(default_factory=Pace)
    """Of the source."""

    @property
    def dtype(self) -> TokenDtype:
        """Of the tokens."""
        return self.tokenizer.dtype

    @property
    def encode_records_max(self) -> int | None:
        """A whole window: tokenizers are fastest with many texts."""
        return None

    def at(self, path: str, place_name: str = "byte offset", key: int = 0, epoch: int = 0) -> Self:
        """Return the same encoder for the records of a block of a shard.

        Args:
            path: The shard's.
            place_name: What `RawRecord.place` counts.
            key: Of all that is drawn at random; nothing is here.
            epoch: Of the block.
        """
        del key
        guard = self.source_guard.of(path, epoch)
        return replace(self, path=path, place_name=place_name, guard=guard)

    def encode(self, records: list[RawRecord]) -> EncodedRecords:
        """Return the tokens and field values of records, in their order."""
        if self.guard.is_suspect(records):
            return join_records([self.encode([record]) for record in records])
        with self.guard.working(records):
            return self._encode_records(records)

    def _encode_records(self, records: list[RawRecord]) -> EncodedRecords:
        read = _Read(np.zeros(len(records), dtype=np.uint8))
        self._read(records, read)
        if read.keys and self.hold_out is not None:
            is_sample = self.hold_out.are_samples(read.keys.values()).tolist()
            for number, is_one in zip(read.keys, is_sample, strict=True):
                if not is_one:
                    read.hold_out(number)
        numbers = list(read.good)
        tokens, offsets = self._encode(read.good.values())
        lengths = np.zeros(len(records), dtype=np.int32)
        lengths[numbers] = np.diff(offsets)
        columns: tuple[FieldColumn, ...] = ()
        if self.fields:
            tokens = self._drop_unequal(records, read, lengths, tokens)
            columns = tuple(
                value_column(
                    rule,
                    [extracted.values[place] for extracted in read.good.values()],
                    list(read.good),
                    lengths,
                    self._added,
                )
                for place, rule in enumerate(self.fields)
            )
        read.status[(lengths == 0) & (read.status == 0)] = RecordStatus.EMPTY
        return EncodedRecords(lengths, read.status, tokens, sorted(read.faults.items()), columns)

    def _read(self, records: list[RawRecord], read: _Read) -> None:
        extract, good = self.extract, read.good
        is_sample = self._samples_by_content(records)
        has_key = self.hold_out is not None and self.hold_out.has_key
        has_barred = bool(self.guard.source.quarantined)
        for number, record in enumerate(records):
            if is_sample is not None and not is_sample[number]:
                read.status[number] = _HELD_OUT
                continue
            code, fault, key = record.status, record.fault, record.key
            if has_barred and (barred := self.guard.fate(record.place)) is not None:
                code, fault = _QUARANTINED, barred
            if not code:
                extracted = good[number] = extract(record)
                if not has_key and not extracted.status:
                    continue
                code, fault, key = extracted.status, extracted.fault, extracted.key
            if has_key and key is not None:
                read.keys[number] = key
            if code:
                good.pop(number, None)
                read.status[number] = code
                read.faults[number] = self._fault(record, fault)

    def _samples_by_content(self, records: list[RawRecord]) -> list[bool] | None:
        """Tell which records are samples where content decides; what has none stays a fault."""
        if self.hold_out is None or self.hold_out.has_key:
            return None
        is_sample = self.hold_out.are_samples(record.raw for record in records).tolist()
        return [
            is_one or (record.status != 0 and not record.raw)
            for is_one, record in zip(is_sample, records, strict=True)
        ]

    def _fault(self, record: RawRecord, fault: str) -> BadRecord:
        if not fault.startswith(self.path):  # damage names the file and its own place
            fault = f"{self.path}: record at {self.place_name} {record.place}: {fault}"
        key = shown_key(record.key)
        return BadRecord(fault, self.path, self.place_name, record.place, key)

    def _encode(self, found: Iterable[Extracted]) -> tuple[Tokens, npt.NDArray[np.int64]]:
        if not self.is_tokenized:
            return self.tokenizer.encode_batch([extracted.text for extracted in found])
        parts = [extracted.ids for extracted in found if extracted.ids is not None]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        tokens: Tokens = np.empty(int(offsets[-1]), dtype=self.dtype)
        if parts:
            np.concatenate(parts, out=tokens, casting="unsafe")  # in range, as was checked
        return tokens, offsets

    @property
    def _added(self) -> tuple[int, int]:
        """Ids put before and behind each text."""
        spec = self.tokenizer.spec
        if self.is_tokenized:
            return 0, 0
        return added_ids(spec)

    def _drop_unequal(
        self,
        records: list[RawRecord],
        read: _Read,
        lengths: npt.NDArray[np.int32],
        tokens: Tokens,
    ) -> Tokens:
        """Make faults of records whose lists are not as long as they have tokens."""
        numbers = np.fromiter(read.good, dtype=np.int64, count=len(read.good))
        own = lengths[numbers].astype(np.int64)
        expected = np.maximum(own - sum(self._added), 0)
        is_kept = np.ones(len(numbers), dtype=np.bool_)
        for place, rule in enumerate(self.fields):
            if rule.per != "token":
                continue
            values = (extracted.values[place] for extracted in read.good.values())
            counts = np.fromiter(map(np.size, values), dtype=np.int64, count=len(numbers))
            for at in np.flatnonzero((counts != expected) & is_kept).tolist():
                fault = unequal_counts(rule, int(counts[at]), int(expected[at]))
                read.faults[int(numbers[at])] = self._fault(records[int(numbers[at])], fault)
                is_kept[at] = False
        if is_kept.all():
            return tokens
        kept: Tokens = tokens[np.repeat(is_kept, own)]
        for number in numbers[~is_kept].tolist():
            del read.good[number]
            read.status[number] = _FIELD_MISSING
            lengths[number] = 0
        return kept


def value_column(
    rule: FieldRule,
    values: Sequence[FieldValue],
    numbers: Sequence[int],
    lengths: npt.NDArray[np.int32],
    added: tuple[int, int],
) -> FieldColumn:
    """Return the column of a user field.

    Args:
        rule: The field.
        values: Of the records that are samples.
        numbers: Which records these are, ascending.
        lengths: Tokens of every record; 0 where it is no sample. Shape (records,).
        added: Ids that stand before and behind the tokens that a list has values for.
    """
    dtype = value_dtype(rule)
    if rule.per != "token":
        column = np.full(len(lengths), rule.fill, dtype=dtype)
        column[list(numbers)] = values
        return FieldColumn(False, column)
    parts = [part for part in values if isinstance(part, np.ndarray)]
    own = np.concatenate([np.zeros(0, dtype=dtype), *parts])
    before, behind = added
    if not before and not behind:
        return FieldColumn(True, own)
    ends = np.cumsum(lengths[lengths > 0], dtype=np.int64)
    is_own = np.ones(int(ends[-1]) if len(ends) else 0, dtype=np.bool_)
    if before:
        is_own[ends - lengths[lengths > 0]] = False
    if behind:
        is_own[ends - 1] = False
    column = np.full(len(is_own), rule.fill, dtype=dtype)
    column[is_own] = own
    return FieldColumn(True, column)


def added_ids(spec: TokenizerSpec) -> tuple[int, int]:
    """Return how many ids a tokenizer puts before and behind each text."""
    return int(spec.bos_id is not None), int(spec.eos_id is not None)


def unequal_counts(rule: FieldRule, seen: int, expected: int) -> str:
    """Return what is wrong with a list that is not as long as its record has tokens."""
    return (
        f"field {rule.from_field!r} has {seen} numbers, its record has {expected} tokens "
        "(added BOS and EOS not counted)"
    )
