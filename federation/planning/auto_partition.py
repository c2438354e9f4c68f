"""Who reads what, with how many processes: profiles, mixture and pace to a table with reasons. Pure.

A source's load is the part of a step's time that one loader would need for its share of the step;
sources above TARGET_PPM are split, parts are dealt to loader workers largest first (LPT, Graham 1969),
and workers are added until none is above TARGET_PPM or a budget ends it. What then stands above
FULL_PPM makes the trainers wait, and is named. All integers; ties by number, so that the table is the
same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal, NamedTuple

from federation.model.source_profile import SourceProfile, bound_of
from federation.planning.resource_costs import (
    FULL_PPM,
    PPM,
    TARGET_PPM,
    SourceLoad,
    SourceNeed,
    constructor_ppm,
    source_loads,
)

Stage = Literal["", "read", "decode", "transform", "build", "memory"]

BASE_BYTES = 90 << 20
"""Private memory of daemon, fork server and planner (measured: 32 parquet sources, one job)."""
WORKER_BYTES = 14 << 20
"""Private memory of a loader worker beside the open state of its sources: libraries are shared."""
CONSTRUCTOR_BYTES = 8 << 20
BESIDE_NS_PER_TOKEN = 10
"""CPU of daemon, planner and readers (DESIGN.md section 12)."""
WAIT_TARGET_PPM = 200_000
"""Of a loader's time that it may wait, once several reads run at once."""
PAIR_BOUND_PPM = 1_500_000
"""Two loaders that are no faster together than this share one bottleneck: half way between the two."""
READS_MAX = 8
"""Blocks that a loader fetches ahead of need at most (federation.planning.scaling)."""
FASTEST_STEP_NS = 1_000
SLOWEST_STEP_NS = 10**14


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


class _Part(NamedTuple):
    source: int
    ppm: int


def make_table(
    needs: Sequence[SourceNeed], pace: Pace, budgets: Budgets, unit: str = "tokens"
) -> ResourceTable:
    """Return the table of a node that loads these sources alone.

    Args:
        needs: Of all sources of the job, in its order; one at least has a share and one of those
            with a share is measured.
        pace: Of the ranks.
        budgets: Of the node.
        unit: Of the mixture: what shares are shares of.
    """
    loads = source_loads(needs, pace.step_tokens, pace.step_ns, unit)
    reads = [_reads_at_once(need, load) for need, load in zip(needs, loads, strict=True)]
    loads = [
        load._replace(wait_ppm=-(-load.wait_ppm // max(count, 1)))
        for load, count in zip(loads, reads, strict=True)
    ]
    build_ppm = constructor_ppm(pace.step_tokens, pace.payload_bytes, pace.step_ns)
    constructors = max(1, -(-build_ppm // TARGET_PPM))
    cpu_ppm = _cpu_ppm(needs, loads, pace, build_ppm)
    limit, limit_reason = _workers_limit(needs, loads, budgets, constructors)
    parts = _parts(needs, loads, limit)
    dealt = _deal_on_enough(parts, limit, budgets.workers_fixed)
    memory = _memory_bytes(needs, parts, len(dealt), constructors, budgets)
    verdict = _verdict(needs, loads, parts, dealt, budgets, (cpu_ppm, build_ppm, memory))
    homes = _homes(dealt, len(needs))
    return ResourceTable(
        pace=pace,
        sources=tuple(
            SourceRow(
                number,
                need.name,
                len(homes[number]),
                tuple(homes[number]),
                reads[number],
                need.is_critical and bool(homes[number]),
                load,
                _source_reason(need, load, homes, number),
            )
            for number, (need, load) in enumerate(zip(needs, loads, strict=True))
        ),
        workers=tuple(
            WorkerRow(
                number,
                tuple(sorted({part.source for part in own})),
                sum(part.ppm for part in own),
                _worker_reason(needs, own),
            )
            for number, own in enumerate(dealt)
        ),
        workers_reason=_workers_reason(loads, dealt, budgets, limit, limit_reason),
        constructors=constructors,
        constructors_reason=f"gathering rows takes {_percent(build_ppm)} of a CPU",
        cpu_ppm=cpu_ppm,
        memory_bytes=memory,
        memory_reason=_memory_reason(budgets, len(dealt), constructors, memory),
        verdict=verdict,
    )


def fastest_step_ns(
    needs: Sequence[SourceNeed],
    pace: Pace,
    budgets: Budgets,
    unit: str = "tokens",
    precision: int = 100,
) -> int | None:
    """Return the shortest step that trainers need not wait for; None: no step is long enough.

    By bisection, to one part in `precision`: a longer step never makes a wait out of none.
    """
    low, high = FASTEST_STEP_NS, SLOWEST_STEP_NS
    if make_table(needs, pace._replace(step_ns=high), budgets, unit).verdict.waits:
        return None
    while high - low > max(high // precision, 1):
        middle = (low + high) // 2 if high < 4 * low else isqrt(low * high)
        if make_table(needs, pace._replace(step_ns=middle), budgets, unit).verdict.waits:
            low = middle
        else:
            high = middle
    return high


# -- loads -------------------------------------------------------------------------------------------


def _reads_at_once(need: SourceNeed, load: SourceLoad) -> int:
    """Return how many reads a loader has under way: several where it waits more than it works.

    A stream is read ahead as it lies, and what gives no more to two readers gives one no more.
    """
    if not load.is_open:
        return 0
    if need.is_streaming or _is_capped(need) or load.wait_ppm <= load.cpu_ppm + load.user_ppm:
        return 1
    return min(READS_MAX, max(2, -(-load.wait_ppm // WAIT_TARGET_PPM)))


def _is_capped(need: SourceNeed) -> bool:
    """True where a second reader gets no more out of it."""
    profile = need.profile
    return profile is not None and 0 < profile.pair_ppm <= PAIR_BOUND_PPM and profile.is_read_bound


def _cpu_ppm(
    needs: Sequence[SourceNeed], loads: Sequence[SourceLoad], pace: Pace, build_ppm: int
) -> int:
    beside = pace.step_tokens * BESIDE_NS_PER_TOKEN * PPM // max(pace.step_ns, 1)
    read = sum(
        # A shadow reads all of it once more.
        (load.cpu_ppm + load.user_ppm) * (2 if need.is_critical else 1)
        for need, load in zip(needs, loads, strict=True)
    )
    return read + build_ppm + beside


# -- parts and workers -------------------------------------------------------------------------------


def _parts(needs: Sequence[SourceNeed], loads: Sequence[SourceLoad], limit: int) -> list[_Part]:
    """Return all parts, largest first."""
    found = []
    for number, (need, load) in enumerate(zip(needs, loads, strict=True)):
        if not load.is_open:
            continue
        count = _part_count(need, load, limit)
        found += [_Part(number, -(-load.busy_ppm // count))] * count
    return sorted(found, key=lambda part: (-part.ppm, part.source))


def _part_count(need: SourceNeed, load: SourceLoad, limit: int) -> int:
    if _is_capped(need):
        return 1
    wanted = max(1, -(-load.busy_ppm // TARGET_PPM))
    most = min(limit, need.lanes) if need.is_streaming else limit
    return min(wanted, max(most, 1))


def _deal_on_enough(parts: list[_Part], limit: int, fixed: int) -> list[list[_Part]]:
    """Return the parts of each worker, with as few workers as keep them within TARGET_PPM."""
    if fixed:
        return _deal(parts, fixed)
    total = sum(part.ppm for part in parts)
    most = max((parts.count(part) for part in set(parts)), default=1)
    count = min(max(most, -(-total // TARGET_PPM), 1), limit)
    while True:
        dealt = _deal(parts, count)
        heaviest = max(sum(part.ppm for part in own) for own in dealt)
        largest = parts[0].ppm if parts else 0
        # One part that is too large is no reason for more workers: it could not be split.
        if heaviest <= max(TARGET_PPM, largest) or count >= limit:
            return dealt
        count += 1


def _deal(parts: list[_Part], count: int) -> list[list[_Part]]:
    """Deal parts largest first to the worker with the least; parts of one source to different ones."""
    dealt: list[list[_Part]] = [[] for _ in range(count)]
    loads = [0] * count
    has: list[set[int]] = [set() for _ in range(count)]
    for part in parts:
        best = min(
            range(count),
            key=lambda worker: (
                part.source in has[worker],
                loads[worker],
                len(dealt[worker]),
                worker,
            ),
        )
        dealt[best].append(part)
        has[best].add(part.source)
        loads[best] += part.ppm
    return dealt


def _homes(dealt: list[list[_Part]], sources: int) -> list[list[int]]:
    homes: list[list[int]] = [[] for _ in range(sources)]
    for worker, own in enumerate(dealt):
        for part in own:
            homes[part.source].append(worker)
    return homes


def _workers_limit(
    needs: Sequence[SourceNeed], loads: Sequence[SourceLoad], budgets: Budgets, constructors: int
) -> tuple[int, str]:
    """Return the most workers that the budgets allow, and which one ends it."""
    if budgets.workers_fixed:
        return budgets.workers_fixed, "the configuration says so"
    opened = sum(_open_bytes(need) for need, load in zip(needs, loads, strict=True) if load.is_open)
    rest = (
        budgets.memory_bytes
        - budgets.shared_bytes
        - BASE_BYTES
        - constructors * CONSTRUCTOR_BYTES
        - opened
    )
    by_memory = max(rest // WORKER_BYTES, 1)
    busy = sum(load.cpu_ppm + load.user_ppm for load in loads)
    waiting = sum(load.wait_ppm for load in loads)
    # Beyond the CPUs only what waits for reads is helped by another process.
    by_cpu = max(-(-budgets.cpus_milli // 1000) + -(-waiting // TARGET_PPM) + (1 if busy else 0), 1)
    limit = min(budgets.workers_max, by_memory, by_cpu)
    if limit == by_memory < budgets.workers_max:
        return limit, "memory allows no more"
    return limit, "CPUs allow no more" if limit == by_cpu else "no more are allowed"


# -- memory ------------------------------------------------------------------------------------------


def _open_bytes(need: SourceNeed) -> int:
    return (0 if need.profile is None else need.profile.open_bytes) * (2 if need.is_critical else 1)


def _memory_bytes(
    needs: Sequence[SourceNeed],
    parts: list[_Part],
    workers: int,
    constructors: int,
    budgets: Budgets,
) -> int:
    opened = sum(_open_bytes(needs[part.source]) for part in parts)
    return (
        budgets.shared_bytes
        + BASE_BYTES
        + workers * WORKER_BYTES
        + constructors * CONSTRUCTOR_BYTES
        + opened
    )


def _memory_reason(budgets: Budgets, workers: int, constructors: int, memory: int) -> str:
    private = BASE_BYTES + workers * WORKER_BYTES + constructors * CONSTRUCTOR_BYTES
    opened = memory - private - budgets.shared_bytes
    return (
        f"pool and rings {_mib(budgets.shared_bytes)}, processes {_mib(private)}, open sources "
        f"{_mib(opened)}; budget {_mib(budgets.memory_bytes)}"
    )


# -- verdict -----------------------------------------------------------------------------------------


def _verdict(
    needs: Sequence[SourceNeed],
    loads: Sequence[SourceLoad],
    parts: list[_Part],
    dealt: list[list[_Part]],
    budgets: Budgets,
    sums: tuple[int, int, int],
) -> WaitVerdict:
    cpu_ppm, build_ppm, memory = sums
    if memory > budgets.memory_bytes:
        why = f"{_mib(memory)} are needed, the budget is {_mib(budgets.memory_bytes)}"
        return WaitVerdict(True, "", "memory", why)
    capped = [
        number
        for number, (need, load) in enumerate(zip(needs, loads, strict=True))
        if load.is_open and _is_capped(need) and load.busy_ppm > FULL_PPM
    ]
    if capped:
        worst = max(capped, key=lambda number: (loads[number].busy_ppm, -number))
        return WaitVerdict(
            True,
            needs[worst].name,
            "read",
            f"its reads take {_percent(loads[worst].busy_ppm)} of a step's time, and two readers at "
            f"once get {needs[worst].pair_factor} times what one gets",
        )
    if cpu_ppm > budgets.cpus_milli * 1000:
        return _cpu_verdict(needs, loads, cpu_ppm, build_ppm, budgets)
    heaviest = max(dealt, key=lambda own: sum(part.ppm for part in own))
    total = sum(part.ppm for part in heaviest)
    if total <= FULL_PPM:
        told = f"the busiest worker has {_percent(total)} of its time to work, all of it takes "
        told += f"{_percent(cpu_ppm)} of a CPU of {_percent(budgets.cpus_milli * 1000)}"
        return WaitVerdict(False, "", "", told)
    worst = max(heaviest, key=lambda part: (part.ppm, -part.source)).source
    own = sum(1 for part in parts if part.source == worst)
    why = f"{own} of its loaders would need {_percent(total)} of a worker's time"
    if needs[worst].is_streaming and own >= needs[worst].lanes:
        why += f", and a stream of {needs[worst].lanes} lanes is dealt to no more"
    return WaitVerdict(True, needs[worst].name, _stage(loads[worst]), why)


def _cpu_verdict(
    needs: Sequence[SourceNeed],
    loads: Sequence[SourceLoad],
    cpu_ppm: int,
    build_ppm: int,
    budgets: Budgets,
) -> WaitVerdict:
    why = (
        f"{_percent(cpu_ppm)} of a CPU are needed, there are {_percent(budgets.cpus_milli * 1000)}"
    )
    worst = max(
        range(len(needs)),
        key=lambda number: (loads[number].cpu_ppm + loads[number].user_ppm, -number),
    )
    if build_ppm > loads[worst].cpu_ppm + loads[worst].user_ppm:
        return WaitVerdict(True, "", "build", why)
    load = loads[worst]
    stage: Stage = "transform" if load.user_ppm > load.cpu_ppm else "decode"
    return WaitVerdict(True, needs[worst].name, stage, why)


def _stage(load: SourceLoad) -> Stage:
    if load.wait_ppm > load.cpu_ppm + load.user_ppm:
        return "read"
    return "transform" if load.user_ppm > load.cpu_ppm else "decode"


# -- reasons -----------------------------------------------------------------------------------------


def _source_reason(need: SourceNeed, load: SourceLoad, homes: list[list[int]], number: int) -> str:
    if not load.is_open:
        return "weight 0: nothing is opened"
    own = homes[number]
    known = "" if need.is_known else " (not measured: as the others on average)"
    told = f"{_percent(load.busy_ppm)} of a loader's time, most of it {_doing(need.profile)}{known}"
    if _is_capped(need):
        return f"{told}; a second reader would get no more"
    if len(own) > 1:
        return f"{told}; {len(own)} parts of {_percent(-(-load.busy_ppm // len(own)))}"
    others = sum(1 for at, found in enumerate(homes) if at != number and own[0] in found)
    if not others:
        return f"{told}; has worker {own[0]} for itself"
    return f"{told}; shares worker {own[0]} with {others}"


def _doing(profile: SourceProfile | None) -> str:
    if profile is None:
        return "not known"
    return {"read": "waiting for reads", "transform": "the user's code", "cpu": "CPU"}[
        bound_of(profile)
    ]


def _worker_reason(needs: Sequence[SourceNeed], own: list[_Part]) -> str:
    if not own:
        return "has nothing to read: the number of workers is configured"
    first = max(own, key=lambda part: (part.ppm, -part.source))
    more = len(own) - 1
    return f"{needs[first.source].name} {_percent(first.ppm)}" + (
        f" and {more} more" if more else ""
    )


def _workers_reason(
    loads: Sequence[SourceLoad],
    dealt: list[list[_Part]],
    budgets: Budgets,
    limit: int,
    limit_reason: str,
) -> str:
    total = sum(load.busy_ppm for load in loads)
    told = f"all sources take {_percent(total)} of a loader's time, a worker is given {_percent(TARGET_PPM)}"
    if budgets.workers_fixed:
        return f"{told}; {limit_reason}"
    heaviest = max(sum(part.ppm for part in own) for own in dealt)
    return f"{told}" + (
        f"; {limit_reason}" if len(dealt) == limit and heaviest > TARGET_PPM else ""
    )


def _percent(ppm: int) -> str:
    return f"{ppm / 10_000:.3g} %" if ppm < 1_000_000 else f"{ppm / 10_000:.0f} %"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
