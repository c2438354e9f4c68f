"""Text of a JSON line: strict RFC 8259, so that what one reader takes another does not refuse."""

from __future__ import annotations

import json
from typing import NoReturn

from federation.model.chunk import RecordStatus
from msd_daemon.sources.line_reader import BYTE_ORDER_MARK
from msd_daemon.sources.record import Extracted, Extractor

_BAD_SYNTAX = int(RecordStatus.BAD_SYNTAX)
_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_FIELD_MISSING = int(RecordStatus.FIELD_MISSING)
FIELD_JOIN = "+"
"""`question+answer` names two fields whose texts are joined by a newline."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# Numbers are not used: as floats they are parsed without the digit limit of Python integers.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=float)


def parse_json(raw: bytes) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON (NaN and Infinity are not), or nested too deeply to read.
        UnicodeDecodeError: It is not UTF-8 (a ValueError too).
    """
    text = raw.decode()
    try:
        value: object = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def text_extractor(text_field: str) -> Extractor:
    """Return the function that takes the text out of a line's object.

    Args:
        text_field: Name of the field; several joined by `+` are joined by a newline.
    """
    fields = text_field.split(FIELD_JOIN)

    def extract(raw: bytes) -> Extracted:
        try:
            value = parse_json(raw)
        except UnicodeDecodeError as error:
            return Extracted("", _BAD_ENCODING, f"not UTF-8 at byte {error.start} of the record")
        except ValueError as error:
            return Extracted("", _BAD_SYNTAX, f"not JSON: {error}")
        if not isinstance(value, dict):
            kind = type(value).__name__
            return Extracted("", _BAD_SYNTAX, f"expected a JSON object, got {kind}")
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

    return extract


def plain_extractor(*, keeps_carriage_returns: bool) -> Extractor:
    """Return the function that decodes bytes that are text as a whole."""

    def extract(raw: bytes) -> Extracted:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            return Extracted("", _BAD_ENCODING, f"not UTF-8 at byte {error.start} of the record")
        return Extracted(text if keeps_carriage_returns else text.replace("\r\n", "\n"))

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
