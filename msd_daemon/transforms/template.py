"""Several fields joined into one text, a line of question and one of answer, say.

Names in braces are fields, `{meta.title}` a key of one; `{{` and `}}` are braces. Nothing else is
read into a template: no attribute, no index, no conversion, no format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.field_numbers import UnfitValueError, kind_of, shown

_KEY = r"[^\s{}!:\[\]().]+(?: +[^\s{}!:\[\]().]+)*"
_NAME = re.compile(rf"{_KEY}(?:\.{_KEY})*")
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
_ABSENT = object()


@dataclass(frozen=True)
class FieldTemplate:
    """A template, read once."""

    fields: tuple[str, ...]
    """Names in the order in which they first stand, each once."""
    _parts: tuple[tuple[str, str | None], ...]
    """(text, field behind it or None) in turn."""

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return the text of a record.

        Text goes in as it is, numbers and booleans as JSON writes them.

        Raises:
            UnfitValueError: A field is absent, null, a list, a map or bytes, a number is not
                finite, or a text has a lone surrogate; says which.
        """
        written = {name: _written(_value(fields, name), name) for name in self.fields}
        return "".join(text if name is None else text + written[name] for text, name in self._parts)


def compile_template(text: str) -> FieldTemplate:
    """Return what a template's text says.

    Raises:
        ConfigError: A brace stands alone, a name is empty or has more than names have, or there is
            no field in it at all.
    """
    parts: list[tuple[str, str | None]] = []
    literal: list[str] = []
    for found in _PART.finditer(text):
        part, name = found.group(), found.group(1)
        if part in ("{{", "}}"):
            literal.append(part[0])
        elif part in ("{", "}"):
            raise _refused(text, f"has a single {part!r} at character {found.start()}")
        elif name is None:
            literal.append(part)
        elif not _NAME.fullmatch(name):
            raise _refused(text, f"has {shown(part)} at character {found.start()}: no field's name")
        else:
            parts.append(("".join(literal), name))
            literal = []
    names = tuple(dict.fromkeys(name for _, name in parts if name is not None))
    if not names:
        raise _refused(text, "names no field")
    parts.append(("".join(literal), None))
    return FieldTemplate(names, tuple(parts))


def _refused(text: str, problem: str) -> ConfigError:
    return ConfigError(
        f"template {shown(text)} {problem}: write {{field}} or {{field.key}}, and {{{{ for a brace"
    )


def _value(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field by its full name, else key by key."""
    value = fields.get(name, _ABSENT)
    if value is not _ABSENT or "." not in name:
        return value
    value = fields
    for key in name.split("."):
        if not isinstance(value, Mapping):
            return _ABSENT
        value = value.get(key, _ABSENT)
    return value


def _written(value: Any, name: str) -> str:
    if isinstance(value, str):
        if not value.isascii():
            _check_encoding(value, name)
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UnfitValueError(f"field {name!r} is {value}, no finite number")
        return json.dumps(value)
    if value is _ABSENT:
        raise UnfitValueError(f"field {name!r} is absent, the template needs it")
    raise UnfitValueError(f"field {name!r} is {kind_of(value)}, not a string or a number")


def _check_encoding(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnfitValueError(
            f"field {name!r} has a lone surrogate at character {error.start}"
        ) from None
