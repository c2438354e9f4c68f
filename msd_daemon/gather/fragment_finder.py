"""Where the tokens of fragments lie in a pool, in numpy: the twin of the kernel's `find_fragments`.

It also says what is wrong with a fragment that the kernel refuses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ChunkCorruptError
from msd_daemon.shm.chunk_header import HEADER_BYTES, HeaderColumns
from msd_daemon.shm.fragment_columns import FragmentColumns

Int64 = npt.NDArray[np.int64]


class FoundFragments(NamedTuple):
    """Arrays of shape (fragments,)."""

    token_bytes: Int64
    flags: Int64
    """Of the fragment's chunk."""
    first: Int64
    """First token of the fragment in its chunk."""
    payload: Int64
    """Its first byte in the pool."""


def find_fragments(pool: memoryview, fragments: FragmentColumns) -> FoundFragments:
    """Return where fragments lie; see `msd_daemon.gather.find_fragments`.

    Raises:
        ChunkCorruptError: A fragment lies outside its record, or its chunk is none.
    """
    chunks = np.unique(fragments.chunk_offset)
    number = np.searchsorted(chunks, fragments.chunk_offset)
    sizes = np.zeros(len(chunks), np.int64)
    sizes[number] = fragments.chunk_bytes
    headers = HeaderColumns(pool, chunks, sizes)

    def of_chunk(name: str) -> Int64:
        return headers.of(name)[number]

    chunk, sample = chunks[number], fragments.sample.astype(np.int64)
    token_bytes, records = of_chunk("token_bytes"), of_chunk("records")
    is_sound = (sample >= 0) & (sample < records) & (fragments.first_token >= 0)
    is_sound &= (fragments.source == of_chunk("source_index")) & (fragments.length > 0)
    # The column of offsets lies behind the header, 8 bytes a record (see `chunk_layout`).
    at = (chunk + HEADER_BYTES) // 8 + np.where(is_sound, sample, 0)
    offsets: Int64 = np.frombuffer(pool, np.int64, len(pool) // 8)
    begin, end = offsets[at], offsets[at + 1]
    is_sound &= (begin >= 0) & (begin <= end)
    is_sound &= end <= of_chunk("payload_bytes") // token_bytes
    # No number of these is larger than the pool now, so that no sum wraps.
    part = fragments.first_token.astype(np.int64) + fragments.length
    is_sound &= part <= np.where(is_sound, end - begin, 0)
    if not is_sound.all():
        raise _wrong_fragment(fragments, int(np.flatnonzero(~is_sound)[0]))
    first: Int64 = begin + fragments.first_token
    payload = chunk + of_chunk("payload_offset") + first * token_bytes
    return FoundFragments(token_bytes, of_chunk("flags"), first, payload)


def _wrong_fragment(fragments: FragmentColumns, row: int) -> ChunkCorruptError:
    first = int(fragments.first_token[row])
    return ChunkCorruptError(
        f"a fragment of source {fragments.source[row]}, block {fragments.block_key[row]}, index "
        f"{fragments.index[row]} is said to be tokens {first} to {first + int(fragments.length[row])} "
        f"of record {fragments.sample[row]} of the chunk at byte {fragments.chunk_offset[row]}, which "
        "holds no such record of that source"
    )
