"""Whether trainers will wait by a table, for which source and at which stage; and each number's reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from federation.model.source_profile import SourceProfile, bound_of
from federation.planning.resource_costs import FULL_PPM, TARGET_PPM, SourceLoad, SourceNeed
from federation.planning.resource_table import Budgets, Part, Stage, WaitVerdict

PAIR_BOUND_PPM = 1_500_000
"""Two loaders that are no faster together than this share one bottleneck: half way between the two."""


def is_capped(need: SourceNeed) -> bool:
    """True where a second reader gets no more out of it."""
    profile = need.profile
    return profile is not None and 0 < profile.pair_ppm <= PAIR_BOUND_PPM and profile.is_read_bound


def wait_verdict(
    needs: Sequence[SourceNeed],
    loads: Sequence[SourceLoad],
    parts: list[Part],
    dealt: list[list[Part]],
    budgets: Budgets,
    sums: tuple[int, int, int],
) -> WaitVerdict:
    """Return whether trainers wait, and for what.

    Args:
        needs: Of all sources.
        loads: Of them, by the table's reads.
        parts: All of them.
        dealt: Of each worker.
        budgets: Of the node.
        sums: CPU of all in millionths, of it the constructors', and bytes of memory.
    """
    cpu_ppm, build_ppm, memory = sums
    if memory > budgets.memory_bytes:
        why = f"{mib(memory)} are needed, the budget is {mib(budgets.memory_bytes)}"
        return WaitVerdict(True, "", "memory", why)
    capped = [
        number
        for number, (need, load) in enumerate(zip(needs, loads, strict=True))
        if load.is_open and is_capped(need) and load.busy_ppm > FULL_PPM
    ]
    if capped:
        worst = max(capped, key=lambda number: (loads[number].busy_ppm, -number))
        return WaitVerdict(
            True,
            needs[worst].name,
            "read",
            f"its reads take {percent(loads[worst].busy_ppm)} of a step's time, and two readers at "
            f"once get {needs[worst].pair_factor} times what one gets",
        )
    heaviest = max(dealt, key=lambda own: sum(part.ppm for part in own))
    total = sum(part.ppm for part in heaviest)
    if build_ppm > budgets.constructors_max * max(FULL_PPM, total):
        why = f"gathering rows takes {percent(build_ppm)} of a CPU, there are "
        why += f"{budgets.constructors_max} constructors at most"
        return WaitVerdict(True, "", "build", why)
    if cpu_ppm > budgets.cpus_milli * 1000:
        return _cpu_verdict(needs, loads, cpu_ppm, build_ppm, budgets)
    if total <= FULL_PPM:
        told = f"the busiest worker has {percent(total)} of its time to work, all of it takes "
        told += f"{percent(cpu_ppm)} of a CPU of {percent(budgets.cpus_milli * 1000)}"
        return WaitVerdict(False, "", "", told)
    worst = max(heaviest, key=lambda part: (part.ppm, -part.source)).source
    own = sum(1 for part in parts if part.source == worst)
    why = f"{own} of its loaders would need {percent(total)} of a worker's time"
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
    why = f"{percent(cpu_ppm)} of a CPU are needed, there are {percent(budgets.cpus_milli * 1000)}"
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


LONG_BLOCK_NS = 20 * 10**9
"""So long a start at the pace of one loader is worth a word."""


def source_reason(need: SourceNeed, load: SourceLoad, homes: list[list[int]], number: int) -> str:
    """Return why a source has its parts."""
    if not load.is_open:
        return "weight 0: nothing is opened"
    own = homes[number]
    known = "" if need.is_known else " (not measured: as the others on average)"
    told = f"{percent(load.busy_ppm)} of a loader's time, most of it {_doing(need.profile)}{known}"
    if is_capped(need):
        return f"{told}; a second reader would get no more"
    if len(own) > 1:
        parts = f"{told}; {len(own)} parts of {percent(-(-load.busy_ppm // len(own)))}"
        if need.block_ns < LONG_BLOCK_NS:
            return parts
        return (
            f"{parts}, once each has a block behind it: one takes {need.block_ns / 1e9:.0f} s, and till then "
            "the draw waits for one loader; lower the source's shuffle.block_bytes"
        )
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


def worker_reason(needs: Sequence[SourceNeed], own: list[Part]) -> str:
    """Return what a worker is busy with."""
    if not own:
        return "has nothing to read: the number of workers is configured"
    first = max(own, key=lambda part: (part.ppm, -part.source))
    more = len(own) - 1
    return f"{needs[first.source].name} {percent(first.ppm)}" + (
        f" and {more} more" if more else ""
    )


def workers_reason(
    loads: Sequence[SourceLoad],
    dealt: list[list[Part]],
    budgets: Budgets,
    limit: int,
    limit_reason: str,
) -> str:
    """Return why there are so many workers."""
    total = sum(load.busy_ppm for load in loads)
    told = f"all sources take {percent(total)} of a loader's time, a worker is given {percent(TARGET_PPM)}"
    if budgets.workers_fixed:
        return f"{told}; {limit_reason}"
    heaviest = max(sum(part.ppm for part in own) for own in dealt)
    return f"{told}" + (
        f"; {limit_reason}" if len(dealt) == limit and heaviest > TARGET_PPM else ""
    )


def percent(ppm: int) -> str:
    """Return millionths for people."""
    return f"{ppm / 10_000:.3g} %" if ppm < 1_000_000 else f"{ppm / 10_000:.0f} %"


def mib(size_bytes: int) -> str:
    """Return bytes for people."""
    return f"{size_bytes / (1 << 20):.0f} MiB"
