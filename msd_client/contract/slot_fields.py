"""Arrays of a slot's payload: what they count, where they lie. Pure; which there are is `batch_spec`'s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from msd_client.contract.errors import ConfigError
from msd_client.contract.media_fields import MediaExtent

Extent = Literal["token", "axis_token", "boundary", "segment", "row"] | MediaExtent

FIELD_ALIGN_BYTES = 128
"""Every field starts on this boundary (two cache lines, RINGS.md 6a)."""
LARGE_FIELD_BYTES = 1 << 20
LARGE_FIELD_ALIGN_BYTES = 4096
"""Fields of at least LARGE_FIELD_BYTES start on a page, so that a device copy is page-aligned."""
TABLE_BYTES_MAX = 4096 - 64
"""Of a slot's field table: what the header leaves of its page."""

_NUMBER_BYTES_MAX = 9
_SCALARS_BYTES_MAX = 256
"""Names and numbers of a slot's scalars."""


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class FieldSpec:
    """One array of a microbatch at a fixed place of the payload."""

    name: str
    dtype: str
    """numpy name, little endian."""
    extent: Extent
    """What the entries count: tokens, boundaries, segments or rows; of media units, items, their
    boundaries, placeholder tokens or groups. Media are ragged in the first dimension; so are
    boundaries and segments unless `boundaries: constant`."""
    shape_max: tuple[int, ...]
    """token: (rows, row_tokens), with context parallelism (cp, rows, row_tokens // cp). axis_token:
    (3, rows, row_tokens), with context parallelism (cp, 3, rows, row_tokens // cp): each rank's
    part lies together."""
    offset_bytes: int
    """From the start of the payload."""
    nbytes_max: int
    modality: str = ""
    """Of a field of media."""


class ScratchField(NamedTuple):
    """An array that a data constructor needs beside the slot, of whole rows."""

    name: str
    dtype: str
    lines: int
    """Rows of row_tokens places: those of the microbatch, three times as many with axes."""


class WantedField(NamedTuple):
    """A field without a place."""

    name: str
    dtype: str
    extent: Extent
    shape: tuple[int, ...]
    modality: str = ""


def place_fields(wanted: Sequence[WantedField]) -> tuple[FieldSpec, ...]:
    """Return the fields one behind the other, aligned."""
    placed = []
    end = 0
    for name, dtype, extent, shape, modality in wanted:
        nbytes = int(np.dtype(dtype).itemsize) * math.prod(shape)
        is_large = nbytes >= LARGE_FIELD_BYTES
        offset = align_up(end, LARGE_FIELD_ALIGN_BYTES if is_large else FIELD_ALIGN_BYTES)
        placed.append(FieldSpec(name, dtype, extent, shape, offset, nbytes, modality))
        end = offset + nbytes
    return tuple(placed)


def check_table(placed: Sequence[FieldSpec]) -> None:
    """Refuse more names than a slot's field table holds (see `ring_layout.encode_table`).

    Raises:
        ConfigError: The table could grow longer.
    """
    table_bytes = _SCALARS_BYTES_MAX + sum(
        len(field.name.encode())
        + len(field.dtype)
        + 6
        + _NUMBER_BYTES_MAX * 2
        + 5 * len(field.shape_max)
        for field in placed
    )
    if table_bytes > TABLE_BYTES_MAX:
        raise ConfigError(
            f"batch spec: the names of {len(placed)} fields take {table_bytes} bytes of a slot's "
            f"field table of {TABLE_BYTES_MAX}: shorten the names of user fields, or leave some out",
            needed_bytes=table_bytes,
            available_bytes=TABLE_BYTES_MAX,
        )
