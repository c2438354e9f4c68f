"""Runs of bytes that go from one memory to another, and the gather of any range of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_daemon.gather import copy_spans, join_runs

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Spans:
    """All of shape (spans,); sorted by target, no two overlap there."""

    target: Int64
    """First byte where it goes."""
    source: Int64
    """First byte where it lies."""
    nbytes: Int64

    def cut(self, begin: int, end: int) -> Spans:
        """Return what goes to the bytes from `begin` to before `end`, its targets counted from `begin`."""
        # Ends ascend as begins do.
        first = int(self.target.searchsorted(begin, "right")) - 1
        if first >= 0 and int(self.target[first] + self.nbytes[first]) <= begin:
            first += 1
        first = max(first, 0)
        last = int(self.target.searchsorted(end, "left"))
        target = self.target[first:last] - begin
        skipped = np.maximum(-target, 0)
        source = self.source[first:last] + skipped
        stop = np.minimum(target + self.nbytes[first:last], end - begin)
        target = target + skipped
        return Spans(target, source, stop - target)

    def gather(self, base: memoryview, begin: int, out: memoryview) -> None:
        """Copy what goes to the `len(out)` bytes from `begin` on; other bytes of `out` stay.

        Args:
            base: The memory that the bytes lie in.
            begin: First byte of the target that is wanted.
            out: Writable.
        """
        part = self.cut(begin, begin + len(out))
        copy_spans(base, out, part.source, part.target, part.nbytes)


def join_spans(target: Int64, source: Int64, nbytes: Int64) -> Spans:
    """Return spans sorted by target; those that follow each other at both ends become one.

    The columns may be overwritten.
    """
    if not nbytes.all():
        kept = np.flatnonzero(nbytes)
        target, source, nbytes = target[kept], source[kept], nbytes[kept]
    if (target[1:] < target[:-1]).any():
        order = np.argsort(target, kind="stable")
        target, source, nbytes = target[order], source[order], nbytes[order]
    return Spans(*join_runs(target, source, nbytes))
