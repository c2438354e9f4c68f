"""What happened in some steps of a generation, as spans for a trace viewer. Pure; the clock comes in.

Bounded: beyond EVENTS_MAX spans nothing more is taken, which the trace says. Times are nanoseconds of
the node's monotonic clock. Spans of ranks follow from what the daemon sees: a batch that was waited
for was got when it was published; one that was not, when the one before was given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

EVENTS_MAX = 200_000


class Span(NamedTuple):
    """Something that took time, or an instant where `end_ns` is `begin_ns`."""

    lane: str
    """Process and number: `loader 0`, `constructor 0`, `rank 3`, `planner 0`, `daemon 0`."""
    name: str
    begin_ns: int
    end_ns: int
    about: dict[str, Any]


class StepTrace:
    """Of one generation.

    Args:
        names: Of the job's sources.
        end_step: The trace is over once all steps up to this one are given back.
        now_ns: When it begins.
        when_over: Called then, or where the generation ends before.
    """

    def __init__(
        self, names: list[str], end_step: int, now_ns: int, when_over: Callable[[], object]
    ) -> None:
        self._names = names
        self.end_step = end_step
        self.end = when_over
        self.begin_ns = now_ns
        self.spans: list[Span] = []
        self.counters: list[tuple[int, str, float]] = []
        """(time, name, value)."""
        self.dropped = 0
        self._grants: dict[tuple[int, int], tuple[int, int, int]] = {}
        """By loader and task: worker, source, when it was told to."""
        self._builds: dict[tuple[int, int], tuple[int, int, int]] = {}
        """By ring and sequence: constructor, step, when it was told to."""
        self._published: dict[tuple[int, int], int] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self._last_release: dict[int, int] = {}
        self._lacks: dict[int, int] = {}

    def _add(self, lane: str, name: str, begin_ns: int, end_ns: int, **about: Any) -> None:
        if len(self.spans) >= EVENTS_MAX:
            self.dropped += 1
            return
        self.spans.append(Span(lane, name, max(begin_ns, self.begin_ns), end_ns, about))

    # -- loaders -----------------------------------------------------------------------------------

    def granted(self, loader: int, task: int, worker: int, source: int, now_ns: int) -> None:
        """A loader worker was told to read a source's next chunk."""
        self._grants[loader, task] = (worker, source, now_ns)

    def chunk_came(
        self, loader: int, task: int, records: int, used_bytes: int, now_ns: int
    ) -> None:
        """It has it ready."""
        found = self._grants.pop((loader, task), None)
        if found is not None:
            worker, source, since_ns = found
            self._add(
                f"loader {worker}", self._names[source], since_ns, now_ns,
                records=records, bytes=used_bytes,
            )  # fmt: skip

    # -- planner -----------------------------------------------------------------------------------

    def planned(self, first_step: int, steps: int, now_ns: int) -> None:
        """Plans came."""
        self._add("planner 0", "plans", now_ns, now_ns, first_step=first_step, steps=steps)

    def lacks(self, sources: frozenset[int], now_ns: int) -> None:
        """Draw or plans wait for records of these, and no others."""
        for source in [source for source in self._lacks if source not in sources]:
            since_ns = self._lacks.pop(source)
            self._add("planner 0", f"waits for {self._names[source]}", since_ns, now_ns)
        for source in sources:
            self._lacks.setdefault(source, now_ns)

    # -- constructors and rings --------------------------------------------------------------------

    def build_ordered(
        self, ring: int, sequence: int, constructor: int, step: int, now_ns: int
    ) -> None:
        """A constructor was told to fill a slot."""
        self._builds[ring, sequence] = (constructor, step, now_ns)

    def filled(self, ring: int, sequence: int, payload_bytes: int, now_ns: int) -> None:
        """It did."""
        found = self._builds.pop((ring, sequence), None)
        if found is not None:
            constructor, step, since_ns = found
            self._steps[ring, sequence] = step
            self._add(
                f"constructor {constructor}", f"step {step}, ring {ring}", since_ns, now_ns,
                sequence=sequence, bytes=payload_bytes,
            )  # fmt: skip

    def published(self, ring: int, sequence: int, now_ns: int) -> None:
        """Readers were told of a slot."""
        self._published[ring, sequence] = now_ns

    def counted(self, name: str, value: float, now_ns: int) -> None:
        """A value from now on."""
        if len(self.counters) < EVENTS_MAX:
            self.counters.append((now_ns, name, value))

    # -- ranks -------------------------------------------------------------------------------------

    def released(self, rank: int, ring: int, sequence: int, waited_ns: int, now_ns: int) -> None:
        """A rank gave a batch back, for which it had waited so long."""
        published_ns = self._published.get((ring, sequence))
        before_ns = self._last_release.get(rank)
        self._last_release[rank] = now_ns
        if published_ns is None:
            return  # it was published before the trace began
        got_ns = published_ns
        if not waited_ns and before_ns is not None:
            got_ns = max(published_ns, before_ns)
        step = self._steps.get((ring, sequence))
        name = "batch" if step is None else f"step {step}"
        if waited_ns:
            self._add(f"rank {rank}", "waits", got_ns - waited_ns, got_ns, sequence=sequence)
        self._add(f"rank {rank}", name, got_ns, now_ns, sequence=sequence)

    def steps_released(self, step: int, now_ns: int) -> None:
        """All ranks of this node gave back the steps up to this one."""
        self._add("daemon 0", f"step {step} is done", now_ns, now_ns)
        if step >= self.end_step:
            self.end()


def chrome_events(trace: StepTrace, pids: dict[str, int]) -> list[dict[str, Any]]:
    """Return a trace in Chrome's JSON event format, which Perfetto reads.

    Args:
        trace: What was taken.
        pids: Process id by lane; lanes without one get none of their own.

    Returns:
        Events with `ts` and `dur` in microseconds of CLOCK_MONOTONIC; source:
        "Trace Event Format", Google, 2016.
    """
    lanes = sorted({span.lane for span in trace.spans}, key=_lane_order)
    numbers = {lane: pids.get(lane, 0) or number + 1 for number, lane in enumerate(lanes)}
    found: list[dict[str, Any]] = []
    for order, lane in enumerate(lanes):
        pid = numbers[lane]
        found += [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": pid, "args": {"name": lane}},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": order}},
        ]
    for span in trace.spans:
        pid = numbers[span.lane]
        head = {"name": span.name, "cat": span.lane.split()[0], "pid": pid, "tid": pid}
        times: dict[str, Any] = {"ph": "i", "s": "t", "ts": span.begin_ns / 1e3}
        if span.end_ns > span.begin_ns:
            duration = (span.end_ns - span.begin_ns) / 1e3
            times = {"ph": "X", "ts": span.begin_ns / 1e3, "dur": duration}
        found.append(head | times | {"args": span.about})
    for at_ns, name, value in trace.counters:
        found.append(
            {"ph": "C", "name": name, "pid": 0, "ts": at_ns / 1e3, "args": {"value": value}}
        )
    return found


_ORDER = ("loader", "planner", "daemon", "constructor", "rank")


def _lane_order(lane: str) -> tuple[int, int]:
    role, _, number = lane.partition(" ")
    return _ORDER.index(role), int(number)
