"""What is taken out of a JSON line beside plain text: its key, token ids, values of user fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule, SourceSpec
from msd_daemon.sources.field_numbers import UnfitValueError, json_ids, json_value, kind_of
from msd_daemon.sources.json_text import FIELD_JOIN, read_object, text_extractor, text_of
from msd_daemon.sources.record import Extracted, Extractor, FieldValue, RawRecord

_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_FIELD_MISSING = int(RecordStatus.FIELD_MISSING)


def json_extractor(
    spec: SourceSpec, fields: tuple[FieldRule, ...], vocabulary_count: int
) -> Extractor:
    """Return the function that takes out of a JSON line what the job needs of it.

    Args:
        spec: The source: its text or tokens field, its key where records are held out.
        fields: The job's.
        vocabulary_count: Ids of a pre-tokenized record are below it.
    """
    key_field = spec.key_field if spec.hold_out > 0 else ""
    if not key_field and not fields and not spec.tokens_field:
        return text_extractor(spec.text_field)
    content = _content_reader(spec, vocabulary_count)

    def extract(record: RawRecord) -> Extracted:
        value = read_object(record.raw, is_exact=True)
        if isinstance(value, Extracted):
            return value
        key = None
        if key_field:
            try:
                key = _key(value, key_field)
            except UnfitValueError as error:
                return Extracted("", _FIELD_MISSING, f"field {key_field!r} {error}")
            except UnicodeEncodeError:
                return Extracted("", _BAD_ENCODING, "a lone surrogate escape in the key")
        extracted = content(value, record.raw)
        extracted.key = key
        if fields and not extracted.status:
            try:
                extracted.values = _values(value, fields)
            except UnfitValueError as error:
                return Extracted("", _FIELD_MISSING, str(error), key=key)
        return extracted

    return extract


def _content_reader(
    spec: SourceSpec, vocabulary_count: int
) -> Callable[[dict[str, Any], bytes], Extracted]:
    if not spec.tokens_field:
        text_fields = spec.text_field.split(FIELD_JOIN)
        return lambda value, raw: text_of(value, text_fields, raw)
    name = spec.tokens_field

    def read_ids(value: dict[str, Any], raw: bytes) -> Extracted:
        del raw  # ids are in the object
        if name not in value:
            return Extracted("", _FIELD_MISSING, f"field {name!r} is absent")
        try:
            return Extracted("", ids=json_ids(value[name], vocabulary_count))
        except UnfitValueError as error:
            return Extracted("", _FIELD_MISSING, f"field {name!r} {error}")

    return read_ids


def _key(value: dict[str, Any], name: str) -> bytes:
    """Return the key of a record as the bytes that are hashed: text, or an integer's digits."""
    if name not in value:
        raise UnfitValueError("is absent, it is the record's key")
    key = value[name]
    if type(key) is int:
        return str(key).encode()
    if not isinstance(key, str):
        raise UnfitValueError(f"is {kind_of(key)}, a key is a string or an integer")
    return key.encode()


def _values(value: dict[str, Any], fields: tuple[FieldRule, ...]) -> tuple[FieldValue, ...]:
    values: list[FieldValue] = []
    for field in fields:
        name = field.from_field
        if value.get(name) is None:
            seen = "null" if name in value else "absent"
            raise UnfitValueError(f"field {name!r} is {seen}")
        try:
            values.append(json_value(value[name], field))
        except UnfitValueError as error:
            raise UnfitValueError(f"field {name!r} {error}") from None
    return tuple(values)
