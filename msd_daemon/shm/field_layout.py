"""Where the values of user fields lie in a chunk, behind its tokens (see `chunk_layout`).

One block for each field of the job, in the job's order: a value per token, or a value per record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from msd_client.contract.slot_fields import align_up

BLOCK_ALIGN_BYTES = 64

ValueArray = npt.NDArray[Any]


class FieldRow(Protocol):
    """What the layout asks of a field of the job (`FieldRule`, `UserField`)."""

    @property
    def per(self) -> str:
        """token, or else one value per record."""
        ...

    @property
    def dtype(self) -> str:
        """A numpy name."""
        ...


def value_dtype(field: FieldRow) -> np.dtype[Any]:
    """Return the dtype of a field's values in chunks."""
    return np.dtype(field.dtype).newbyteorder("<")


def value_bytes(fields: Sequence[FieldRow]) -> tuple[int, int]:
    """Return the bytes that the values of all fields add to a token, and to a record."""
    sizes = [(field.per == "token", value_dtype(field).itemsize) for field in fields]
    return sum(size for is_token, size in sizes if is_token), sum(
        size for is_token, size in sizes if not is_token
    )


def field_blocks(fields: Sequence[FieldRow], records: int, tokens: int) -> list[int]:
    """Return the bytes of each field's block in a chunk, without their alignment."""
    return [
        value_dtype(field).itemsize * (tokens if field.per == "token" else records)
        for field in fields
    ]


def block_places(payload_end: int, sizes: Sequence[int]) -> list[int]:
    """Return where the blocks of fields begin, from the chunk's start."""
    places = []
    place = align_up(payload_end, BLOCK_ALIGN_BYTES)
    for size in sizes:
        places.append(place)
        place += align_up(size, BLOCK_ALIGN_BYTES)
    return places
