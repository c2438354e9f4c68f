"""Plain maps, lists and scalars to and from frozen dataclasses, strictly.

What a peer or a file says becomes a typed value here or is refused; used by every border that must
stay light enough for trainers and workers (pydantic stays with the files that people write).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar

from msd_client.contract.errors import ConfigError

T = TypeVar("T")


def encode_plain(value: object) -> Any:
    """Return a dataclass as plain maps; tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: encode_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_plain(item) for item in value]
    return value


def encode_flat(value: object) -> dict[str, Any]:
    """Return a dataclass whose fields hold plain things already as a map; nothing is copied."""
    assert dataclasses.is_dataclass(value)
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def decode_plain(kind: type[T], value: object, where: str) -> T:
    """Return a `kind` from its plain form.

    Args:
        kind: A dataclass whose fields are scalars, Literals, optionals, tuples, dicts, dataclasses.
        value: What msgpack or YAML gave.
        where: Key path for messages.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type.
    """
    return typing.cast("T", _decode(kind, value, where))


def _decode(kind: Any, value: object, where: str) -> object:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin is not None or kind is Any:
        return _decode_generic(kind, origin, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _decode_dataclass(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a map, got {type(value).__name__}")
    hints = _hints(kind)
    unknown = set(value) - set(hints)
    if unknown:
        raise ConfigError(f"{where}: unknown keys {sorted(map(str, unknown))}")
    decoded = {key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()}
    try:
        return kind(**decoded)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def _decode_generic(kind: Any, origin: Any, value: object, where: str) -> object:
    arguments = typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where}: {value!r} is none of {arguments}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (rest,) = (argument for argument in arguments if argument is not type(None))
        return _decode(rest, value, where)
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise ConfigError(f"{where}: expected a list, got {type(value).__name__}")
        if arguments[0] is not Any:
            value = [_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(value) if origin is tuple else value
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a map, got {type(value).__name__}")
    if arguments[1] is Any:
        return value
    return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    found = _HINTS.get(kind)
    if found is None:
        found = _HINTS[kind] = typing.get_type_hints(kind)
    return found
