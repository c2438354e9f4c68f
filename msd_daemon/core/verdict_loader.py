"""Rules of the data side: ranks wait, so what is it that does not come, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msd_daemon.core.looks import JobLook, PeerLook, RankLook, RingLook, SourceLook
from msd_daemon.core.verdict import Level, Verdict
from msd_daemon.core.verdict_source import BUSY_RATIO, busy_ratios, source_cause
from msd_daemon.core.verdict_texts import (
    PLANNER_HELP,
    planner_command,
    planner_named,
    seconds,
    window_of,
)

STALL_NS = 3_000_000_000
"""Nothing was published for so long although a rank waits: it stands."""
WAITS_SLOW_RATIO = 0.05
"""Ranks that wait for more of their time are told that the loader is slow."""
WINDOW_NS_MIN = 2_500_000_000
FIRST_BATCH_NS = 60_000_000_000
"""Before its first batch a generation is slow for so long, and stalled only then."""
STARVED_RATIO = 0.3
"""A node without ranks can't know how long those of others wait: it is told what the draw lacks."""
OWN_RATIO = 0.4
"""A source that was waited for in a smaller part of what ranks waited is not why they did."""
PLANNER_NS = 1_500_000_000
PLANNER_OFF = ("T", "t", "D", "Z")
"""States in which a planner does nothing."""
PEER_NS = 1_500_000_000
ASKING_NS_MIN = 1_000_000_000
"""A rank that was at work till just now is no rank that stands still."""


class Waits:
    """Who waits for data in a window of looks.

    Args:
        looks: The newest last.
    """

    def __init__(self, looks: Sequence[JobLook]) -> None:
        self.now = looks[-1]
        self.first, self.span_ns = window_of(looks)
        self.ratio, self.rank = self._worst()
        self.stalled_since_ns = self._stalled_since()

    @property
    def level(self) -> Level | None:
        """How bad it is; None: nobody waits for long."""
        if self.stalled_since_ns:
            is_first = not any(ring.published_total for ring in self.now.rings)
            age_ns = self.now.at_ns - self.now.begun_ns
            return "slow" if is_first and age_ns < FIRST_BATCH_NS else "stalled"
        if self.span_ns < WINDOW_NS_MIN:
            return None
        if not self.now.has_readers:
            return "slow" if self.starved_ratio >= STARVED_RATIO else None
        return "slow" if self.ratio >= WAITS_SLOW_RATIO else None

    @property
    def starved_ratio(self) -> float:
        """Part of the window in which the source that lacked most was waited for."""
        return _awaited_source(self)[1] / max(self.span_ns, 1)

    @property
    def evidence(self) -> str:
        """What the ranks say."""
        if not self.now.has_readers:
            return "ranks of other nodes read what this one loads"
        if self.stalled_since_ns:
            for_s = seconds(self.now.at_ns - self.stalled_since_ns)
            return f"rank {self.rank} has had no batch for {for_s}"
        return (
            f"rank {self.rank} waited {100 * min(self.ratio, 1.0):.0f} % of the last "
            f"{seconds(self.span_ns)} for data"
        )

    def _worst(self) -> tuple[float, int | None]:
        was = {rank.rank: rank for rank in self.first.ranks}
        worst, who = 0.0, None
        for rank in self.now.ranks:
            before = was.get(rank.rank)
            if before is None or not self.span_ns:
                continue
            waited_ns = rank.waited_ns - before.waited_ns
            if rank.waiting_since_ns:
                waited_ns += self.now.at_ns - max(rank.waiting_since_ns, self.first.at_ns)
            if waited_ns / self.span_ns > worst:
                worst, who = waited_ns / self.span_ns, rank.rank
        return worst, who

    def _stalled_since(self) -> int:
        """Return since when a rank has had nothing although it asked; 0: none stands still."""
        found = 0
        for ring in self.now.rings:
            asking = [
                rank
                for rank in self.now.ranks
                if _is_asking(rank, ring)
                and self.now.at_ns - rank.waiting_since_ns >= ASKING_NS_MIN
            ]
            since_ns = ring.published_ns or self.now.begun_ns
            if not ring.published_total and ring.readers:
                asking = [rank for rank in self.now.ranks if rank.rank in ring.readers]
            if not asking or not since_ns or self.now.at_ns - since_ns < STALL_NS:
                continue
            if not found or since_ns < found:
                found = since_ns
                self.rank = min(asking, key=lambda it: (it.waiting_since_ns, it.rank)).rank
        return found


def _is_asking(rank: RankLook, ring: RingLook) -> bool:
    return rank.rank in ring.readers and rank.waiting_since_ns > 0 and not ring.is_full


def data_side(looks: Sequence[JobLook]) -> Verdict | None:
    """Return the verdict where ranks wait for data; None where they do not."""
    waits = Waits(looks)
    level = waits.level
    if level is None:
        return None
    for rule in (_planner, _journal, _exchange, _constructor):
        found = rule(looks, waits, level)
        if found is not None:
            return found
    return _source(looks, waits, level)


def _verdict(
    waits: Waits,
    level: Level,
    cause: str,
    stage: str,
    what: str,
    evidence: Sequence[str],
    command: str,
    *,
    source: str | None = None,
    node: str | None = None,
    since_ns: int = 0,
) -> Verdict:
    who = "ranks wait" if waits.rank is None else f"rank {waits.rank} waits"
    return Verdict(
        "loader", level, cause, stage, f"{who} for {what}",
        source=source, rank=waits.rank, node=node or waits.now.node,
        since_ns=since_ns or waits.stalled_since_ns,
        evidence=(waits.evidence, *evidence), command=command,
    )  # fmt: skip


def _planner(_looks: Sequence[JobLook], waits: Waits, level: Level) -> Verdict | None:
    now, planner = waits.now, waits.now.planner
    is_stopped = planner.process is not None and planner.process.state in PLANNER_OFF
    if planner.is_there and not is_stopped:
        return None
    gone_ns = now.at_ns - planner.since_ns if planner.since_ns else 0
    if is_stopped and gone_ns < PLANNER_NS:
        return None
    all_served = all(r.published_total >= now.sequences for r in now.rings if r.readers)
    if not all_served:
        return None  # what is planned could be served still: something else is slow
    return _gone(waits, level, f"all {now.steps_planned} steps that it planned are served")


def _gone(waits: Waits, level: Level, what_is_left: str) -> Verdict:
    """Return that the planner is why."""
    now, planner = waits.now, waits.now.planner
    gone_ns = now.at_ns - planner.since_ns if planner.since_ns else 0
    is_stopped = planner.process is not None and planner.process.state in PLANNER_OFF
    if planner.process is not None and is_stopped:
        state = planner.process.state
        what = f"the planner (pid {planner.process.pid}), which is stopped (state {state})"
        command = f"kill -CONT {planner.process.pid}"
    else:
        what, command = planner_named(planner), planner_command(planner)
    return _verdict(
        waits, level, "planner_gone", "planner", what,
        (f"away for {seconds(gone_ns)}; {what_is_left}", *((PLANNER_HELP,) if planner.place else ())),
        command, since_ns=max(planner.since_ns, waits.stalled_since_ns),
    )  # fmt: skip


def _journal(_looks: Sequence[JobLook], waits: Waits, level: Level) -> Verdict | None:
    now = waits.now
    if not now.journal_stalled:
        return None
    return _verdict(
        waits, level, "journal_stalled", "journal",
        "the journal: no plan leaves before it is durable", (now.journal_stalled,),
        "df -h, then look at the disk of daemon.state_dir",
    )  # fmt: skip


def _exchange(_looks: Sequence[JobLook], waits: Waits, level: Level) -> Verdict | None:
    now = waits.now

    def badness(peer: PeerLook) -> tuple[bool, int]:
        return (not peer.is_up, now.at_ns - peer.awaited_since_ns if peer.awaited else 0)

    late = [
        peer
        for peer in now.peers
        if (peer.awaited and now.at_ns - peer.awaited_since_ns >= PEER_NS)
    ]
    if not late:
        return None
    peer = max(late, key=badness)
    if peer.is_up and not now.planner.is_there:
        return _gone(
            waits, level, f"node {peer.node} may never have had the plan of what is wanted"
        )
    reason = f": {peer.reason}" if peer.reason else ""
    state = f"it does not answer{reason}" if not peer.is_up else "its link is up"
    return _verdict(
        waits, level, "node_slow", "exchange", f"samples of node {peer.node}",
        ((f"{peer.awaited} parcels are wanted of it, the oldest for "
         f"{seconds(now.at_ns - peer.awaited_since_ns)}"), state),
        f"msdctl why {now.job}   (on node {peer.node})", node=peer.node,
    )  # fmt: skip


def _constructor(_looks: Sequence[JobLook], waits: Waits, level: Level) -> Verdict | None:
    now = waits.now
    stuck = [
        worker
        for worker in now.workers
        if worker.role == "constructor" and worker.process.state in ("T", "t", "D", "Z", "")
    ]
    if not stuck or not any(ring.filling for ring in now.rings):
        return None
    worker = stuck[0]
    return _verdict(
        waits, level, "constructor_stuck", "constructor",
        f"constructor {worker.number} (pid {worker.process.pid}), which does nothing",
        (f"it is in state {worker.process.state or 'gone'}, with slots to fill",),
        f"msdctl status {now.job}",
    )  # fmt: skip


def _source(looks: Sequence[JobLook], waits: Waits, level: Level) -> Verdict:
    source, starved_ns = _awaited_source(waits)
    share = starved_ns / max(waits.span_ns, 1)
    is_brief = waits.span_ns and share < OWN_RATIO * waits.ratio and not waits.stalled_since_ns
    if source is None or is_brief:
        return _own(looks, waits, level)
    found = source_cause(looks, source)
    evidence = []
    if waits.span_ns:
        evidence.append(
            f"source {source.name} was waited for {100 * min(share, 1.0):.0f} % of the last "
            f"{seconds(waits.span_ns)}"
        )
    return _verdict(
        waits, level, found.cause, found.stage, f"source {source.name}: {found.what}",
        (*evidence, *found.evidence), found.command, source=source.name,
        since_ns=found.since_ns,
    )  # fmt: skip


def _own(looks: Sequence[JobLook], waits: Waits, level: Level) -> Verdict:
    """No source is why: it is the pool, or msd's own processes, or how little is planned ahead."""
    now = waits.now
    if now.other_nodes and not now.planner.is_there:
        return _gone(waits, level, "nothing that this node loads is waited for")
    if now.other_nodes:
        return _verdict(
            waits, level, "node_slow", "exchange",
            "other nodes: nothing that this node loads is waited for",
            (f"{now.other_nodes} other nodes take part in the generation",),
            "msdctl cluster",
        )  # fmt: skip
    refused = sum(look.pool_refused for look in looks) / len(looks)
    busy = busy_ratios(now, waits.first)
    role, ratio = max(busy.items(), key=lambda it: (it[1], it[0]), default=("", 0.0))
    parts = ", ".join(f"{name} {100 * part:.0f} %" for name, part in sorted(busy.items()))
    evidence = [f"on a CPU or waiting for one: {parts or 'nobody'}"]
    if refused >= BUSY_RATIO and ratio < BUSY_RATIO:
        return _verdict(
            waits, level, "memory_full", "pool", "room in the pool: nothing more can be read ahead",
            ((f"room was refused at {100 * refused:.0f} % of the looks; the pool has "
             f"{now.pool_bytes >> 20} MiB"), *evidence),
            "raise memory.pool_bytes (and memory.memory_bytes) in daemon.toml",
        )  # fmt: skip
    queued = _queued_ratio(waits)
    if queued > 0.2:
        evidence.append(
            f"msd's processes waited {100 * queued:.0f} % of their busy time for one of "
            f"{now.cpus:g} CPUs"
        )
    stage = role if role in ("planner", "constructor") and ratio >= BUSY_RATIO else ""
    what = f"its {stage}, which is busy all the time" if stage else "its steps and batches"
    if not stage:
        evidence.append(f"{now.horizon_steps} steps are planned ahead at most")
    return _verdict(
        waits, level, "loader_slow", stage or "planner",
        f"msd itself: {what}, and for no source", evidence,
        "raise planner.horizon_steps, or give msd's processes more CPU" if not stage
        else f"msdctl top {now.job}",
    )  # fmt: skip


def _awaited_source(waits: Waits) -> tuple[SourceLook | None, int]:
    """Return the source that was waited for most in the window, and for how long."""
    was = {source.name: source.starved_ns for source in waits.first.sources}
    found: tuple[SourceLook | None, int] = (None, 0)
    best = (0, False)
    for source in waits.now.sources:
        starved_ns = source.starved_ns - was.get(source.name, 0)
        if (starved_ns, source.is_starved) > best:
            best, found = (starved_ns, source.is_starved), (source, starved_ns)
    return found


def _queued_ratio(waits: Waits) -> float:
    """Return which part of their time msd's processes could have run and had no CPU."""
    was = {worker.process.pid: worker.process for worker in waits.first.workers}
    pairs = [
        (was[worker.process.pid], worker.process)
        for worker in waits.now.workers
        if worker.process.pid in was
    ]
    ran_ns = sum(new.cpu_ns - old.cpu_ns for old, new in pairs)
    queued_ns = sum(new.queued_ns - old.queued_ns for old, new in pairs)
    return queued_ns / max(ran_ns + queued_ns, 1)
