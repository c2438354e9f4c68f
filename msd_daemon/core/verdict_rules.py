"""The rules that turn looks at a job into a verdict. Pure; thresholds stand here, with their reasons.

Full rings mean the trainer, empty ones the data side; which process, source and stage it is there
follows from what was seen in the window: states and CPU of processes, what loader workers are at,
which sources the draw waited for. The order of the rules is the order of causes: a rank that is
stopped also leaves others without data, a planner that is gone also starves them.
"""

from __future__ import annotations

from collections.abc import Sequence

from msd_daemon.core.looks import JobLook, RankLook, RingLook
from msd_daemon.core.verdict import Level, Verdict
from msd_daemon.core.verdict_loader import data_side
from msd_daemon.core.verdict_texts import (
    PLANNER_HELP,
    listed,
    planner_command,
    planner_named,
    seconds,
    window_of,
)

STOPPED_NS = 1_500_000_000
"""A rank that is stopped is named after it: a debugger that passes by is not."""
HELD_NS_MIN = 10_000_000_000
"""A rank that gives nothing back is named after it at the earliest."""
HELD_INTERVALS = 6
"""And after so many times what it usually takes."""
HELD_FIRST_NS = 120_000_000_000
"""Before its first batch is back it may compile for minutes."""
START_NS = 8_000_000_000
"""A generation has so long for its first batches before anybody is named."""
STATES_OFF = {"failed": "job_failed", "stopped": "not_running", "closed": "not_running"}


def judge(looks: Sequence[JobLook]) -> Verdict:
    """Return the verdict on a job.

    Args:
        looks: One a second, the newest last; all of one generation.
    """
    now = looks[-1]
    found = _not_running(now)
    if found is not None:
        return found
    for rule in (_stopped_rank, _late_rank, _missing_readers):
        found = rule(now)
        if found is not None:
            return found
    found = data_side(looks)
    if found is not None:
        return found
    return _fine(looks)


def _not_running(now: JobLook) -> Verdict | None:
    if now.is_stopped:
        what = (
            f"the job was stopped: {now.error}"
            if now.error
            else "the job was stopped by msdctl stop"
        )
        return Verdict("neither", "fine", "job_stopped", "", what, command="msdctl jobs")
    if now.state in STATES_OFF:
        what = f"the job is {now.state}" + (f": {now.error}" if now.error else "")
        command = f"msdctl status {now.job}"
        return Verdict("neither", "fine", STATES_OFF[now.state], "", what, command=command)
    if now.state == "running" and now.is_ended:
        return Verdict("neither", "fine", "stream_ended", "", "the stream is over")
    if now.state == "running" and now.has_readers:
        if any(ring.published_total for ring in now.rings):
            return None
        if not now.begun_ns or now.at_ns - now.begun_ns < START_NS:
            return Verdict(
                "neither", "fine", "starting", "",
                "the generation starts: the first batches are being made",
                evidence=(f"{now.steps_planned} steps planned",), command=f"msdctl status {now.job}",
            )  # fmt: skip
        return None
    if now.state == "running":
        if now.other_nodes and now.planner.place and not now.planner.is_there:
            return _unplanned(now, "slow")  # ranks elsewhere may have steps left
        if now.other_nodes:
            return None  # it loads for them
        return Verdict("neither", "fine", "not_running", "", "no rank of this node reads the job")
    if now.planner.place and not now.planner.is_there:
        return _unplanned(now, "stalled")
    if now.waiting_for_ranks:
        missing = listed([str(rank) for rank in now.waiting_for_ranks], 16)
        return Verdict(
            "neither", "fine", "waiting_for_ranks", "join",
            f"ranks {missing} have not joined, or not begun to iterate",
            rank=now.waiting_for_ranks[0], evidence=(f"the job is {now.state}",),
            command="look into the logs of those ranks: they start, or failed before connect()",
        )  # fmt: skip
    return Verdict("neither", "fine", "not_running", "join", f"the job is {now.state}")


def _unplanned(now: JobLook, level: Level) -> Verdict:
    """No rank reads here, and when ranks begin, and what is loaded for others, the planner says."""
    return Verdict(
        "loader", level, "planner_gone", "planner",
        f"the job waits for {planner_named(now.planner)}", node=now.node,
        since_ns=now.planner.since_ns,
        evidence=(
            (f"the job is {now.state}, no rank of this node reads it; the planner says when ranks "
             "begin and what is loaded for others"),
            PLANNER_HELP,
        ),
        command=planner_command(now.planner),
    )  # fmt: skip


# -- the trainer ---------------------------------------------------------------------------------


def _ring_of(now: JobLook, rank: RankLook) -> RingLook | None:
    return next((ring for ring in now.rings if ring.ring == rank.ring), None)


def _held_ns(now: JobLook, rank: RankLook, ring: RingLook) -> int:
    """Return for how long a rank has given nothing back although it could; 0 where it waits."""
    if rank.waiting_since_ns or not ring.published or rank.rank not in ring.readers:
        return 0
    since_ns = max(rank.released_ns, ring.debtor_since_ns if not rank.released_ns else 0)
    return now.at_ns - since_ns if since_ns else 0


def _stopped_rank(now: JobLook) -> Verdict | None:
    found = []
    for rank in now.ranks:
        ring = _ring_of(now, rank)
        if rank.process.state not in ("T", "t") or ring is None:
            continue
        held_ns = now.at_ns - max(rank.released_ns, now.begun_ns)
        if held_ns >= STOPPED_NS:
            found.append((held_ns, rank, ring))
    if not found:
        return None
    held_ns, rank, ring = max(found, key=lambda entry: (entry[0], -entry[1].rank))
    others = len(found) - 1
    more = f", and {others} more ranks" if others else ""
    return Verdict(
        "trainer", "stalled", "rank_stopped", "ring",
        f"rank {rank.rank} is stopped by a signal or a debugger{more}: all others wait for it",
        rank=rank.rank, node=now.node, since_ns=now.at_ns - held_ns,
        evidence=(
            f"pid {rank.process.pid} is in state {rank.process.state}",
            f"it gave its last batch back {seconds(held_ns)} ago",
            f"ring of DP group {ring.dp_group}: {ring.free} of {ring.slots} slots free",
        ),
        command=f"kill -CONT {rank.process.pid}",
    )  # fmt: skip


def _late_rank(now: JobLook) -> Verdict | None:
    """Find who gives nothing back although data is there, for longer than it ever takes."""
    late: list[tuple[int, RankLook, RingLook]] = []
    readers = 0
    for rank in now.ranks:
        ring = _ring_of(now, rank)
        if ring is None or rank.rank not in ring.readers:
            continue
        readers += 1
        held_ns = _held_ns(now, rank, ring)
        limit_ns = max(HELD_NS_MIN, HELD_INTERVALS * rank.interval_ns)
        if not rank.released_ns:
            limit_ns = HELD_FIRST_NS
        if held_ns >= limit_ns and _has_data(now, ring):
            late.append((held_ns, rank, ring))
    if not late:
        return None
    fewest = min(rank.batches for _, rank, _ in late)
    held_ns, rank, ring = max(
        (entry for entry in late if entry[1].batches == fewest),
        key=lambda entry: (entry[0], -entry[1].rank),
    )
    if len(late) == readers and readers > 1:
        return _hang(now, late, (held_ns, rank, ring))
    return Verdict(
        "trainer", "stalled", "rank_behind", "ring",
        f"rank {rank.rank} gives no batch back: data is ready, the trainer does not go on",
        rank=rank.rank, node=now.node, since_ns=now.at_ns - held_ns,
        evidence=(
            (f"it gave its last batch back {seconds(held_ns)} ago, usually every "
            f"{seconds(rank.interval_ns)}"),
            f"ring of DP group {ring.dp_group}: {ring.published} of {ring.slots} slots wait for it",
            f"pid {rank.process.pid} is in state {rank.process.state or '?'}",
        ),
        command=f"py-spy dump --pid {rank.process.pid}",
    )  # fmt: skip


def _hang(
    now: JobLook,
    late: list[tuple[int, RankLook, RingLook]],
    last: tuple[int, RankLook, RingLook],
) -> Verdict:
    held_ns = min(entry[0] for entry in late)
    rank = last[1]
    most = max(entry[1].batches for entry in late)
    who = f"rank {rank.rank} gave back {rank.batches} batches, others {most}"
    if most == rank.batches:
        who = f"all gave back {most} batches; rank {rank.rank} has not for the longest time"
    return Verdict(
        "trainer", "stalled", "ranks_hang", "ring",
        f"all {len(late)} ranks of this node hold their batches and none goes on: they wait for each "
        "other or for the device (a collective that hangs?), or save a checkpoint",
        rank=rank.rank, node=now.node, since_ns=now.at_ns - held_ns,
        evidence=(
            who,
            (f"none gave a batch back for {seconds(held_ns)}, usually every "
            f"{seconds(max(entry[1].interval_ns for entry in late))}"),
            f"rings: {sum(entry[2].published for entry in late)} slots are ready or held",
        ),
        command=f"py-spy dump --pid {rank.process.pid}",
    )  # fmt: skip


def _has_data(now: JobLook, ring: RingLook) -> bool:
    """Tell whether the data side did what it may for a ring: full, or as far ahead as allowed."""
    return ring.is_full or _is_paced(now, ring) or ring.published >= 2


def _is_paced(now: JobLook, ring: RingLook) -> bool:
    ahead = now.steps_planned - now.step_released
    return ring.published_total >= now.sequences and 2 * ahead >= now.horizon_steps


def _missing_readers(now: JobLook) -> Verdict | None:
    idle = sorted(rank for ring in now.rings for rank in ring.idle_readers)
    if not idle or not any(ring.is_full and ring.idle_readers for ring in now.rings):
        return None
    return Verdict(
        "trainer", "stalled", "waiting_for_ranks", "join",
        f"ranks {listed([str(rank) for rank in idle], 16)} have joined and not begun to iterate",
        rank=idle[0], node=now.node,
        evidence=("their rings are full",),
        command="look at what those ranks do before their first `for step in data.train`",
    )  # fmt: skip


def _all_full(look: JobLook) -> bool:
    reading = [ring for ring in look.rings if ring.readers]
    return bool(reading) and all(ring.is_full for ring in reading)


# -- nobody --------------------------------------------------------------------------------------


def _fine(looks: Sequence[JobLook]) -> Verdict:
    now = looks[-1]
    first, span_ns = window_of(looks)
    was = {rank.rank: rank.waited_ns for rank in first.ranks}
    waits = [
        rank.waited_ns - was[rank.rank] for rank in now.ranks if rank.rank in was
    ]  # of batches that came; a wait that lasts is the data side's
    ratio = max(waits, default=0) / max(span_ns, 1)
    evidence = []
    if span_ns:
        evidence.append(
            f"ranks waited {100 * min(ratio, 1.0):.1f} % of the last {seconds(span_ns)} for data"
        )
    if not now.planner.is_there:
        evidence.append(
            f"the planner is away ({now.planner.silence}): steps that are planned are served"
        )
    in_window = [look for look in looks if look.at_ns >= first.at_ns]
    if 2 * sum(map(_all_full, in_window)) > len(in_window):
        owing = [ring for ring in now.rings if ring.debtor is not None] or list(now.rings)
        ring = min(owing, key=lambda it: (it.debtor_since_ns, it.ring))
        if ring.debtor is not None:
            evidence.append(f"rank {ring.debtor} gives its batch back last")
        else:
            evidence.append(
                "no batch is out at this moment: which rank gives back last is not known"
            )
        return Verdict(
            "trainer", "fine", "trainer_paced", "ring",
            "data is ready: the trainer sets the pace", rank=ring.debtor, node=now.node,
            evidence=tuple(evidence), command=f"msdctl top {now.job}",
        )  # fmt: skip
    return Verdict(
        "neither", "fine", "none", "", "no rank waits for long",
        evidence=tuple(evidence), command=f"msdctl top {now.job}",
    )  # fmt: skip
