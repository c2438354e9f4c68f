"""What names a record: its key, or its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from msd_daemon.sources.field_numbers import kind_of
from msd_daemon.sources.field_view import FieldView, as_text
from msd_daemon.sources.record import MediaPath, RawRecord
from msd_daemon.sources.record_fault import RecordFault, missing


def identity_of(record: RawRecord, key_field: str) -> bytes | None:
    """Return the key of a record, its content where sources have no keys; None: it has none."""
    if key_field:
        try:
            return record_key(record, key_field)
        except RecordFault:
            return None
    if record.raw:
        return record.raw
    return pack_fields(record.fields) if record.fields else None


def record_key(record: RawRecord, name: str) -> bytes:
    """Return the key of a record: the bytes that are hashed.

    Raises:
        RecordFault: It has none.
    """
    if record.key is not None:
        return record.key
    try:
        value = FieldView(record.fields or {})[name]
    except KeyError:
        raise missing(f"field {name!r} is absent, it is the record's key") from None
    if isinstance(value, bytes):
        return value
    if type(value) is int or isinstance(value, np.integer):
        return str(value).encode()
    if not isinstance(value, str):
        raise missing(f"field {name!r} is {kind_of(value)}, a key is a string or an integer")
    return as_text(value, name).encode()


def group_key(record: RawRecord, name: str) -> bytes | None:
    """Return the value that a group's records share, as bytes; None: no such value can be read."""
    if record.fields is None:
        return None
    try:
        value = FieldView(record.fields)[name]
    except KeyError:
        return None
    if isinstance(value, MediaPath):
        value = value.path
    if type(value) is int or isinstance(value, np.integer):
        return str(value).encode()
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    return value if isinstance(value, bytes) else None


def no_group(name: str) -> RecordFault:
    """Return the fault of a record whose group cannot be told."""
    return missing(f"field {name!r}, which names its group, is absent or no string or integer")


def pack_fields(fields: Mapping[str, Any]) -> bytes:
    """Return the content of a record as bytes, to be hashed: equal for equal fields."""
    packed = msgpack.packb(dict(sorted(fields.items())), default=_plain, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    return value.path if isinstance(value, MediaPath) else str(value)
