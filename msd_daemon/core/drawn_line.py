"""Plans on their way through the records that this node loads: located, pinned, the draw moved on.

A line takes plans in order. A plan is through once all of its own records that rows here, or other
nodes, need lie in the pool: those are pinned, its carried fragments change, and what the draw passed
may go. On a single host one line has all sources. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.exports import Export
from federation.model.plan import StepPlan
from federation.model.skipped import SkippedSteps
from msd_daemon.core.carried import CarriedFragments, CarriedKey
from msd_daemon.core.chunk import Chunk, Located
from msd_daemon.core.pool import PoolState

Segment = tuple[int, int, int, int, int]
"""(source, block key, index, offset, length) of a fragment in a row."""


class Places(NamedTuple):
    """Where fragments lie, in their order: chunk, record number in it, tokens before what lies there."""

    chunks: list[Chunk]
    samples: list[int]
    bases: list[int]


class PlacedExport(NamedTuple):
    """Fragments for another node, pinned until it has them."""

    export: Export
    places: Places


class Placed(NamedTuple):
    """A plan that is through a line. Each different chunk has one step pin, and one of each export."""

    step: int
    own: npt.NDArray[np.int64] | None
    """Segments of the plan that were placed here; None: all."""
    places: Places
    exports: tuple[PlacedExport, ...]


@dataclass(eq=False)
class _Entry:
    what: StepPlan | SkippedSteps
    own: npt.NDArray[np.int64] | None = None
    exports: tuple[Export, ...] = ()

    def leave(self, sources: frozenset[int]) -> None:
        """Forget what is of these sources."""
        assert isinstance(self.what, StepPlan) and self.own is not None
        gone = sorted(sources)
        self.own = self.own[~np.isin(self.what.source[self.own], gone)]
        kept = [(it, np.flatnonzero(~np.isin(it.source, gone))) for it in self.exports]
        self.exports = tuple(export.part(places) for export, places in kept if len(places))

    def segments(self) -> list[Segment]:
        """Return the own segments of the rows here."""
        if isinstance(self.what, SkippedSteps):
            return []
        return segments_of(self.what, self.own)


class DrawnLine:
    """The plans of one generation, for the records of some sources.

    Args:
        pool: Where records lie.
        loaders_of: Source loaders of each source; the caller extends it when sources open.
        is_own: Tells whether a record, by source and block key, is of this line; None: all are.
    """

    def __init__(
        self,
        pool: PoolState,
        loaders_of: dict[int, list[int]],
        is_own: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._pool = pool
        self._loaders_of = loaders_of
        self.is_own = is_own
        self._waiting: deque[_Entry] = deque()
        self._near: dict[int, Chunk] = {}
        """Chunk of the last located record of each source."""
        self._carried = CarriedFragments()
        self._before_skips: dict[CarriedKey, int] | None = None
        """While steps are left out: what was carried behind the last served one, with its tokens."""
        self._pending_carried: dict[CarriedKey, int] = {}
        """Carried since before this line began: fetched, not yet here. Value: length."""
        self._leaving: list[tuple[int, frozenset[int], Callable[[], None]]] = []
        """(first step, sources, what to do): sources that are another node's from that step on."""

    def leave(
        self, sources: frozenset[int], from_step: int, next_step: int, on_left: Callable[[], None]
    ) -> None:
        """Let sources go once all plans before a step are through.

        Args:
            sources: Of this line.
            from_step: The first one that they are another node's for.
            next_step: The step that will be planned next.
            on_left: Called then.
        """
        for entry in self._waiting:
            if isinstance(entry.what, StepPlan) and entry.what.step >= from_step:
                entry.leave(sources)  # they come from whom they belong to now
        self._leaving.append((from_step, sources, on_left))
        if from_step >= next_step and not self._waiting:
            self._leave_upto(from_step)

    def owns_any(self, sources: frozenset[int]) -> bool:
        """Return True where one of the sources is of this line."""
        return any(self.is_own is None or self.is_own(source, 0) for source in sources)

    def _leave_upto(self, step: int) -> None:
        """Let go what is another node's for a step."""
        due = [entry for entry in self._leaving if entry[0] <= step]
        for entry in due:
            self._leaving.remove(entry)
            _, sources, on_left = entry
            for key in [key for key, _, _ in self._carried if key[0] in sources]:
                self._pool.unpin_carried(self._carried.pop(key).chunk)
            for key in [key for key in self._pending_carried if key[0] in sources]:
                del self._pending_carried[key]
            former = self.is_own
            self.is_own = _without(sources, former)
            on_left()

    @property
    def waiting_count(self) -> int:
        """Plans that are not through."""
        return len(self._waiting)

    @property
    def carried(self) -> CarriedFragments:
        """Own fragments that wait for a row."""
        return self._carried

    def restore_carried(self, carried: Sequence[CarriedKey], lengths: Sequence[int]) -> None:
        """Expect these fragments, which the state carried, to be fetched."""
        self._pending_carried.update(zip(carried, lengths, strict=True))

    def singles_arrived(self) -> None:
        """Pin restored carried fragments that are resident now."""
        for key in list(self._pending_carried):
            located = self._pool.locate(*key)
            if located is not None:
                length = self._pending_carried.pop(key)
                self._pool.pin_carried(located.chunk)
                self._carried.put(key, located, length)

    def add_plan(
        self,
        plan: StepPlan,
        own: npt.NDArray[np.int64] | None = None,
        exports: Sequence[Export] = (),
    ) -> None:
        """Queue a plan.

        Args:
            plan: Of the next step.
            own: Its segments of this line; None: all.
            exports: What other nodes need of this line.
        """
        self._waiting.append(_Entry(plan, own, tuple(exports)))
        self._plan_advanced(plan)

    def add_skipped(self, skipped: SkippedSteps) -> None:
        """Queue what was left out since the last plan."""
        self._waiting.append(_Entry(skipped))
        self._plan_advanced(skipped)

    def _plan_advanced(self, what: StepPlan | SkippedSteps) -> None:
        for source, block_key, index, _ in what.cursors_after():
            if source in self._loaders_of or self.is_own is None:
                self._pool.plan_advanced(source, block_key, index)

    def take(self) -> Placed | None:
        """Let skips and the next plan through where all is there; return the plan, if it is."""
        while self._waiting:
            entry = self._waiting[0]
            if self._leaving and isinstance(entry.what, StepPlan):
                self._leave_upto(entry.what.step)
            placed = self._settle(entry)
            if placed is None:
                return None
            self._waiting.popleft()
            if isinstance(entry.what, StepPlan):
                if self._leaving and not self._waiting:
                    self._leave_upto(entry.what.step + 1)
                return placed
        return None

    def missing(self) -> tuple[int, int, int] | None:
        """Return (source, block key, index) of a sample the first waiting plan still lacks."""
        if not self._waiting:
            return None
        entry = self._waiting[0]
        wanted = entry.segments()
        for export in entry.exports:
            wanted += export.segments()
        wanted += [part for part in entry.what.carried_in() if self._owns(part)]
        for segment in wanted:
            if self._locate(*segment) is None:
                return segment[:3]
        return None

    def _owns(self, key: Sequence[int]) -> bool:
        return self.is_own is None or self.is_own(key[0], key[1])

    def _locate(
        self, source: int, block_key: int, index: int, offset: int, length: int
    ) -> Located | None:
        held = self._carried.find((source, block_key, index), offset, length)
        return held or self._pool.locate(source, block_key, index, offset, length)

    def _settle(self, entry: _Entry) -> Placed | None:
        what = entry.what
        if isinstance(what, SkippedSteps) and self._pending_carried:
            return None  # what leaves has to be here first
        placed = self._place(entry)
        if placed is None:
            return None
        out, joining = self._carried_changes(what)
        if self._pending_carried and not self._pending_carried.keys().isdisjoint(out):
            return None
        found = [(part[:4], self._locate(*part), part[4]) for part in joining]
        carried_in = [(key, at, length) for key, at, length in found if at is not None]
        if len(carried_in) < len(found):
            return None
        if isinstance(what, SkippedSteps):
            if self._before_skips is None:
                self._before_skips = {key: length for key, _, length in self._carried}
        else:
            self._pin(placed)
            self._before_skips = None
        # Out before in, as a fragment may leave and come again; unpinned last, or its chunk could go.
        left = [self._carried.pop(key) for key in out]
        for key, at, length in carried_in:
            self._pool.pin_carried(at.chunk)
            self._carried.put(key, at, length)
        for place in left:
            self._pool.unpin_carried(place.chunk)
        for source, block_key, index, _ in what.cursors_after():
            for loader in self._loaders_of.get(source, ()):
                self._pool.draw_advanced(loader, block_key, index)
        return placed

    def _pin(self, placed: Placed) -> None:
        for places in (placed.places, *(it.places for it in placed.exports)):
            for chunk in dict.fromkeys(places.chunks):
                self._pool.pin_step(chunk)

    def _place(self, entry: _Entry) -> Placed | None:
        """Locate all that rows here and other nodes need; None where something is not there."""
        if isinstance(entry.what, SkippedSteps):
            return Placed(-1, None, Places([], [], []), ())
        places = self._locate_all(entry.segments())
        if places is None:
            return None
        exported = []
        for export in entry.exports:
            given = self._locate_all(export.segments())
            if given is None:
                return None
            exported.append(PlacedExport(export, given))
        return Placed(entry.what.step, entry.own, places, tuple(exported))

    def _carried_changes(
        self, what: StepPlan | SkippedSteps
    ) -> tuple[list[CarriedKey], list[Segment]]:
        """Return the own fragments that leave the carried ones, and those that join.

        Behind a skip both are told from the last served step on, so what skipped steps did already is
        left out.
        """
        told_out, told_in = what.carried_out(), what.carried_in()
        if self.is_own is not None:
            told_out = [key for key in told_out if self._owns(key)]
            told_in = [part for part in told_in if self._owns(part)]
        if self._before_skips is None:
            return told_out, told_in
        wanted = dict(self._before_skips)
        for key in told_out:
            del wanted[key]
        wanted |= {fragment[:4]: fragment[4] for fragment in told_in}
        held = {key: length for key, _, length in self._carried}
        out = [key for key, length in held.items() if wanted.get(key) != length]
        joining = [(*key, length) for key, length in wanted.items() if held.get(key) != length]
        return out, joining

    def _locate_all(self, segments: list[Segment]) -> Places | None:
        """Return where every segment lies; None where one is not there."""
        chunks: list[Chunk] = []
        samples: list[int] = []
        bases: list[int] = []
        near = self._near
        has_record = self._carried.has_record if self._carried else None
        for segment in segments:
            # Carried fragments first: they may lie elsewhere now. They are few.
            is_held = has_record is not None and has_record(segment[:3])
            held = self._locate(*segment) if is_held else None
            if held is not None:
                chunk, sample, base, _ = held
            else:
                source, block_key, index, _, _ = segment
                # A source's records are drawn in order: mostly from the chunk of the one before.
                last = near.get(source)
                if (
                    last is None
                    or last.block_key != block_key
                    or last.is_gone
                    or not 0 <= index - last.first_index < last.records
                ):
                    last = self._pool.find_chunk(source, block_key, index)
                if last is None:
                    return None
                near[source] = last
                chunk, sample, base = last, index - last.first_index, 0
            chunks.append(chunk)
            samples.append(sample)
            bases.append(base)
        return Places(chunks, samples, bases)


def _without(
    sources: frozenset[int], is_own: Callable[[int, int], bool] | None
) -> Callable[[int, int], bool]:
    """Return what tells own records once some sources left."""
    return lambda source, block_key: (
        source not in sources and (is_own is None or is_own(source, block_key))
    )


def segments_of(plan: StepPlan, own: npt.NDArray[np.int64] | None = None) -> list[Segment]:
    """Return (source, block key, index, offset, length) of a plan's segments, or of some of them."""
    columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
    if own is not None:
        columns = tuple(column[own] for column in columns)  # type: ignore[assignment]
    return list(zip(*(column.tolist() for column in columns), strict=True))
