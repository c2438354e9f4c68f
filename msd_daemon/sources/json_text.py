"""Text of a JSON line: strict RFC 8259, so that what one reader takes another does not refuse."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from federation.model.chunk import RecordStatus
from msd_daemon.sources.line_reader import BYTE_ORDER_MARK
from msd_daemon.sources.record import Extracted, Extractor, RawRecord

_BAD_SYNTAX = int(RecordStatus.BAD_SYNTAX)
_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_FIELD_MISSING = int(RecordStatus.FIELD_MISSING)
FIELD_JOIN = "+"
"""`question+answer` names two fields whose texts are joined by a newline."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _any_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS_MAX else float(digits)


# Where numbers are not used, floats are parsed without the digit limit of Python integers.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=float)
_EXACT = json.JSONDecoder(parse_constant=_refuse_constant)
_EXACT_UNLIMITED = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_any_integer)
_DIGITS_MAX = 640
"""Below the least limit that Python can be given."""


def parse_json(raw: bytes, *, is_exact: bool = False) -> object:
    """Return the value of a JSON text.

    Args:
        raw: The text's bytes.
        is_exact: Integers come as such (of more than 640 digits as floats), else as floats.

    Raises:
        ValueError: It is not JSON (NaN and Infinity are not), or nested too deeply to read.
        UnicodeDecodeError: It is not UTF-8 (a ValueError too).
    """
    text = raw.decode()
    try:
        value: object = _decode_exact(text) if is_exact else _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _decode_exact(text: str) -> object:
    try:
        return _EXACT.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer beyond Python's limit of digits, or NaN
        return _EXACT_UNLIMITED.decode(text)


def read_object(raw: bytes, *, is_exact: bool = False) -> dict[str, Any] | Extracted:
    """Return the object of a JSON line, or what is wrong with it."""
    try:
        value = parse_json(raw, is_exact=is_exact)
    except UnicodeDecodeError as error:
        return Extracted("", _BAD_ENCODING, f"not UTF-8 at byte {error.start} of the record")
    except ValueError as error:
        return Extracted("", _BAD_SYNTAX, f"not JSON: {error}")
    if not isinstance(value, dict):
        kind = type(value).__name__
        return Extracted("", _BAD_SYNTAX, f"expected a JSON object, got {kind}")
    return value


def text_extractor(text_field: str) -> Extractor:
    """Return the function that takes the text out of a line's object.

    Args:
        text_field: Name of the field; several joined by `+` are joined by a newline.
    """
    fields = text_field.split(FIELD_JOIN)
    only = fields[0] if len(fields) == 1 else None

    def extract(record: RawRecord) -> Extracted:
        value = read_object(record.raw)
        if isinstance(value, Extracted):
            return value
        text = None if only is None else value.get(only)
        # What is ASCII holds no surrogate, and says so at once; the search passes over every byte.
        if isinstance(text, str) and (text.isascii() or b"\\u" not in record.raw):
            return Extracted(text)  # nearly always
        return text_of(value, fields, record.raw)

    return extract


def text_of(value: dict[str, Any], fields: list[str], raw: bytes) -> Extracted:
    """Return the text of a line's object, or what is wrong with it.

    Args:
        value: The object.
        fields: Names of the fields that are joined by a newline.
        raw: The line it was read from.
    """
    parts = [value.get(name) for name in fields]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        missing = next(n for n, p in zip(fields, parts, strict=True) if not isinstance(p, str))
        seen = "null" if missing in value and value[missing] is None else "absent"
        if missing in value and value[missing] is not None:
            seen = f"a {type(value[missing]).__name__}"
        return Extracted("", _FIELD_MISSING, f"field {missing!r} is {seen}, not a string")
    text = "\n".join(texts)
    if b"\\u" in raw and not _is_encodable(text):
        return Extracted("", _BAD_ENCODING, "a lone surrogate escape in the text")
    return Extracted(text)


def plain_extractor(*, keeps_carriage_returns: bool) -> Extractor:
    """Return the function that decodes bytes that are text as a whole."""

    def extract(record: RawRecord) -> Extracted:
        try:
            text = record.raw.decode()
        except UnicodeDecodeError as error:
            fault = f"not UTF-8 at byte {error.start} of the record"
            return Extracted("", _BAD_ENCODING, fault, key=record.key)
        if not keeps_carriage_returns:
            text = text.replace("\r\n", "\n")
        return Extracted(text, key=record.key, values=record.values)

    return extract


def strip_line(content: bytes) -> bytes:
    """Return a line without byte-order mark and carriage return, which are no part of its text."""
    if content.endswith(b"\r"):
        content = content[:-1]
    return content.removeprefix(BYTE_ORDER_MARK)


def strip_mark(content: bytes) -> bytes:
    """Return a file's first bytes without the byte-order mark."""
    return content.removeprefix(BYTE_ORDER_MARK)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
