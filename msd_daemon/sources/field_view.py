"""A record's fields as recipes name them: nested names, members of a tar, alternatives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from federation.model.chunk import RecordStatus
from msd_daemon.sources.field_numbers import kind_of
from msd_daemon.sources.json_text import parse_json
from msd_daemon.sources.record_fault import RecordFault, missing

_TEXT_MEMBERS = frozenset({"txt", "text", "caption", "cls", "id", "cap", "transcript"})
_DIGITS = re.compile(r"(\d+)")
ALTERNATIVE = ";"
"""`jpg;png` names the first of both that is there, as WebDataset has it."""


class FieldView(Mapping[str, Any]):
    """Fields of a record; bytes of members that are JSON or text are read as such.

    `a.b` is field `a.b` where there is one, else key `b` of field `a`.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._parsed: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name, self) is not self

    def __getitem__(self, name: str) -> Any:
        """Return a value by its name.

        Raises:
            KeyError: There is none.
            RecordFault: The member that holds it is not UTF-8, or no JSON.
        """
        if name in self._fields:
            return self._value(name)
        end = name.rfind(".")
        while end > 0:
            if name[:end] in self._fields:
                return _descend(self._value(name[:end]), name[end + 1 :].split("."), name)
            end = name.rfind(".", 0, end)
        raise KeyError(name)

    def raw(self, name: str) -> Any:
        """Return a field as it lies.

        Raises:
            KeyError: There is none.
        """
        return self._fields[name] if name in self._fields else self[name]

    def text(self, name: str) -> str:
        """Return the text of a field, the first of `;` alternatives that is there.

        Raises:
            RecordFault: It is absent, null, of another type, or not UTF-8.
        """
        for alternative in name.split(ALTERNATIVE):
            value = self.get(alternative)
            if value is not None:
                return as_text(value, alternative)
        seen = "null" if any(part in self for part in name.split(ALTERNATIVE)) else "absent"
        raise missing(f"field {name!r} is {seen}, not a string")

    def media(self, name: str) -> list[Any]:
        """Return the values that a name of media stands for, in the order of their names.

        `*` matches any run of characters; `;` parts alternatives.

        Raises:
            RecordFault: There are none.
        """
        values = self.optional_media(name)
        if not values:
            raise missing(f"field {name!r} is absent or null, it holds the record's media")
        return values

    def optional_media(self, name: str) -> list[Any]:
        """Return the values that a name of media stands for, as `media`; nothing where it has none."""
        for alternative in name.split(ALTERNATIVE):
            if "*" in alternative:
                names = [one for one in self._fields if fnmatchcase(one, alternative)]
                values = [self._fields[one] for one in sorted(names, key=_natural)]
            else:
                try:
                    value = self.raw(alternative)
                except KeyError:
                    continue
                values = list(value) if isinstance(value, (list, tuple)) else [value]
            values = [value for value in values if value is not None]
            if values:
                return values
        return []

    def _value(self, name: str) -> Any:
        value = self._fields[name]
        if not isinstance(value, bytes):
            return value
        if name not in self._parsed:
            self._parsed[name] = _parsed(value, name)
        return self._parsed[name]


def as_text(value: object, name: str) -> str:
    """Return a value as the text that is tokenized.

    Raises:
        RecordFault: It is no text, or not UTF-8.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            raise RecordFault(
                RecordStatus.BAD_ENCODING, f"field {name!r} is not UTF-8 at byte {error.start}"
            ) from None
    if not isinstance(value, str):
        raise missing(f"field {name!r} is {kind_of(value)}, not a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RecordFault(
                RecordStatus.BAD_ENCODING, f"a lone surrogate in field {name!r}"
            ) from None
    return value


def _parsed(value: bytes, name: str) -> Any:
    kind = name.rsplit(".", 1)[-1]
    if kind == "json":
        try:
            return parse_json(value, is_exact=True)
        except UnicodeDecodeError as error:
            message = f"member {name!r} is not UTF-8 at byte {error.start}"
            raise RecordFault(RecordStatus.BAD_ENCODING, message) from None
        except ValueError as error:
            raise RecordFault(RecordStatus.BAD_SYNTAX, f"member {name!r}: {error}") from None
    return as_text(value, name) if kind in _TEXT_MEMBERS else value


def _descend(value: Any, path: list[str], name: str) -> Any:
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            raise KeyError(name) from None
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(name)
        value = value[key]
    return value


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key in which 2.jpg comes before 10.jpg."""
    return [
        (not part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in _DIGITS.split(name)
    ]
