"""What is known of a source without reading it: lengths of some records, and how many there are.

Given (a table of lengths) or sampled (msd_daemon.verbs.length_sampling). Records that are drawn from it
are like the source's own, one by one: a record's marks - chats, images - stay with its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import Marks
from federation.planning.run_marks import continued_records
from msd_client.contract.errors import ConfigError

Int64Array = npt.NDArray[np.int64]

LENGTH_END = 1 << 31
"""Above every length of a record."""
SHOWN_CHARACTERS_MAX = 80


@dataclass(frozen=True, eq=False)
class SourceLengths:
    """Records of one source that stand for all of them."""

    lengths: Int64Array
    """Tokens of each sampled record, 0 of one that is no sample. Shape (n,), n at least 1."""
    status: npt.NDArray[np.uint8]
    """RecordStatus of each. Shape (n,)."""
    records: int
    """Records of the whole source, one epoch."""
    marks: Marks | None = None
    """Of the sampled records; None: every token is trained, a record is a sample, no media. The first
    record continues no group."""

    @staticmethod
    def of(lengths: npt.ArrayLike, records: int | None = None) -> SourceLengths:
        """Return statistics of lengths alone.

        Args:
            lengths: Tokens of records, integers of at least 1, below 2**31. Shape (n,).
            records: Records of the source, at least 1; None: these are all.

        Raises:
            ConfigError: There is no length, or one or `records` is no such number.
        """
        found = _checked(lengths)
        if records is None:
            records = len(found)
        elif not _is_count(records):
            raise ConfigError(
                f"records is {_shown(records)}: write how many records the source has, an integer "
                "of at least 1",
                limit=1,
            )
        return SourceLengths(found, np.zeros(len(found), np.uint8), int(records))

    @cached_property
    def group_starts(self) -> Int64Array:
        """Records that begin a group: all of a source without any. Shape (groups,)."""
        return np.flatnonzero(~continued_records(self.marks, 0, len(self.lengths)))

    @property
    def epoch_tokens(self) -> int:
        """Tokens of one epoch, as far as the sample tells."""
        return round(float(self.lengths.mean()) * self.records)


def _checked(lengths: Any) -> Int64Array:
    """Return lengths that are what they should be. Shape (n,)."""
    wanted = f"write integers of at least 1 token, below {LENGTH_END}"
    given: Any = np.asarray(lengths) if hasattr(lengths, "__array__") else lengths
    is_array = isinstance(given, np.ndarray) and given.ndim == 1
    if not is_array and not isinstance(given, (list, tuple, range)):
        raise ConfigError(f"lengths is {_shown(lengths)}: give a flat list; {wanted}")
    if not len(given):
        raise ConfigError(f"lengths is empty: give one record or more; {wanted}", seen=0, limit=1)
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        faulty = np.flatnonzero((given < 1) | (given >= LENGTH_END))
        place = int(faulty[0]) if len(faulty) else None
    else:
        if isinstance(given, np.ndarray):
            given = given.tolist()
        place = next((place for place, one in enumerate(given) if not _is_length(one)), None)
    if place is not None:
        one = given[place]
        raise ConfigError(f"entry {place} of lengths is {_shown(one)}: {wanted}", entry=place)
    return np.array(given, np.int64)


def _is_length(one: Any) -> bool:
    return _is_count(one) and bool(one < LENGTH_END)


def _is_count(one: Any) -> bool:
    # Not converted: a float's fraction would be lost, and a bool is no number of anything.
    is_integer = isinstance(one, Integral) and not isinstance(one, bool)
    return is_integer and bool(one >= 1)


def _shown(value: object) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 3] + "..."


def merged_marks(marks: Marks, picks: Int64Array) -> Marks:
    """Return the marks of records picked from those with marks, in the order of the picks.

    Args:
        marks: Of all records.
        picks: Record numbers, any of them any number of times. Shape (m,).
    """
    counts = marks.counts.astype(np.int64)
    ends = np.cumsum(counts)
    taken = counts[picks]
    through = np.cumsum(taken)
    total = int(through[-1]) if len(through) else 0
    lines = np.arange(total) + np.repeat((ends - counts)[picks] - (through - taken), taken)
    return Marks(marks.counts[picks], marks.table[lines])
