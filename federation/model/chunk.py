"""What a source loader tells of a chunk it published: metadata columns, never payload."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class RecordStatus(IntEnum):
    """Fate of a record at load; everything but OK has length 0 and is counted when drawn past."""

    OK = 0
    EMPTY = 1
    """Zero tokens after tokenizing: nothing to train on."""
    HELD_OUT = 2
    """Of the other part of the source: held out of training, or not held out for validation."""
    BAD_SYNTAX = 3
    """Not JSON, or JSON of the wrong shape."""
    BAD_ENCODING = 4
    """Bytes that are not UTF-8, or a lone surrogate."""
    FIELD_MISSING = 5
    """The text or a user field is absent, null, of the wrong type or of the wrong length."""
    TOO_LARGE = 6
    """Longer than `record_bytes_max`."""
    UNREADABLE = 7
    """The container is damaged here: truncated stream, failed checksum, corrupt page."""
    FILTERED = 8
    """Refused by the source's `where`."""
    EXCLUDED = 9
    """Named by the source's exclude list."""
    TRANSFORMED_AWAY = 10
    """The user's transform gave nothing for it."""
    UNTRAINED = 11
    """No token of it is trained: a chat without an answer."""
    UNDECODABLE = 12
    """An image, sound or video of it cannot be decoded, or is over a limit."""
    TRANSFORM_FAILED = 13
    """The user's transform raised, or gave what is no sample."""
    QUARANTINED = 14
    """It killed or hung its worker."""


FAULT_STATUSES = frozenset(
    {
        RecordStatus.BAD_SYNTAX,
        RecordStatus.BAD_ENCODING,
        RecordStatus.FIELD_MISSING,
        RecordStatus.TOO_LARGE,
        RecordStatus.UNREADABLE,
        RecordStatus.UNDECODABLE,
        RecordStatus.TRANSFORM_FAILED,
        RecordStatus.QUARANTINED,
    }
)
"""Statuses that act on the error policy; the others but OK are plain drops."""

IS_FAULT = np.array([status in FAULT_STATUSES for status in RecordStatus])
"""Of each status. Shape (len(RecordStatus),)."""

MARK_GROUP = -3
"""Kind of a mark, the first of its record, at token 0: the record continues the group of the one
before it in the block's order."""
MARK_SAMPLE = -2
"""Kind of a mark: a sample of its own begins here, a fragment never goes over it."""
MARK_UNTRAINED = -1
"""Kind of a mark: these tokens are not trained. Kinds from 0 on are media."""
MARK_KIND, MARK_BEGIN, MARK_TOKENS, MARK_UNITS = range(4)
"""Columns of a table of marks."""


@dataclass(frozen=True)
class Marks:
    """Places inside records of a chunk that planning has to know of."""

    counts: npt.NDArray[np.int32]
    """Marks of each record. Shape (records,)."""
    table: npt.NDArray[np.int32]
    """Columns kind, first token in its record, tokens, units; of all records in turn, ascending by
    first token. A kind from 0 on is an item of that rule of the job's media: its placeholder tokens
    are not trained, no fragment is cut inside them, and it takes so many units (patches, frames) of
    its row. Shape (marks, 4)."""


@dataclass(frozen=True)
class ChunkMeta:
    """Columns of a run of consecutive records of one block, in the source's order."""

    source_index: int
    block_key: int
    """See msd_client.contract.position."""
    first_index: int
    """Index in the block's order of the first record."""
    lengths: npt.NDArray[np.int32]
    """Tokens of each record with BOS/EOS. Shape (records,), 0 where status is not OK."""
    status: npt.NDArray[np.uint8]
    """RecordStatus of each record. Shape (records,)."""
    is_block_end: bool
    """True on the chunk that ends the block; the next position is then the next block."""
    window_blocks: int
    """Seekable: number of blocks of the window. Streaming: 0."""
    is_lane_end: bool = False
    """Streaming: the lane has no block after this one. (A lane without any block sends one
    empty chunk with both flags set.)"""
    fault: str = ""
    """First fault of the chunk for people: shard, record, byte offset and what is wrong."""
    marks: Marks | None = None
    """None: every token is trained, every record is one sample, there are no media."""
