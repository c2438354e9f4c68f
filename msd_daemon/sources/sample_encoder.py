"""Turns records with fields into samples by their source's recipe: the widest way into a batch.

In this order: where, exclude, hold-out, the user's transform, then text, chat and media, then
tokens. Each record comes out as one (an EncodedRecords has a place for every raw record), whatever
becomes of it: several samples stand one behind the other in it, with a mark where each begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from federation.model.chunk import FAULT_STATUSES, MARK_GROUP, RecordStatus
from federation.model.job import FieldRule, SourceSpec
from federation.model.media import MediaRule
from msd_client.contract.errors import TransformError
from msd_daemon.shm.media_layout import MediaColumn
from msd_daemon.sources.bad_record import BadRecord, shown_key
from msd_daemon.sources.block_cursor import Pace
from msd_daemon.sources.chunk_draft import TokenDtype
from msd_daemon.sources.encoded import EncodedRecords, join_records
from msd_daemon.sources.field_numbers import UnfitValueError, ids_of
from msd_daemon.sources.field_view import FieldView
from msd_daemon.sources.hold_out import HoldOut, hold_out_of
from msd_daemon.sources.item_columns import marks_of
from msd_daemon.sources.media_files import MediaFiles, MissingMediaError
from msd_daemon.sources.order import extend_key
from msd_daemon.sources.record import FieldValue, MediaPath, RawRecord
from msd_daemon.sources.record_encoder import added_ids, value_column
from msd_daemon.sources.record_fault import RecordFault, missing
from msd_daemon.sources.record_guard import NO_GUARD, ShardGuard, SourceGuard
from msd_daemon.sources.record_identity import group_key, identity_of, no_group, record_key
from msd_daemon.sources.sample_columns import field_values, media_columns
from msd_daemon.sources.sample_parts import Composer, MediaPart, chat_media
from msd_daemon.sources.sample_tokens import (
    DecodedMedia,
    SampleTokens,
    TokenBuilder,
    join_samples,
)
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.tokenizer import Tokenizer

ENCODE_RECORDS_MAX = 4
"""Records with media that are decoded at once."""
_CONTINUED = (MARK_GROUP, 0, 0, 0)
_LEFT_OUT = (RecordStatus.FILTERED, RecordStatus.EXCLUDED)


class LazyGenerator:
    """What is drawn at random for a sample; most draw nothing, and are spared the generator."""

    __slots__ = ("_key", "_rng")

    def __init__(self, key: int) -> None:
        self._key = key
        self._rng: np.random.Generator | None = None

    def get(self) -> np.random.Generator:
        """Return the sample's generator, the same one at each call."""
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(key=self._key))
        return self._rng


@dataclass(slots=True)
class _Sample:
    """One sample of a record before its tokens."""

    view: FieldView
    parts: list[str | DecodedMedia] = field(default_factory=list)
    ids: npt.NDArray[np.int64] | None = None
    is_trained: npt.NDArray[np.bool_] | None = None
    """Of a chat, whose ids are there; its media are the parts."""


@dataclass(slots=True)
class _Read:
    """Records of one call on their way: samples of the good ones, fates of the others."""

    status: npt.NDArray[np.uint8]
    samples: dict[int, list[_Sample]] = field(default_factory=dict)
    faults: dict[int, BadRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleTools:
    """What a recipe's steps are done with; made once for a source."""

    compose: Composer
    decoders: tuple[Callable[[bytes, np.random.Generator], Any] | None, ...] = ()
    """Of the job's media rules, None where the source has none of that modality."""
    files: MediaFiles | None = None
    where: Callable[[Mapping[str, Any]], bool] | None = None
    exclude: Callable[[bytes], bool] | None = None
    transform: Callable[[Mapping[str, Any], int], list[Mapping[str, Any]]] | None = None
    chat: Callable[[FieldView], tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] | None = None
    fim: Callable[[npt.NDArray[Any], np.random.Generator], npt.NDArray[Any]] | None = None


@dataclass(frozen=True)
class SampleEncoder:
    """Turns records with fields into tokens, marks and media.

    Args:
        spec: The source.
        tokenizer: Shared by the loaders of a worker.
        tools: Of the source's recipe.
        media: The job's rules.
        row_tokens_min: Tokens of the job's shortest row.
        fields: User fields of the job.
    """

    spec: SourceSpec
    tokenizer: Tokenizer
    tools: SampleTools
    media: tuple[MediaRule, ...] = ()
    row_tokens_min: int = 1 << 31
    fields: tuple[FieldRule, ...] = ()
    path: str = ""
    place_name: str = "record"
    key: int = 0
    source_guard: SourceGuard = NO_GUARD.source
    guard: ShardGuard = NO_GUARD
    """Of the shard that the records lie in."""
    pace: Pace = field(default_factory=Pace)
    """Of the source."""

    @property
    def dtype(self) -> TokenDtype:
        """Of the tokens."""
        return np.dtype(np.int32) if self.spec.has_masks else self.tokenizer.dtype

    @cached_property
    def hold_out(self) -> HoldOut | None:
        """Which records are samples."""
        return hold_out_of(self.spec)

    @property
    def encode_records_max(self) -> int | None:
        """Records that should be encoded at once: decoded media are large."""
        return ENCODE_RECORDS_MAX if self._has_media else None

    def at(self, path: str, place_name: str = "record", key: int = 0, epoch: int = 0) -> Self:
        """Return the same encoder for the records of a block of a shard.

        Args:
            path: The shard's.
            place_name: What `RawRecord.place` counts.
            key: Of all that is drawn at random for records of the block.
            epoch: Of the block.
        """
        guard = self.source_guard.of(path, epoch)
        return replace(self, path=path, place_name=place_name, key=key, guard=guard)

    def without_where(self) -> SampleEncoder:
        """Return the same encoder for a format that refuses records by `where` itself."""
        return replace(self, tools=replace(self.tools, where=None))

    def encode(self, records: list[RawRecord]) -> EncodedRecords:
        """Return the tokens, marks, media and field values of records, in their order."""
        if self.guard.is_suspect(records):
            return join_records([self.encode([record]) for record in records])
        read = _Read(np.zeros(len(records), np.uint8))
        held = self._held_out(records)
        for number, record in enumerate(records):
            try:
                if held is not None and held[number]:
                    raise self._left_out(record)
                read.samples[number] = self._guarded_samples(record)
            except RecordFault as fault:
                self._note(read, records, number, fault)
        with self.guard.working(records):
            found = self._tokens(read, records)
            return self._columns(read, records, found)

    @property
    def _has_media(self) -> bool:
        return self.spec.has_media

    def _note(self, read: _Read, records: list[RawRecord], number: int, fault: RecordFault) -> None:
        read.status[number] = fault.status
        read.samples.pop(number, None)
        if not fault.message and fault.status not in FAULT_STATUSES:
            return
        record, told = records[number], fault.message
        if not told or not told.startswith(self.path):  # damage names the file and its own place
            name = f" {shown_key(record.key)!r}" if record.key else ""
            place = f"record{name} at {self.place_name} {record.place}"
            told = f"{self.path}: {place}: {told or fault.status.name.lower()}"
        key = shown_key(record.key or self._key_of(record))
        read.faults[number] = BadRecord(told, self.path, self.place_name, record.place, key)

    def _key_of(self, record: RawRecord) -> bytes | None:
        """Return what names a bad record, where its fields still tell."""
        if not self.spec.key_field or self.guard.fate(record.place) is not None:
            return None
        return identity_of(record, self.spec.key_field)

    def _held_out(self, records: list[RawRecord]) -> list[bool] | None:
        """Tell which records are of the other part; one without a key stays what it is."""
        rule = self.hold_out
        if rule is None:
            return None
        field = self.spec.group_field
        contents = [
            group_key(record, field) if field else identity_of(record, self.spec.key_field)
            for record in records
        ]
        is_sample = rule.are_samples(content or b"" for content in contents).tolist()
        return [
            content is not None and not is_one
            for content, is_one in zip(contents, is_sample, strict=True)
        ]

    def _left_out(self, record: RawRecord) -> RecordFault:
        """Return why a held-out record is no sample: what comes before hold-out may be the reason.

        Parquet asks `where` before any record is made, so counts are those of every format.
        """
        if not record.status:
            try:
                self._check_kept(record, FieldView(_fields_of(record)))
            except RecordFault as fault:
                if fault.status in _LEFT_OUT:
                    return fault
        return RecordFault(RecordStatus.HELD_OUT)

    def _guarded_samples(self, record: RawRecord) -> list[_Sample]:
        barred = self.guard.fate(record.place)
        if barred is not None:
            raise RecordFault(RecordStatus.QUARANTINED, barred)
        self.guard.begin(record)
        try:
            samples = self._samples_of(record)
        except RecordFault:
            self.guard.end()
            raise
        self.guard.end()  # what ends the process (no memory) leaves its mark
        return samples

    def _samples_of(self, record: RawRecord) -> list[_Sample]:
        if record.status:
            raise RecordFault(RecordStatus(record.status), record.fault)
        tools, key = self.tools, extend_key(self.key, record.place)
        fields = _fields_of(record)
        view = FieldView(fields)
        if self.spec.group_field:
            if group_key(record, self.spec.group_field) is None:
                raise no_group(self.spec.group_field)
        elif self.spec.key_field and self.hold_out is not None:
            record_key(record, self.spec.key_field)
        self._check_kept(record, view)
        if tools.transform is None:
            return [self._sample(view, key)]
        try:
            given = tools.transform(dict(fields), key)
        except TransformError as error:
            raise _user_fault(error) from None
        if not given:
            raise RecordFault(RecordStatus.TRANSFORMED_AWAY)
        return [
            self._sample(FieldView(one), extend_key(key, number))
            for number, one in enumerate(given)
        ]

    def _check_kept(self, record: RawRecord, view: FieldView) -> None:
        tools = self.tools
        if tools.where is not None and not _asked(tools.where, view):
            raise RecordFault(RecordStatus.FILTERED)
        if tools.exclude is not None and tools.exclude(self._listed(record, view)):
            raise RecordFault(RecordStatus.EXCLUDED)

    def _listed(self, record: RawRecord, view: FieldView) -> bytes:
        """Return what an exclude list names: the key, or the text (content where there is none)."""
        recipe = self.spec.recipe
        assert recipe is not None and recipe.exclude is not None
        if recipe.exclude.by == "content" and self.spec.text_field in view:
            return view.text(self.spec.text_field).encode()
        return identity_of(record, self.spec.key_field) or b""

    def _sample(self, view: FieldView, key: int) -> _Sample:
        sample, rng = _Sample(view), LazyGenerator(key)
        if self.spec.tokens_field:
            sample.ids = self._ids(view)
            if self.tools.fim is not None:
                sample.ids = self.tools.fim(sample.ids, rng.get())
        elif self.tools.chat is not None:
            sample.ids, sample.is_trained = self.tools.chat(view)
            sample.parts += [self._decoded(part, rng) for part in chat_media(view, self.spec)]
        else:
            for part in self.tools.compose(view):
                decoded = part if isinstance(part, str) else self._found(part, rng)
                if decoded is not None:
                    sample.parts.append(decoded)
        return sample

    def _ids(self, view: FieldView) -> npt.NDArray[np.int64]:
        name = self.spec.tokens_field
        if name not in view:
            raise missing(f"field {name!r} is absent")
        try:
            return ids_of(view[name], self.tokenizer.spec.vocabulary_count)
        except UnfitValueError as error:
            raise missing(f"field {name!r} {error}") from None

    def _found(self, part: MediaPart, rng: LazyGenerator) -> DecodedMedia | None:
        try:
            return self._decoded(part, rng)
        except MissingMediaError:
            if part.is_optional:
                return None
            raise

    def _decoded(self, part: MediaPart, rng: LazyGenerator) -> DecodedMedia:
        content = part.content
        if isinstance(content, MediaPath):
            assert self.tools.files is not None
            content = self.tools.files.read(content, self.path)
        for kind, rule in enumerate(self.media):
            decode = self.tools.decoders[kind]
            if rule.modality == part.modality and decode is not None:
                try:
                    return DecodedMedia(kind, decode(content, rng.get()))
                except TransformError as error:
                    raise _user_fault(error) from None
                except MediaError as error:
                    raise RecordFault(RecordStatus.UNDECODABLE, error.message) from None
        raise missing(f"the job has no rule for {part.modality}")

    def _tokens(self, read: _Read, records: list[RawRecord]) -> dict[int, SampleTokens]:
        """Tokenize all texts at once, then put each record's samples together."""
        texts = [
            part
            for samples in read.samples.values()
            for sample in samples
            if sample.is_trained is None
            for part in sample.parts
            if isinstance(part, str)
        ]
        ids, offsets = self.tokenizer.encode_batch(texts)
        before, behind = added_ids(self.tokenizer.spec)
        pairs = itertools.pairwise(offsets.tolist())
        encoded = iter(
            [ids[begin + before : end - behind] if end > begin else ids[:0] for begin, end in pairs]
        )
        found: dict[int, SampleTokens] = {}
        for number in list(read.samples):
            samples = read.samples[number]
            # Every text is taken, whatever becomes of its record.
            parts = [
                [next(encoded) if isinstance(part, str) else part for part in sample.parts]
                for sample in samples
            ]
            try:
                found[number] = self._joined(samples, parts, records[number].place)
            except RecordFault as fault:
                self._note(read, records, number, fault)
        return found

    def _joined(self, samples: list[_Sample], parts: list[list[Any]], place: int) -> SampleTokens:
        built = [
            self._built(sample, own, place, number)
            for number, (sample, own) in enumerate(zip(samples, parts, strict=True))
        ]
        built = [one for one in built if len(one.ids)]
        if not built:
            raise RecordFault(RecordStatus.EMPTY)
        if self.spec.has_masks:
            built = [one for one in built if one.trained_tokens]
            if not built:
                raise RecordFault(RecordStatus.UNTRAINED)
        return join_samples(built)

    @cached_property
    def _builder(self) -> TokenBuilder:
        return TokenBuilder(self.media, self.row_tokens_min)

    def _built(self, sample: _Sample, parts: list[Any], place: int, number: int) -> SampleTokens:
        builder = self._builder
        if sample.is_trained is not None:
            assert sample.ids is not None
            return builder.place(sample.ids, sample.is_trained, parts)
        if sample.ids is not None:
            return SampleTokens(sample.ids.astype(np.int32), trained_tokens=len(sample.ids))
        spec = self.tokenizer.spec
        if self.tools.fim is not None:
            rng = LazyGenerator(extend_key(self.key, place, number))
            parts = [
                self.tools.fim(part, rng.get()) if isinstance(part, np.ndarray) else part
                for part in parts
            ]
        parts = [part for part in parts if not isinstance(part, np.ndarray) or len(part)]
        return builder.build(parts, spec.bos_id, spec.eos_id)

    def _columns(
        self, read: _Read, records: list[RawRecord], found: dict[int, SampleTokens]
    ) -> EncodedRecords:
        values = self._values(read, records, found) if self.fields else []
        samples = [found.get(number) for number in range(len(records))]
        lengths = np.array([0 if one is None else len(one.ids) for one in samples], np.int32)
        tokens = np.zeros(int(lengths.sum(dtype=np.int64)), self.dtype)
        if found:
            ids = [one.ids for one in samples if one is not None]
            np.concatenate(ids, out=tokens, casting="unsafe")
        columns = tuple(
            value_column(rule, [own[at] for own in values], sorted(found), lengths, self._added)
            for at, rule in enumerate(self.fields)
        )
        lines = [
            [*([_CONTINUED] if record.is_continuing else []), *([] if one is None else one.marks)]
            for record, one in zip(records, samples, strict=True)
        ]
        marks = marks_of(lines) if self.spec.has_masks or any(lines) else None
        media: tuple[MediaColumn, ...] = ()
        if self._has_media:
            media = media_columns(samples, len(self.media))
        return EncodedRecords(
            lengths, read.status, tokens, sorted(read.faults.items()), columns, marks, media
        )

    @property
    def _added(self) -> tuple[int, int]:
        if self.spec.tokens_field or self.tools.chat is not None:
            return 0, 0
        return added_ids(self.tokenizer.spec)

    def _values(
        self, read: _Read, records: list[RawRecord], found: dict[int, SampleTokens]
    ) -> list[list[FieldValue]]:
        """Return the values of user fields of each sample's record; those without are faults."""
        listed = []
        for number in sorted(found):
            views = [sample.view for sample in read.samples[number]]
            try:
                listed.append(field_values(self.fields, views, found[number], self._added))
            except RecordFault as fault:
                self._note(read, records, number, fault)
                del found[number]
        return listed


def _user_fault(error: TransformError) -> RecordFault:
    """Return the fault of a record on which the user's code failed, hung or died."""
    status = RecordStatus.QUARANTINED if error.is_quarantine else RecordStatus.TRANSFORM_FAILED
    return RecordFault(status, error.message)


def _fields_of(record: RawRecord) -> Mapping[str, Any]:
    return record.fields if record.fields is not None else {"text": record.raw}


def _asked(where: Callable[[Mapping[str, Any]], bool], view: FieldView) -> bool:
    try:
        return where(view)
    except UnfitValueError as error:
        raise missing(f"where: {error}") from None
