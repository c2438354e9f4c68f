"""Planned steps on their way to the ring: resident -> built -> published -> released.

Takes plans in order, finds where their samples lie in the pool, keeps those chunks pinned, and says
which microbatch may be built next, in every ring in sequence order. Pure.

A step has as many microbatches as its plan says (`rows` may grow while training), so sequences are
dealt out as plans arrive: the same ones in every ring.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.exports import Export
from federation.model.plan import StepPlan
from federation.model.skipped import SkippedSteps
from msd_client.contract.errors import InternalError
from msd_daemon.core.allocator import Piece
from msd_daemon.core.carried import CarriedKey
from msd_daemon.core.chunk import Chunk, Located
from msd_daemon.core.drawn_line import DrawnLine, Placed, Places, Segment, segments_of
from msd_daemon.core.encoding import StepEncoding
from msd_daemon.core.pool import PoolState
from msd_daemon.core.shared_steps import Moved, SharedSteps
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


@dataclass(eq=False)
class _Assembly:
    """A plan on its way to be resident."""

    plan: StepPlan
    unlocated: int
    """Segments of which it is not known where they lie."""
    chunks: list[Chunk] = field(default_factory=list)
    """What has a step pin for it."""
    places: Places = field(default_factory=lambda: Places([], [], []))

    def put(self, own: npt.NDArray[np.int64] | None, places: Places) -> None:
        """Take where own segments lie; None: those are all."""
        self.chunks += dict.fromkeys(places.chunks)
        if own is None:
            self.places, self.unlocated = places, 0
        else:
            self._fill(own.tolist(), places)

    def take(self, found: Mapping[Segment, tuple[Chunk, int, int]]) -> None:
        """Take where fragments that came lie, those of them that it lacks."""
        segments = self.missing().tolist()
        wanted = segments_of(self.plan, np.array(segments, np.int64))
        here = [
            (number, found[part])
            for number, part in zip(segments, wanted, strict=True)
            if part in found
        ]
        places = Places(
            [at[0] for _, at in here], [at[1] for _, at in here], [at[2] for _, at in here]
        )
        self._fill([number for number, _ in here], places)

    def missing(self) -> npt.NDArray[np.int64]:
        """Return the segments that are not located."""
        if not self.places.chunks:
            return np.arange(len(self.plan.source))
        return np.array(
            [number for number, at in enumerate(self.places.chunks) if at is _NOWHERE], np.int64
        )

    def _fill(self, segments: Sequence[int], places: Places) -> None:
        if not self.places.chunks and len(self.plan.source):
            count = len(self.plan.source)
            self.places = Places([_NOWHERE] * count, [0] * count, [0] * count)
        for number, segment in enumerate(segments):
            if self.places.chunks[segment] is _NOWHERE:
                self.places.chunks[segment] = places.chunks[number]
                self.places.samples[segment] = places.samples[number]
                self.places.bases[segment] = places.bases[number]
                self.unlocated -= 1


@dataclass(eq=False)
class _Line:
    """Own records by the change that made them own."""

    line: DrawnLine
    issue: int = 0
    next_step: int = 0
    """Of the plan that it takes next."""


_NOWHERE = Chunk(Piece(0, 0), -1, -1, -1, -1, 0, 0)
"""Where segments lie that are not located yet."""


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
        shared: SharedSteps | None = None,
    ) -> None:
        """Begin with no step.

        Args:
            pool: Where records lie.
            first_step: Of the generation.
            microbatch_rows: Rows of a microbatch.
            rings: Of the ranks here, by number.
            loaders_of: Source loaders of each source; the caller extends it when sources open.
            shared: In a cluster: what other nodes give and get.
        """
        self._pool = pool
        self._first_step = first_step
        self._microbatch_rows = microbatch_rows
        self._rings = rings
        self._starts: deque[tuple[int, int]] = deque()
        """(first sequence, step) of the steps that are not released, ascending."""
        self._sequences = 0
        self._shared = shared
        self._lines = [
            _Line(DrawnLine(pool, loaders_of, None if shared is None else shared.own_of_issue(0)))
        ]
        self._assembling: dict[int, _Assembly] = {}
        """Plans of which something is not located yet, by step."""
        self._resident: dict[int, _Step] = {}
        self._skipped_upto = -1
        """Plan step up to which skipped steps were told."""
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

    def restore_carried(
        self, carried: list[CarriedKey], lengths: list[int], issue: int = 0
    ) -> None:
        """Expect these fragments, which the state carried, to be fetched."""
        line = next(own.line for own in self._lines if own.issue == issue)
        line.restore_carried(carried, lengths)

    def singles_arrived(self) -> None:
        """Pin restored carried fragments that are resident now."""
        for own in self._lines:
            own.line.singles_arrived()

    def plan_arrived(self, plan: StepPlan, exports: Sequence[Export] = ()) -> int:
        """Queue a plan, return the sequence of its first microbatch; call `settle_waiting` next.

        Args:
            plan: The next step, or this node's part of it.
            exports: What other nodes need of records here.
        """
        self._assembling[plan.step] = _Assembly(plan, len(plan.source))
        if self._shared is None:
            self._lines[0].line.add_plan(plan)
        else:
            self._give_to_lines(plan, exports, self._lines)
            self._shared.want(plan)
        first = self._sequences
        self._starts.append((first, plan.step))
        self._sequences += plan.microbatch_count
        return first

    def _give_to_lines(
        self, plan: StepPlan, exports: Sequence[Export], lines: Sequence[_Line]
    ) -> None:
        assert self._shared is not None
        segments = self._shared.own_segments(plan)
        if plan.step not in self._assembling:
            segments = {}  # all of its rows' samples are here, or were
        given = self._shared.exports_by_issue(plan.step, exports)
        nothing = np.zeros(0, np.int64)
        for own in lines:
            own.line.add_plan(plan, segments.get(own.issue, nothing), given.get(own.issue, ()))
            own.next_step = plan.step + 1

    def steps_skipped(self, skipped: SkippedSteps) -> None:
        """Queue what was left out since the last plan; call `settle_waiting` next.

        A planner that takes over tells it again: what is known already is passed over.
        """
        if skipped.plan_step <= self._skipped_upto:
            return
        self._skipped_upto = skipped.plan_step
        for own in self._lines:
            own.line.add_skipped(skipped)

    def settle_waiting(self) -> bool:
        """Make waiting plans resident whose samples are all in the pool; True where one moved."""
        waiting = sum(own.line.waiting_count for own in self._lines)
        for own in self._lines:
            while (placed := own.line.take()) is not None:
                self._placed(placed, own.issue)
        return waiting != sum(own.line.waiting_count for own in self._lines)

    def _placed(self, placed: Placed, issue: int) -> None:
        if self._shared is not None:
            self._shared.offer(placed, issue)
        assembly = self._assembling.get(placed.step)
        if assembly is None:
            for chunk in dict.fromkeys(placed.places.chunks):
                self._pool.unpin_step(chunk)
            return
        assembly.put(placed.own, placed.places)
        self._settle_assembly(assembly)

    def plan_again(self, plan: StepPlan, exports: Sequence[Export]) -> None:
        """Take a plan that is known already: another planner tells it, or others load for it.

        Raises:
            InternalError: It is another one than it was.
        """
        assembly = self._assembling.get(plan.step)
        known = assembly or self._resident.get(plan.step)
        if known is not None and known.plan.stream_digest != plan.stream_digest:
            raise InternalError(
                f"step {plan.step} is planned otherwise by another planner: digest "
                f"{plan.stream_digest} instead of {known.plan.stream_digest}",
                step=plan.step,
            )
        if self._shared is None:
            return
        self._give_to_lines(
            plan, exports, [own for own in self._lines if own.next_step == plan.step]
        )
        nothing = np.zeros(0, np.int64)
        self._shared.want_again(plan, nothing if assembly is None else assembly.missing())

    def owners_changed(
        self,
        moved: Moved,
        from_step: int,
        next_step: int,
        loaders_of: dict[int, list[int]],
        on_left: Callable[[], None],
    ) -> None:
        """Let sources come and go at a step.

        Args:
            moved: What this node gains and loses.
            from_step: The first step that the new owners load for.
            next_step: The next one that was not planned yet.
            loaders_of: Source loaders of what is gained; the caller extends it when sources open.
            on_left: Called for what is lost, once nothing here needs it.
        """
        assert self._shared is not None
        if moved.lost:
            left = [own for own in self._lines if own.line.owns_any(moved.lost)]
            for own in left:
                own.line.leave(moved.lost, from_step, next_step, on_left)
        if moved.gained:
            line = DrawnLine(self._pool, loaders_of, self._shared.own_of_issue(moved.issue))
            self._lines.append(_Line(line, moved.issue, from_step))

    def parcel_came(
        self, step: int, chunks: Sequence[Chunk], found: Mapping[Segment, tuple[Chunk, int, int]]
    ) -> None:
        """Samples of another node are here.

        Args:
            step: Of the plan that they are for.
            chunks: What they lie in, each with one step pin.
            found: Chunk, record number in it and first token there, by fragment.
        """
        assembly = self._assembling.get(step)
        if assembly is None:
            for chunk in chunks:
                self._pool.unpin_step(chunk)
            return
        assembly.chunks += chunks
        assembly.take(found)
        self._settle_assembly(assembly)

    def _settle_assembly(self, assembly: _Assembly) -> None:
        if not assembly.unlocated:
            del self._assembling[assembly.plan.step]
            self._make_resident(assembly)

    def missing(self) -> tuple[int, int, int] | None:
        """Return (source, block key, index) of a sample the first waiting plan still lacks here."""
        for own in self._lines:
            found = own.line.missing()
            if found is not None:
                return found
        return None

    def _make_resident(self, assembly: _Assembly) -> None:
        plan = assembly.plan
        located, sample, base = assembly.places
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
            assembly.chunks,
            fills_left=slots_count,
            releases_left=slots_count,
            encoding=StepEncoding.of(plan, columns, order, self._microbatch_rows),
            group_begins=None if plan.group_begins is None else plan.group_begins[order],
        )
        self._next_resident = max(self._next_resident, plan.step + 1)
        if not slots_count:
            self._let_go(self._resident[plan.step])

    def _let_go(self, step: _Step) -> None:
        """No slot is filled from a step any more: its chunks may go."""
        for chunk in step.chunks:
            self._pool.unpin_step(chunk)
        step.chunks = []

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
            self._let_go(step)
        return publications

    def slot_freed(self, sequences: list[int]) -> int | None:
        """Count freed slots; return the newest step that all rings released, if it moved."""
        for sequence in sequences:
            self._step(sequence).releases_left -= 1
        before = self._released
        while (step := self._resident.get(self._released + 1)) is not None:
            if step.releases_left or step.fills_left:
                break
            if self._shared is not None and self._shared.owes(self._released + 1):
                break
            self._released += 1
            del self._resident[self._released]
            self._starts.popleft()
        if self._released == before:
            return None
        if self._shared is not None:
            self._shared.released(self._released)
        return self._released

    def copy_wishes(self, limit: int) -> list[CopyWish]:
        """Return carried fragments that alone keep a chunk much larger than themselves."""
        wishes: list[CopyWish] = []
        for key, located, length in itertools.chain.from_iterable(
            own.line.carried for own in self._lines
        ):
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
        return any(key in own.line.carried for own in self._lines)

    def copied(self, key: CarriedKey, located: Located) -> None:
        """A carried fragment lies elsewhere now."""
        next(own.line for own in self._lines if key in own.line.carried).carried.move(key, located)

    def statistics(self) -> StepsStatistics:
        """Return a frozen snapshot."""
        return StepsStatistics(
            len(self._assembling), len(self._resident), self._next_resident, self._released
        )
