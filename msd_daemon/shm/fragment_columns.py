"""Fragments of a parcel as columns: which they are, and where in the pool they lie."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ProtocolError

_DTYPES = {
    "source": "<i4",
    "block_key": "<i8",
    "index": "<i4",
    "offset": "<i4",
    "length": "<i4",
    "chunk_offset": "<i8",
    "chunk_bytes": "<i8",
    "sample": "<i4",
    "first_token": "<i4",
}
FRAGMENT_BYTES = sum(np.dtype(dtype).itemsize for dtype in _DTYPES.values())

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FragmentColumns:
    """All of shape (fragments,)."""

    source: Int32
    """Index of the source in the job."""
    block_key: Int64
    index: Int32
    """Of the record in its block."""
    offset: Int32
    """First token of the fragment in its record."""
    length: Int32
    """Tokens of the fragment."""
    chunk_offset: Int64
    """Where the chunk begins in the pool that it lies in."""
    chunk_bytes: Int64
    sample: Int32
    """Number of the record in that chunk."""
    first_token: Int32
    """First token of the fragment in what lies there: a copy may hold a part of the record."""

    def __len__(self) -> int:
        return len(self.source)

    def encode(self) -> bytes:
        """Return the columns one after the other, little-endian."""
        return b"".join(
            np.ascontiguousarray(getattr(self, name), dtype).tobytes()
            for name, dtype in _DTYPES.items()
        )

    @classmethod
    def decode(cls, body: bytes | memoryview) -> FragmentColumns:
        """Return the columns of `encode`.

        Raises:
            ProtocolError: It is no whole number of fragments.
        """
        count, rest = divmod(len(body), FRAGMENT_BYTES)
        if rest:
            raise ProtocolError(f"fragment columns of {len(body)} bytes are cut short")
        columns, at = [], 0
        for dtype in _DTYPES.values():
            columns.append(np.frombuffer(body, dtype, count, at))
            at += count * np.dtype(dtype).itemsize
        return cls(*columns)


assert tuple(_DTYPES) == tuple(field.name for field in fields(FragmentColumns))
