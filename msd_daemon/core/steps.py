"""Planned steps on their way to the ring: resident -> built -> published -> released.

Takes plans in order, finds where their samples lie in the pool, keeps those chunks pinned, and says
which microbatch may be built next, in every ring in sequence order. Pure.

A step has as many microbatches as its plan says (`rows` may grow while training), so sequences are
dealt out as plans arrive: the same ones in every ring.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.plan import StepPlan
from federation.model.skipped import SkippedSteps
from msd_daemon.core.carried import CarriedFragments, CarriedKey
from msd_daemon.core.chunk import Chunk, Located
from msd_daemon.core.encoding import StepEncoding
from msd_daemon.core.pool import PoolState
from msd_daemon.core.slots import Publication, RingState
from msd_daemon.gather.group_column import encode_groups
from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.shm.media_layout import MediaSize

_ANY_STEP = 1 << 62


class BuildOrder(NamedTuple):
    """Effect: a constructor fills this slot."""

    ring: int
    slot: int
    sequence: int
    step: int
    plan_step: int
    microbatch: int
    valid_tokens: int
    segments: int
    row_tokens: int
    columns: bytes
    """Segment columns as they travel (SegmentColumns.encode), the group of each where the job has
    groups, and EncodeColumns where there are modalities."""
    modalities: int
    """Those whose media this microbatch's ranks may encode for others; 0 = none."""


@dataclass(eq=False)
class _Step:
    plan: StepPlan
    first_sequence: int
    columns: SegmentColumns
    """All segments, sorted by (group, microbatch, row in microbatch, column)."""
    bounds: list[int]
    """First segment of each (group, microbatch), and the end: groups * microbatches + 1."""
    valid_tokens: list[int]
    """Of each (group, microbatch)."""
    chunks: list[Chunk]
    fills_left: int
    releases_left: int
    encoding: StepEncoding | None
    group_begins: npt.NDArray[np.bool_] | None
    """Of all segments, sorted as `columns`; None in jobs without groups."""
    is_announced: bool = False


class RingOfGroup(NamedTuple):
    """A ring and the DP group whose rows go through it."""

    group: int
    state: RingState
    has_media: bool = True
    """False for pipeline stages that encode nothing."""


@dataclass(frozen=True)
class StepsStatistics:
    """Frozen snapshot."""

    waiting_count: int
    resident_count: int
    next_step: int
    released_step: int


@dataclass
class CopyWish:
    """A carried fragment whose chunk is kept by carried fragments alone."""

    key: CarriedKey
    located: Located
    length: int

    @property
    def first_token(self) -> int:
        """First token of the fragment in the record where it lies."""
        return self.key[3] - self.located.base_tokens

    @property
    def media_sizes(self) -> tuple[MediaSize, ...]:
        """What its items take of each media rule; none where its chunk has no item."""
        media = self.located.chunk.media
        if media is None:
            return ()
        return media.sizes(self.located.sample, self.first_token, self.length)

    @property
    def is_worth_it(self) -> bool:
        """True where the chunk is much larger than the fragment."""
        chunk = self.located.chunk
        large_bytes = 16 * self.length + 8192
        if chunk.media is not None and chunk.used_bytes > large_bytes:
            own_bytes = chunk.media.part_bytes(self.located.sample, self.first_token, self.length)
            large_bytes += own_bytes + own_bytes // 4
        return chunk.used_bytes > large_bytes


class StepsState:
    """The steps of one generation."""

    def __init__(
        self,
        pool: PoolState,
        *,
        first_step: int,
        microbatch_rows: int,
        rings: dict[int, RingOfGroup],
        loaders_of: dict[int, list[int]],
    ) -> None:
        self._pool = pool
        self._first_step = first_step
        self._microbatch_rows = microbatch_rows
        self._rings = rings
        self._starts: deque[tuple[int, int]] = deque()
        """(first sequence, step) of the steps that are not released, ascending."""
        self._sequences = 0
        self._loaders_of = loaders_of
        """Source loaders of each source; the caller extends it when sources open."""
        self._waiting: deque[StepPlan | SkippedSteps] = deque()
        self._resident: dict[int, _Step] = {}
        self._near: dict[int, Chunk] = {}
        """Chunk of the last located record of each source."""
        self._carried = CarriedFragments()
        self._before_skips: dict[CarriedKey, int] | None = None
        """While steps are left out: what was carried behind the last served one, with its tokens."""
        self._skipped_upto = -1
        """Plan step up to which skipped steps were told."""
        self._pending_carried: dict[CarriedKey, int] = {}
        """Carried since before this generation: fetched, not yet here. Value: length."""
        self._next_resident = first_step
        self._released = first_step - 1

    @property
    def first_step(self) -> int:
        """First step of the generation."""
        return self._first_step

    @property
    def released_step(self) -> int:
        """Last step that every rank released, first_step - 1 before any."""
        return self._released

    @property
    def sequences(self) -> int:
        """Microbatches of all steps that were planned in this generation, of one ring."""
        return self._sequences

    def restore_carried(self, carried: list[CarriedKey], lengths: list[int]) -> None:
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

    def plan_arrived(self, plan: StepPlan) -> int:
        """Queue a plan, return the sequence of its first microbatch; call `settle_waiting` next."""
        self._waiting.append(plan)
        first = self._sequences
        self._starts.append((first, plan.step))
        self._sequences += plan.microbatch_count
        for source, block_key, index, _ in plan.cursors_after():
            self._pool.plan_advanced(source, block_key, index)
        return first

    def steps_skipped(self, skipped: SkippedSteps) -> None:
        """Queue what was left out since the last plan; call `settle_waiting` next.

        A planner that takes over tells it again: what is known already is passed over.
        """
        if skipped.plan_step <= self._skipped_upto:
            return
        self._skipped_upto = skipped.plan_step
        self._waiting.append(skipped)
        for source, block_key, index, _ in skipped.cursors_after():
            self._pool.plan_advanced(source, block_key, index)

    def settle_waiting(self) -> bool:
        """Make waiting plans resident whose samples are all in the pool; True where one became so."""
        is_changed = False
        while self._waiting and self._settle(self._waiting[0]):
            self._waiting.popleft()
            is_changed = True
        return is_changed

    def missing(self) -> tuple[int, int, int] | None:
        """Return (source, block key, index) of a sample the first waiting plan still lacks."""
        if not self._waiting:
            return None
        plan = self._waiting[0]
        placed = [] if isinstance(plan, SkippedSteps) else _segments(plan)
        for source, block_key, index, offset, length in [*placed, *plan.carried_in()]:
            if self._locate(source, block_key, index, offset, length) is None:
                return source, block_key, index
        return None

    def _locate(
        self, source: int, block_key: int, index: int, offset: int, length: int
    ) -> Located | None:
        held = self._carried.find((source, block_key, index), offset, length)
        return held or self._pool.locate(source, block_key, index, offset, length)

    def _settle(self, plan: StepPlan | SkippedSteps) -> bool:
        located = None
        if not isinstance(plan, SkippedSteps):
            located = self._locate_all(plan)
            if located is None:
                return False
        elif self._pending_carried:
            return False  # what leaves has to be here first
        out, joining = self._carried_changes(plan)
        if self._pending_carried and not self._pending_carried.keys().isdisjoint(out):
            return False
        carried_in = [(part[:4], self._locate(*part), part[4]) for part in joining]
        if any(found is None for _, found, _ in carried_in):
            return False
        if isinstance(plan, SkippedSteps):
            if self._before_skips is None:
                self._before_skips = {key: length for key, _, length in self._carried}
        else:
            assert located is not None
            self._make_resident(plan, *located)
            self._before_skips = None
        # Out before in, as a fragment may leave and come again; unpinned last, or its chunk could go.
        left = [self._carried.pop(key) for key in out]
        for key, found, length in carried_in:
            assert found is not None
            self._pool.pin_carried(found.chunk)
            self._carried.put(key, found, length)
        for place in left:
            self._pool.unpin_carried(place.chunk)
        for source, block_key, index, _ in plan.cursors_after():
            for loader in self._loaders_of.get(source, ()):
                self._pool.draw_advanced(loader, block_key, index)
        return True

    def _carried_changes(
        self, plan: StepPlan | SkippedSteps
    ) -> tuple[list[CarriedKey], list[tuple[int, int, int, int, int]]]:
        """Return the fragments that leave the carried ones, and those that join.

        Behind a skip both are told from the last served step on, so what skipped steps did already is
        left out.
        """
        if self._before_skips is None:
            return plan.carried_out(), plan.carried_in()
        wanted = dict(self._before_skips)
        for key in plan.carried_out():
            del wanted[key]
        wanted |= {fragment[:4]: fragment[4] for fragment in plan.carried_in()}
        held = {key: length for key, _, length in self._carried}
        out = [key for key, length in held.items() if wanted.get(key) != length]
        joining = [(*key, length) for key, length in wanted.items() if held.get(key) != length]
        return out, joining

    def _locate_all(self, plan: StepPlan) -> tuple[list[Chunk], list[int], list[int]] | None:
        """Return chunk, record number and base of every segment; None where one is not there."""
        chunks: list[Chunk] = []
        samples: list[int] = []
        bases: list[int] = []
        near = self._near
        has_record = self._carried.has_record if self._carried else None
        for segment in _segments(plan):
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
        return chunks, samples, bases

    def _make_resident(
        self, plan: StepPlan, located: list[Chunk], sample: list[int], base: list[int]
    ) -> None:
        chunks = list(dict.fromkeys(located))
        for chunk in chunks:
            self._pool.pin_step(chunk)
        rows = plan.row
        microbatches = plan.microbatch_count
        cells = (plan.row_dp * microbatches + plan.row_microbatch).astype(np.int64)
        place = (cells * self._microbatch_rows + plan.row_slot)[rows]
        # Segments are sorted by (row, column): a stable sort by place keeps columns in order.
        order = np.argsort(place, kind="stable")
        columns = SegmentColumns(
            chunk_offset=np.array([chunk.piece[0] for chunk in located], np.int64)[order],
            sample=np.array(sample, np.int32)[order],
            sample_offset=(plan.offset - np.array(base, np.int32))[order],
            length=plan.length[order],
            row=plan.row_slot[rows][order],
            column=plan.column[order],
            source=plan.source[order],
        )
        cells_count = plan.dp_count * microbatches
        bounds = np.searchsorted(cells[rows][order], np.arange(cells_count + 1))
        slots_count = len(self._rings) * microbatches
        self._resident[plan.step] = _Step(
            plan,
            self._first_sequence(plan.step),
            columns,
            bounds.tolist(),
            plan.row_valid_tokens_by_cell(cells, cells_count).tolist(),
            chunks,
            fills_left=slots_count,
            releases_left=slots_count,
            encoding=StepEncoding.of(plan, columns, order, self._microbatch_rows),
            group_begins=None if plan.group_begins is None else plan.group_begins[order],
        )
        self._next_resident = plan.step + 1

    def next_builds(self, constructor: int, room: int) -> list[BuildOrder]:
        """Take free slots for up to `room` microbatches, the lowest sequences first."""
        orders: list[BuildOrder] = []
        while len(orders) < room:
            candidates = [
                (ring.state.next_fill, number)
                for number, ring in self._rings.items()
                if self._is_resident(ring.state.next_fill) and ring.state.has_free()
            ]
            if not candidates:
                break
            _, number = min(candidates)
            orders.append(self._begin(number, constructor))
        return orders

    def _begin(self, number: int, constructor: int) -> BuildOrder:
        ring = self._rings[number]
        slot, sequence = ring.state.begin_fill(constructor)
        step = self._step(sequence)
        plan = step.plan
        microbatch = sequence - step.first_sequence
        cell = ring.group * plan.microbatch_count + microbatch
        start, end = step.bounds[cell], step.bounds[cell + 1]
        columns, modalities = step.columns.encode_part(start, end), 0
        if step.group_begins is not None:
            columns += encode_groups(step.group_begins[start:end])
        if step.encoding is not None and ring.has_media:
            columns += step.encoding.encode_cell(cell, start, end)
            modalities = len(step.encoding.columns)
        return BuildOrder(
            number, slot, sequence, plan.step, plan.plan_step, microbatch,
            step.valid_tokens[cell], end - start, plan.row_tokens, columns, modalities,
        )  # fmt: skip

    def _is_resident(self, sequence: int) -> bool:
        return sequence < self._sequences and self._step_of(sequence) in self._resident

    def _step(self, sequence: int) -> _Step:
        return self._resident[self._step_of(sequence)]

    def _step_of(self, sequence: int) -> int:
        """Return the step of a sequence that is planned and not released by all."""
        place = bisect.bisect_right(self._starts, (sequence, _ANY_STEP)) - 1
        return self._starts[place][1]

    def _first_sequence(self, step: int) -> int:
        return self._starts[step - self._starts[0][1]][0]

    def filled(
        self, ring: int, slot: int, sequence: int, payload_bytes: int, now_ns: int
    ) -> list[Publication]:
        """Take a filled slot of a ring; return what to publish, in order."""
        publications = self._rings[ring].state.fill_ended(slot, sequence, payload_bytes, now_ns)
        step = self._step(sequence)
        step.fills_left -= 1
        if step.fills_left == 0:
            for chunk in step.chunks:
                self._pool.unpin_step(chunk)
            step.chunks = []
        return publications

    def slot_freed(self, sequences: list[int]) -> int | None:
        """Count freed slots; return the newest step that all rings released, if it moved."""
        for sequence in sequences:
            self._step(sequence).releases_left -= 1
        before = self._released
        while (step := self._resident.get(self._released + 1)) is not None:
            if step.releases_left or step.fills_left:
                break
            self._released += 1
            del self._resident[self._released]
            self._starts.popleft()
        return self._released if self._released != before else None

    def copy_wishes(self, limit: int) -> list[CopyWish]:
        """Return carried fragments that alone keep a chunk much larger than themselves."""
        wishes: list[CopyWish] = []
        for key, located, length in self._carried:
            chunk = located.chunk
            if len(wishes) >= limit:
                break
            if chunk.is_drawn and not chunk.step_pins:
                wish = CopyWish(key, located, length)
                if wish.is_worth_it:
                    wishes.append(wish)
        return wishes

    def is_carried(self, key: CarriedKey) -> bool:
        """Return True while a fragment waits for a row."""
        return key in self._carried

    def copied(self, key: CarriedKey, located: Located) -> None:
        """A carried fragment lies elsewhere now."""
        self._carried.move(key, located)

    def statistics(self) -> StepsStatistics:
        """Return a frozen snapshot."""
        return StepsStatistics(
            len(self._waiting), len(self._resident), self._next_resident, self._released
        )


def _segments(plan: StepPlan) -> list[tuple[int, int, int, int, int]]:
    """Return (source, block key, index, offset, length) of every segment."""
    return list(
        zip(
            plan.source.tolist(),
            plan.block_key.tolist(),
            plan.index.tolist(),
            plan.offset.tolist(),
            plan.length.tolist(),
            strict=True,
        )
    )
