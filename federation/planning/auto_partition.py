"""Who reads what, with how many processes: profiles, mixture and pace to a table with reasons. Pure.

A source's load is the part of a step's time that one loader would need for its share of the step;
sources above TARGET_PPM are split, parts are dealt to loader workers largest first (LPT, Graham 1969),
and workers are added until none is above TARGET_PPM or a budget ends it. What then stands above
FULL_PPM makes the trainers wait, and is named. All integers; ties by number, so that the table is the
same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from federation.planning.resource_costs import (
    PPM,
    TARGET_PPM,
    SourceLoad,
    SourceNeed,
    constructor_ppm,
    source_loads,
)
from federation.planning.resource_reasons import (
    is_capped,
    mib,
    percent,
    source_reason,
    wait_verdict,
    worker_reason,
    workers_reason,
)
from federation.planning.resource_table import (
    Budgets,
    Pace,
    Part,
    ResourceTable,
    SourceRow,
    WorkerRow,
)

BASE_BYTES = 90 << 20
"""Private memory of daemon, fork server and planner (measured: 32 parquet sources, one job)."""
WORKER_BYTES = 14 << 20
"""Private memory of a loader worker beside the open state of its sources: libraries are shared."""
CONSTRUCTOR_BYTES = 8 << 20
BESIDE_NS_PER_TOKEN = 10
"""CPU of daemon, planner and readers (DESIGN.md section 12)."""
WAIT_TARGET_PPM = 200_000
"""Of a loader's time that it may wait, once several reads run at once."""
READS_MAX = 8
"""Blocks that a loader fetches ahead of need at most (federation.planning.scaling)."""
FASTEST_STEP_NS = 1_000
SLOWEST_STEP_NS = 10**14


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
    verdict = wait_verdict(needs, loads, parts, dealt, budgets, (cpu_ppm, build_ppm, memory))
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
                source_reason(need, load, homes, number),
            )
            for number, (need, load) in enumerate(zip(needs, loads, strict=True))
        ),
        workers=tuple(
            WorkerRow(
                number,
                tuple(sorted({part.source for part in own})),
                sum(part.ppm for part in own),
                worker_reason(needs, own),
            )
            for number, own in enumerate(dealt)
        ),
        workers_reason=workers_reason(loads, dealt, budgets, limit, limit_reason),
        constructors=constructors,
        constructors_reason=f"gathering rows takes {percent(build_ppm)} of a CPU",
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
    if need.is_streaming or is_capped(need) or load.wait_ppm <= load.cpu_ppm + load.user_ppm:
        return 1
    return min(READS_MAX, max(2, -(-load.wait_ppm // WAIT_TARGET_PPM)))


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


def _parts(needs: Sequence[SourceNeed], loads: Sequence[SourceLoad], limit: int) -> list[Part]:
    """Return all parts, largest first."""
    found = []
    for number, (need, load) in enumerate(zip(needs, loads, strict=True)):
        if not load.is_open:
            continue
        count = _part_count(need, load, limit)
        found += [Part(number, -(-load.busy_ppm // count))] * count
    return sorted(found, key=lambda part: (-part.ppm, part.source))


def _part_count(need: SourceNeed, load: SourceLoad, limit: int) -> int:
    if is_capped(need):
        return 1
    wanted = max(1, -(-load.busy_ppm // TARGET_PPM))
    most = min(limit, need.lanes) if need.is_streaming else limit
    return min(wanted, max(most, 1))


def _deal_on_enough(parts: list[Part], limit: int, fixed: int) -> list[list[Part]]:
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


def _deal(parts: list[Part], count: int) -> list[list[Part]]:
    """Deal parts largest first to the worker with the least; parts of one source to different ones."""
    dealt: list[list[Part]] = [[] for _ in range(count)]
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


def _homes(dealt: list[list[Part]], sources: int) -> list[list[int]]:
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
    parts: list[Part],
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
        f"pool and rings {mib(budgets.shared_bytes)}, processes {mib(private)}, open sources "
        f"{mib(opened)}; budget {mib(budgets.memory_bytes)}"
    )
