"""What is known of a source without reading it: lengths of some records, and how many there are.

Given (a table of lengths) or sampled (msd_daemon.verbs.length_sampling). Records that are drawn from it
are like the source's own, one by one: a record's marks - chats, images - stay with its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from federation.model.chunk import Marks
from federation.planning.run_marks import continued_records
from msd_client.contract.errors import ConfigError

Int64Array = npt.NDArray[np.int64]


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
            lengths: Tokens of records, each at least 1. Shape (n,).
            records: Records of the source; None: these are all.

        Raises:
            ConfigError: There is no length, or one is below 1.
        """
        found = np.asarray(lengths, np.int64)
        if found.ndim != 1 or not len(found) or int(found.min()) < 1:
            least = int(found.min()) if found.size else None
            raise ConfigError(
                f"length statistics need records of at least 1 token each, there are {found.size}, "
                f"the least {least}",
                seen=least,
                limit=1,
            )
        status = np.zeros(len(found), np.uint8)
        return SourceLengths(found, status, len(found) if records is None else max(1, records))

    @cached_property
    def group_starts(self) -> Int64Array:
        """Records that begin a group: all of a source without any. Shape (groups,)."""
        return np.flatnonzero(~continued_records(self.marks, 0, len(self.lengths)))

    @property
    def epoch_tokens(self) -> int:
        """Tokens of one epoch, as far as the sample tells."""
        return round(float(self.lengths.mean()) * self.records)


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
