"""What reading and making the samples of each source costs, as its chunks tell. Pure.

Moving averages of fixed point: each chunk takes 1/32 of what was known and adds itself, so about the
last 32 chunks count. A cost is a quotient of two such sums: chunks of many records weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_DECAY_BITS = 5
_POINT_BITS = 10
"""Fraction bits of the sums: those of one record must decay too."""


class ReadCost(NamedTuple):
    """What it took to read and make the records of a chunk, in the loader's thread."""

    cpu_ns: int = 0
    user_ns: int = 0
    """In which the user's code had them, in a process of its own."""
    wait_ns: int = 0
    """In which the thread neither ran nor was ready to: a disk or the network kept it."""
    read_bytes: int = 0
    """Of shards, as they lie; of parquet the decoded bytes of the columns read."""

    def plus(self, other: ReadCost) -> ReadCost:
        """Return the sum of two costs."""
        return ReadCost(*(one + more for one, more in zip(self, other, strict=True)))


NO_COST = ReadCost()
KNOWN_TOKENS = 1 << 16
"""What was known before weighs like a chunk of so many tokens."""


@dataclass(frozen=True)
class SourceCost:
    """Costs of one source, live: averages over its last chunks, and totals of all."""

    work_ns_per_sample: int
    """A process is busy so long with a sample: CPU, and the user's code. 0: nothing was measured."""
    wait_ns_per_sample: int
    work_ns_per_token: float
    wait_ns_per_token: float
    bytes_per_sample: int
    """As they were read."""
    tokens_per_sample: float
    samples: int
    """Measured in all; before the first chunk those of an earlier measurement."""
    tokens: int
    cpu_ns: int
    user_ns: int
    wait_ns: int
    read_bytes: int

    @property
    def wait_ratio(self) -> float:
        """Share of a loader's time in which it waits for a disk or the network."""
        spent = self.work_ns_per_token + self.wait_ns_per_token
        return self.wait_ns_per_token / spent if spent else 0.0


class _Sums:
    """Decayed sums and totals of one source."""

    __slots__ = (
        "known_samples",
        "reads",
        "samples",
        "tokens",
        "total",
        "total_samples",
        "total_tokens",
        "waits",
        "works",
    )

    def __init__(self) -> None:
        self.samples = self.tokens = self.works = self.waits = self.reads = 0
        self.total = NO_COST
        self.total_samples = self.total_tokens = self.known_samples = 0

    def add(self, samples: int, tokens: int, cost: ReadCost) -> None:
        news = (samples, tokens, cost.cpu_ns + cost.user_ns, cost.wait_ns, cost.read_bytes)
        sums = (self.samples, self.tokens, self.works, self.waits, self.reads)
        self.samples, self.tokens, self.works, self.waits, self.reads = (
            old - (old >> _DECAY_BITS) + (new << _POINT_BITS)
            for old, new in zip(sums, news, strict=True)
        )
        self.total = self.total.plus(cost)
        self.total_samples += samples
        self.total_tokens += tokens

    def know(self, samples: int, tokens: int, cost: ReadCost) -> None:
        news = (samples, tokens, cost.cpu_ns + cost.user_ns, cost.wait_ns, cost.read_bytes)
        self.samples, self.tokens, self.works, self.waits, self.reads = (
            new << _POINT_BITS for new in news
        )
        self.known_samples = samples


class LoaderCosts:
    """Of the sources of a job; they outlive its generations."""

    def __init__(self, sources: int) -> None:
        self._sums = [_Sums() for _ in range(sources)]

    def add(self, source: int, samples: int, tokens: int, cost: ReadCost) -> None:
        """Count a chunk.

        Args:
            source: Its number in the job.
            samples: Records of the chunk, faults included: those cost time as well.
            tokens: Of them.
            cost: What they took; one of no time (a loader that tells nothing) is left out.
        """
        if cost.cpu_ns or cost.user_ns or cost.wait_ns:
            self._sums[source].add(samples, tokens, cost)

    def know(self, source: int, samples: int, tokens: int, cost: ReadCost) -> None:
        """Take what an earlier run or a probe measured, until chunks of this one tell.

        It weighs as much as a chunk of KNOWN_TOKENS; no total counts it.

        Args:
            source: Its number in the job; one that chunks came of already is left as it is.
            samples: Records that were measured.
            tokens: Of them; 0: nothing is known.
            cost: What they took.
        """
        own = self._sums[source]
        if own.total_samples or not samples or not tokens:
            return
        scale = max(min(tokens // KNOWN_TOKENS, samples), 1)
        own.know(
            samples // scale, max(tokens // scale, 1), ReadCost(*(part // scale for part in cost))
        )

    def counted(self, source: int) -> tuple[int, int, ReadCost]:
        """Return the records, tokens and costs of all chunks of a source that came."""
        own = self._sums[source]
        return own.total_samples, own.total_tokens, own.total

    def of(self, source: int) -> SourceCost:
        """Return what is known of a source; all 0 where nothing came of it."""
        own = self._sums[source]
        samples, tokens = max(own.samples, 1), max(own.tokens, 1)
        return SourceCost(
            own.works // samples,
            own.waits // samples,
            own.works / tokens,
            own.waits / tokens,
            own.reads // samples,
            own.tokens / samples,
            own.total_samples or own.known_samples,
            own.total_tokens,
            own.total.cpu_ns,
            own.total.user_ns,
            own.total.wait_ns,
            own.total.read_bytes,
        )

    def all(self) -> list[SourceCost]:
        """Return those of all sources, by number."""
        return [self.of(source) for source in range(len(self._sums))]
