"""How many loader workers read a job's sources on a node, and which of them reads what. Pure.

The load of a source is how much of a worker its records take: tokens a second x share of the
mixture x cost of a token. It is followed as a moving average, and looked up ahead in the schedule,
so that loaders are there before weights move. A source is split where it is more than a worker can
do, light ones share workers, partitions move from the worker that has most to the one that has
least. All is integer arithmetic in thousandths of a worker; ties by source, then by worker.

What is done once is let be for a while (cool-down), and undone only where the need is well below
(hysteresis). A source whose loaders wait for a disk or a network reads more blocks ahead before it is
split: waiting takes no CPU.

What is measured is bounded by the loaders that a source has. Where ranks wait for one whose loaders are
busy all the time it is split further whatever its load, and it is not narrowed while they wait, nor
before enough was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WORKER = 1000
"""Load of a worker that is busy all the time."""
SECOND_NS = 1_000_000_000
DEPTH_MAX = 8
"""Blocks that a loader has fetched ahead of need, where it waits for them."""
BUSY = 700
"""A worker with no more load than this keeps nobody waiting: what it reads is ahead of need."""
LACKING = 500
"""Ranks wait for a source, and its loaders are busy, for so much of the time, by thousandths: split it."""
SAMPLES_KNOWN = 8
"""A cost of fewer is no reason to move anything."""


@dataclass(frozen=True)
class ScalingRule:
    """What the scaler may do."""

    workers_min: int
    workers_max: int
    """By the node's CPU and memory budget."""
    average_ns: int = 4 * SECOND_NS
    """Time constant of the moving average."""
    move_again_ns: int = 2 * SECOND_NS
    """A source is not dealt anew for so long, unless a worker has more than it can do."""
    shrink_ns: int = 10 * SECOND_NS
    """So long a source needs less before it gets less, and keeps what is open though it has no share."""
    measure_ns: int = 5 * SECOND_NS
    """So long a source is measured before it gets less than it began with."""
    leave_ns: int = 30 * SECOND_NS
    """So long a worker is too many before it goes."""
    room_permille: int = 1250
    """Of what is needed so much is given."""
    moves_max: int = 16
    """Sources that are dealt anew at once."""


@dataclass(frozen=True)
class SourceView:
    """A source of this node as it stands."""

    work: int
    """Load by CPU and the user's code at the present share; thousandths of a worker."""
    wait: int
    """The same of waiting for reads."""
    work_ahead: int
    """The largest load within the look-ahead."""
    wait_ahead: int
    workers: tuple[int, ...]
    """Of its partitions; empty where it is not open."""
    partitions_max: int
    """A streamed source has no more than lanes."""
    pinned: int | None = None
    """Partitions that an operator asked for."""
    pinned_to: tuple[int, ...] = ()
    """And the workers that they named, where they did."""
    is_parked: bool = False
    depth: int = 0
    """Blocks that its loaders fetch ahead of need."""
    is_known: bool = True
    """False: its cost was not measured yet."""
    is_measured: bool = True
    """False: this run has not seen enough of it, nor of the ranks' pace; its load says little."""
    is_waited_for: bool = False
    """Ranks wait for records of it."""
    is_busy: bool = False
    """All its loaders have something to answer."""


class Deal(NamedTuple):
    """A source is read by these workers, a partition each."""

    source: int
    workers: tuple[int, ...]
    reason: str


class Depth(NamedTuple):
    """The loaders of a source fetch so many blocks ahead of need."""

    source: int
    blocks: int
    reason: str


@dataclass(frozen=True)
class Decision:
    """What is to be done now."""

    workers: int
    """How many are wanted."""
    workers_reason: str
    deals: tuple[Deal, ...] = ()
    depths: tuple[Depth, ...] = ()
    parked: tuple[int, ...] = ()
    """Sources that are to keep nothing open."""


@dataclass
class _Known:
    """What is remembered of a source."""

    work: int = 0
    wait: int = 0
    lack: int = 0
    """Part of the time that ranks wait for it and its loaders are busy; thousandths."""
    measured_since_ns: int | None = None
    dealt_ns: int = 0
    low_since_ns: int | None = None
    idle_since_ns: int | None = None


@dataclass
class Scaling:
    """Decides again and again; knows what it decided before."""

    rule: ScalingRule
    sources: int
    _known: list[_Known] = field(init=False)
    _looked_ns: int | None = None
    _many_since_ns: int | None = None

    def __post_init__(self) -> None:
        self._known = [_Known() for _ in range(self.sources)]

    def needs(self) -> list[int]:
        """Return the averaged load of each source, waiting included."""
        return [known.work + known.wait for known in self._known]

    def decide(
        self, views: Sequence[SourceView], *, workers: int, is_hungry: bool, now_ns: int
    ) -> Decision:
        """Return what to do.

        Args:
            views: Of all sources of the job, by number; those that others load have no worker.
            workers: Loader workers that are ready.
            is_hungry: Ranks wait for what loaders have yet to read.
            now_ns: Of any clock that does not go back.
        """
        self._follow(views, now_ns)
        depths = tuple(self._depths(views))
        needs = [
            _need(known, view) if view.workers else 0
            for known, view in zip(self._known, views, strict=True)
        ]
        parked = tuple(self._idle(views, needs, now_ns))
        wanted, reason = self._workers_wanted(views, needs, workers, is_hungry, now_ns)
        usable = min(workers, wanted)
        counts = self._partitions(views, needs, usable, now_ns)
        deals = self._place(views, needs, counts, usable, now_ns)
        for deal in deals:
            self._known[deal.source].dealt_ns = now_ns
            self._known[deal.source].lack = 0
        return Decision(wanted, reason, tuple(deals), depths, parked)

    def refused(self, source: int) -> None:
        """A deal could not be carried out: it may be tried again at once."""
        self._known[source].dealt_ns = 0

    # -- what is needed --------------------------------------------------------------------------

    def _follow(self, views: Sequence[SourceView], now_ns: int) -> None:
        """Move the averages on. The first look takes loads as they are."""
        rule, is_first = self.rule, self._looked_ns is None
        passed = rule.average_ns
        if self._looked_ns is not None:
            passed = min(max(now_ns - self._looked_ns, 0), rule.average_ns)
        self._looked_ns = now_ns
        for known, view in zip(self._known, views, strict=True):
            known.work += (view.work - known.work) * passed // rule.average_ns
            known.wait += (view.wait - known.wait) * passed // rule.average_ns
            lack = 1000 if view.is_waited_for and view.is_busy and not is_first else 0
            known.lack += (lack - known.lack) * passed // rule.average_ns
            if not view.is_measured:
                known.measured_since_ns = None
            elif known.measured_since_ns is None:
                known.measured_since_ns = now_ns

    def _depths(self, views: Sequence[SourceView]) -> list[Depth]:
        """Return whose loaders are to fetch more ahead: those that wait longer than they work."""
        found = []
        for source, (known, view) in enumerate(zip(self._known, views, strict=True)):
            if not view.workers or not view.is_known:
                continue
            if known.wait > known.work and known.wait >= WORKER // 20:
                blocks = min(max(2 * view.depth, 1), DEPTH_MAX)
            elif view.depth and not known.work and not known.wait:
                blocks = 0
            else:
                continue
            if blocks != view.depth:
                share = 100 * known.wait // max(known.wait + known.work, 1)
                why = f"its loaders wait for reads {share} % of their time"
                found.append(Depth(source, blocks, why if blocks else "it has no share"))
        return found

    def _idle(self, views: Sequence[SourceView], needs: Sequence[int], now_ns: int) -> list[int]:
        """Return the sources that had nothing to do long enough, and will not have soon."""
        found = []
        for source, (known, view) in enumerate(zip(self._known, views, strict=True)):
            is_idle = view.workers and not view.work and not view.work_ahead and not needs[source]
            if not is_idle or view.is_parked or not view.is_known:
                known.idle_since_ns = None
            elif known.idle_since_ns is None:
                known.idle_since_ns = now_ns
            elif now_ns - known.idle_since_ns >= self.rule.shrink_ns:
                found.append(source)
        return found

    def _workers_wanted(
        self,
        views: Sequence[SourceView],
        needs: Sequence[int],
        workers: int,
        is_hungry: bool,
        now_ns: int,
    ) -> tuple[int, str]:
        rule, total = self.rule, sum(needs)
        if workers > rule.workers_max:
            self._many_since_ns = None
            return rule.workers_max, f"no more than {rule.workers_max} are allowed"
        pinned = [view.pinned for view in views if view.pinned is not None and view.workers]
        low = min(max([rule.workers_min, *pinned]), rule.workers_max)
        wanted = min(max(_rooms(total, rule.room_permille), low), rule.workers_max)
        if is_hungry and total * rule.room_permille >= workers * WORKER * 1000:
            # What they would take, were it there, is not known.
            wanted = min(max(wanted, workers + workers // 2 + 1), rule.workers_max)
        elif any(
            _is_lacking(known, view) and workers <= len(view.workers) < view.partitions_max
            for known, view in zip(self._known, views, strict=True)
        ):
            wanted = min(max(wanted, workers + workers // 2 + 1), rule.workers_max)
        if wanted >= workers:
            self._many_since_ns = None
            return wanted, f"a load of {_shown(total)} workers" + (", ranks wait" * is_hungry)
        is_well_below = 3 * total < 2 * WORKER * (workers - 1)
        is_early = any(
            len(view.workers) > 1
            and not view.is_parked
            and not self._may_narrow(known, view, now_ns)
            for known, view in zip(self._known, views, strict=True)
        )
        if is_hungry or is_early or not is_well_below:
            self._many_since_ns = None
        elif self._many_since_ns is None:
            self._many_since_ns = now_ns
        elif now_ns - self._many_since_ns >= rule.leave_ns:
            self._many_since_ns = now_ns  # one after the other
            return (
                workers - 1,
                f"a load of {_shown(total)} workers for {rule.leave_ns // SECOND_NS} s",
            )
        return workers, f"a load of {_shown(total)} workers"

    # -- how it is dealt -------------------------------------------------------------------------

    def _partitions(
        self, views: Sequence[SourceView], needs: Sequence[int], workers: int, now_ns: int
    ) -> list[int]:
        """Return how many partitions each source is to have; 0 where it is not open."""
        rule, counts = self.rule, []
        for known, view, need in zip(self._known, views, needs, strict=True):
            present = len(view.workers)
            largest = max(min(view.partitions_max, workers), 1)
            if not present or not (view.is_known or view.pinned):
                known.low_since_ns = None
                counts.append(min(present, max(workers, 1)))
                continue
            if view.pinned is not None:
                known.low_since_ns = None
                counts.append(max(min(view.pinned, largest), 1))
                continue
            wanted = min(max(_rooms(need, rule.room_permille), 1), largest)
            if _is_lacking(known, view) and self._may_widen(known, now_ns):
                wanted = max(wanted, min(present + (present + 1) // 2, largest))
                counts.append(wanted if wanted > present else min(present, max(workers, 1)))
                continue
            if wanted < present and not self._may_narrow(known, view, now_ns):
                known.low_since_ns = None
                wanted = min(present, max(workers, 1))
            elif wanted < present <= largest:
                is_low = 2 * need < WORKER * (2 * present - 1) and wanted < present
                if not is_low:
                    known.low_since_ns = None
                elif known.low_since_ns is None:
                    known.low_since_ns = now_ns
                if known.low_since_ns is None or now_ns - known.low_since_ns < rule.shrink_ns:
                    wanted = present
                else:
                    known.low_since_ns = None
            else:
                known.low_since_ns = None
                if wanted > present and 10 * need <= 9 * WORKER * present:
                    wanted = present
            counts.append(wanted)
        return counts

    def _place(
        self,
        views: Sequence[SourceView],
        needs: Sequence[int],
        counts: Sequence[int],
        workers: int,
        now_ns: int,
    ) -> list[Deal]:
        board = _Board(workers)
        changed: dict[int, str] = {}
        for source, (view, count) in enumerate(zip(views, counts, strict=True)):
            load = needs[source] // max(count, 1)
            if not count:
                continue
            if view.pinned_to and max(view.pinned_to) < workers:
                board.put(source, load, view.pinned_to)
                if view.pinned_to != view.workers:
                    changed[source] = "msdctl scale named its loaders"
                continue
            if count == len(view.workers) and all(worker < workers for worker in view.workers):
                board.put(source, load, view.workers)
            else:
                is_lacking = _is_lacking(self._known[source], view)
                changed[source] = _why(view, needs[source], count, workers, is_lacking=is_lacking)
        found = [source for source in changed if source not in board.workers_of]
        for source in sorted(found, key=lambda it: (-(needs[it] // counts[it]), it)):
            kept = [worker for worker in views[source].workers if worker < workers]
            board.find(source, needs[source] // counts[source], counts[source], kept)
        self._even_out(board, views, changed, now_ns)
        deals = [
            Deal(source, tuple(board.workers_of[source]), reason)
            for source, reason in changed.items()
            if tuple(board.workers_of[source]) != views[source].workers
        ]
        return deals[: self.rule.moves_max]

    def _even_out(
        self,
        board: _Board,
        views: Sequence[SourceView],
        changed: dict[int, str],
        now_ns: int,
    ) -> None:
        """Move single partitions from the worker that has most to the one that has least."""
        mean = sum(board.loads) // len(board.loads)
        for _ in range(self.rule.moves_max):
            if len(changed) >= self.rule.moves_max:
                return
            most = max(range(len(board.loads)), key=lambda it: (board.loads[it], -it))
            least = min(range(len(board.loads)), key=lambda it: (board.loads[it], it))
            high, low = board.loads[most], board.loads[least]
            if 4 * high <= 5 * mean or high <= BUSY:
                return  # good enough, or nobody waits for it
            movable = [
                (abs(high - low - 2 * board.load_of[source]), source)
                for source in board.on(most)
                if least not in board.workers_of[source]
                and 0 < board.load_of[source] < high - low
                and views[source].is_known
                and not views[source].is_parked
                and not views[source].pinned_to
                and self._may_move(source, high, now_ns)
            ]
            if not movable:
                return
            gap, source = min(movable)
            if 10 * ((high - low) - gap) < high - low:
                return  # next to nothing is gained
            board.move(source, most, least)
            changed.setdefault(
                source,
                f"worker {most} has a load of {_shown(high)}, worker {least} of {_shown(low)}",
            )

    def _may_widen(self, known: _Known, now_ns: int) -> bool:
        return not known.dealt_ns or now_ns - known.dealt_ns >= self.rule.move_again_ns

    def _may_narrow(self, known: _Known, view: SourceView, now_ns: int) -> bool:
        """Return True where nobody waits for a source and enough was seen of it."""
        since_ns = known.measured_since_ns
        if view.is_waited_for or since_ns is None:
            return False
        return now_ns - since_ns >= self.rule.measure_ns

    def _may_move(self, source: int, high: int, now_ns: int) -> bool:
        known = self._known[source]
        wait_ns = self.rule.move_again_ns if high > WORKER else self.rule.shrink_ns
        return not known.dealt_ns or now_ns - known.dealt_ns >= wait_ns


class _Board:
    """Partitions on workers."""

    def __init__(self, workers: int) -> None:
        self.loads = [0] * workers
        self.counts = [0] * workers
        self.workers_of: dict[int, list[int]] = {}
        self.load_of: dict[int, int] = {}
        """Of one partition of a source."""

    def put(self, source: int, load: int, workers: Sequence[int]) -> None:
        self.workers_of[source], self.load_of[source] = list(workers), load
        for worker in workers:
            self.loads[worker] += load
            self.counts[worker] += 1

    def find(self, source: int, load: int, count: int, kept: Sequence[int]) -> None:
        """Put partitions on the workers that have least, where it is equal on those they were on."""
        chosen: list[int] = []
        for _ in range(count):
            free = [worker for worker in range(len(self.loads)) if worker not in chosen]
            chosen.append(
                min(free, key=lambda it: (self.loads[it], it not in kept, self.counts[it], it))
            )
        self.put(source, load, chosen)

    def on(self, worker: int) -> list[int]:
        return [source for source, workers in self.workers_of.items() if worker in workers]

    def move(self, source: int, before: int, after: int) -> None:
        workers, load = self.workers_of[source], self.load_of[source]
        workers[workers.index(before)] = after
        self.loads[before] -= load
        self.loads[after] += load
        self.counts[before] -= 1
        self.counts[after] += 1


def _need(known: _Known, view: SourceView) -> int:
    """Return the load that a source is given workers for.

    Waiting counts as far as fetching ahead leaves it: with all blocks ahead a loader waits an eighth.
    """
    work = max(known.work, view.work_ahead)
    wait = max(known.wait, view.wait_ahead)
    if wait > work:
        wait = wait * max(view.depth, 1) // DEPTH_MAX
    return work + wait


def _is_lacking(known: _Known, view: SourceView) -> bool:
    """Return True where ranks wait for a source that only further loaders can read faster."""
    can_fetch_ahead = known.wait > known.work and view.depth < DEPTH_MAX
    return (
        known.lack >= LACKING
        and view.is_known
        and view.pinned is None
        and not view.is_parked
        and not can_fetch_ahead
    )


def _rooms(load: int, room_permille: int) -> int:
    """Return the workers that a load needs, with room."""
    return -(-load * room_permille // (1000 * WORKER))


def _shown(load: int) -> str:
    return f"{load / WORKER:.2f}"


def _why(view: SourceView, need: int, count: int, workers: int, *, is_lacking: bool) -> str:
    if view.pinned is not None:
        return f"msdctl scale asked for {view.pinned} partitions"
    if any(worker >= workers for worker in view.workers) and count == len(view.workers):
        return f"{workers} workers are enough"
    if is_lacking and count > len(view.workers):
        return f"ranks wait for it and its loaders are busy: a load of {_shown(need)} workers"
    if view.work_ahead + view.wait_ahead > view.work + view.wait and count > len(view.workers):
        return f"its share grows soon: a load of {_shown(need)} workers"
    return f"a load of {_shown(need)} workers"
