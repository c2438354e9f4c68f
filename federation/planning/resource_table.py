"""The table of what loads a job on a node, the budgets it keeps, and whether trainers will wait. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from federation.planning.resource_costs import SourceLoad

Stage = Literal["", "read", "decode", "transform", "build", "memory"]


class Budgets(NamedTuple):
    """What loading may take on a node."""

    cpus_milli: int
    """Thousandths of a CPU."""
    memory_bytes: int
    """Shared and private memory together."""
    shared_bytes: int
    """Of it what pool and rings take, whatever the workers."""
    workers_max: int
    workers_fixed: int = 0
    """Where the configuration says a number: so many, no more and no fewer."""


class Pace(NamedTuple):
    """What the ranks consume."""

    step_tokens: int
    step_ns: int
    """Time of a step without any wait."""
    payload_bytes: int = 0
    """Media and field values of a step, beside its tokens."""


@dataclass(frozen=True)
class SourceRow:
    """One source's line of the table."""

    source: int
    name: str
    parts: int
    """Source loaders; 0: nothing is opened."""
    workers: tuple[int, ...]
    """Loader worker of each part."""
    reads: int
    """That run at once for one part: blocks that its loader has fetched ahead of need. 1: none."""
    has_shadow: bool
    load: SourceLoad
    reason: str


@dataclass(frozen=True)
class WorkerRow:
    """One loader worker's line."""

    worker: int
    sources: tuple[int, ...]
    load_ppm: int
    """Of its time."""
    reason: str


@dataclass(frozen=True)
class WaitVerdict:
    """Whether trainers will wait, for what."""

    waits: bool
    source: str
    """Empty where it is none's."""
    stage: Stage
    reason: str


@dataclass(frozen=True)
class ResourceTable:
    """The whole table."""

    pace: Pace
    sources: tuple[SourceRow, ...]
    workers: tuple[WorkerRow, ...]
    workers_reason: str
    constructors: int
    constructors_reason: str
    cpu_ppm: int
    """Of one CPU, for all of it."""
    memory_bytes: int
    memory_reason: str
    verdict: WaitVerdict

    def parts_of(self, source: int) -> tuple[int, ...]:
        """Return the worker of each part of a source."""
        return self.sources[source].workers


class Part(NamedTuple):
    """A part of a source, and its load."""

    source: int
    ppm: int
