"""Takes looks at the jobs of a daemon: reads what its services hold, and asks the kernel."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from msd_client.contract.errors import MsdError
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.looks import (
    JobLook,
    PeerLook,
    PlannerLook,
    ProcessLook,
    RankLook,
    RingLook,
    SourceLook,
    StoreLook,
    WorkerLook,
)
from msd_daemon.core.share_shift import ShareShift
from msd_daemon.observe.kernel_looks import process_look, usable_cpus
from msd_daemon.services.generation import Generation
from msd_daemon.services.job_session import JobSession
from msd_daemon.services.worker import Worker
from msd_daemon.shm.mark_page import MarkState
from msd_daemon.stores.gate_host import gate_host
from msd_daemon.stores.limiter import HostGate
from msd_daemon.stores.urls import is_url, parse_url

_ACTIVITIES = {
    MarkState.RECORD: "record",
    MarkState.WINDOW: "window",
    MarkState.AWAY: "user code",
    MarkState.READING: "reading",
}
STOPPED = ("T", "t")


class LookedAt(Protocol):
    """What looks are taken of beside the sessions."""

    @property
    def node(self) -> str:
        """This node's name."""
        ...

    @property
    def planner_pid(self) -> int | None:
        """Of this node's own planner; None where none runs, or the cluster's plans."""
        ...

    @property
    def planner_silence(self) -> str:
        """Why no planner is there; empty where one is."""
        ...

    @property
    def planner_away_ns(self) -> int:
        """Since when none is there, on the monotonic clock; 0: since it was first seen."""
        ...

    @property
    def planner_place(self) -> str:
        """Where the cluster's planner is, or all of them are; empty: it is this node's own."""
        ...

    def peer_states(self) -> dict[str, str]:
        """Return why a node's exchange does not answer, by its name; empty: it does."""
        ...


class LookTaker:
    """Of one daemon.

    Args:
        config: The daemon's.
        beside: What is no session's.
    """

    def __init__(self, config: DaemonConfig, beside: LookedAt) -> None:
        self._config = config
        self._beside = beside
        self._shifts: dict[str, ShareShift] = {}
        self._hosts: dict[str, dict[str, str]] = {}
        """By job and source: its host, empty for files."""
        self._gates: dict[str, HostGate | None] = {}
        self._planner_away_ns = 0
        self._cpus = usable_cpus()

    def forget(self, identity: str) -> None:
        """A job is over."""
        self._shifts.pop(identity, None)
        self._hosts.pop(identity, None)

    def close(self) -> None:
        """Let go of files."""
        for gate in self._gates.values():
            if gate is not None:
                gate.close()
        self._gates.clear()

    def planner(self, now_ns: int) -> PlannerLook:
        """Look at the planner."""
        pid, silence = self._beside.planner_pid, self._beside.planner_silence
        process = None if pid is None else process_look(pid)
        is_away = bool(silence) or (process is not None and process.state in (*STOPPED, "Z", ""))
        if not is_away:
            self._planner_away_ns = 0
        elif not self._planner_away_ns:
            self._planner_away_ns = self._beside.planner_away_ns or now_ns
        return PlannerLook(
            process, not silence, silence, self._planner_away_ns, self._beside.planner_place
        )

    def job(self, session: JobSession, planner: PlannerLook, now_ns: int) -> JobLook:
        """Look at a job."""
        generation = session.generation
        workers = session.workers
        look = JobLook(
            now_ns,
            session.job.name,
            self._beside.node,
            session.state,
            waiting_for_ranks=tuple(session.membership.waiting_for()),
            error=session.error,
            is_stopped=session.is_stopped,
            generation=session.last_generation,
            planner=planner,
            cpus=self._cpus,
        )
        if generation is None:
            return look
        pool = generation.pool.statistics()
        entries = session.quarantine.entries
        newest = entries[-1] if entries else None
        sources = self._sources(session, generation, now_ns)
        return replace(
            look,
            generation=generation.number,
            is_ended=generation.end_reason is not None,
            begun_ns=generation.begun_ns,
            steps_planned=generation.next_plan_step,
            step_released=generation.steps.released_step,
            sequences=generation.steps.sequences,
            horizon_steps=generation.planned_steps,
            journal_stalled=generation.journal_stalled,
            rings=tuple(_ring(generation, number) for number in generation.rings),
            ranks=tuple(_ranks(session, generation)),
            workers=tuple(self._workers(session, generation)),
            sources=tuple(sources),
            stores=tuple(self._stores(sources)),
            peers=tuple(self._peers(generation)),
            other_nodes=0 if generation.parcels is None else len(generation.parcels.nodes) - 1,
            pool_bytes=pool.capacity_bytes,
            pool_free_bytes=pool.free_bytes,
            pool_refused=generation.readahead.was_refused,
            worker_deaths=workers.lost_total,
            last_death=workers.last_loss,
            recycled=workers.recycled_total,
            quarantined=len(entries),
            last_quarantine=("", "") if newest is None else (newest.source, newest.text),
        )

    def _sources(
        self, session: JobSession, generation: Generation, now_ns: int
    ) -> list[SourceLook]:
        job, totals = session.job, generation.totals
        shift = self._shifts.setdefault(session.identity, ShareShift())
        if totals.wanted:
            shift.take(totals.wanted, now_ns)
        hosts = self._hosts_of(session)
        starved = generation.starved_time.now
        found = []
        for index, source in enumerate(job.sources):
            grown = shift.of(index)
            loaders = generation.readahead.loaders_of(index)
            cost = session.workers.costs.of(index)
            found.append(
                SourceLook(
                    source.name,
                    wanted=totals.wanted[index] if totals.wanted else 0.0,
                    shifted_from=0.0 if grown is None else grown.before,
                    shifted_ns=0 if grown is None else grown.at_ns,
                    workers=tuple(sorted({loader.worker for loader in loaders})),
                    is_granted=any(loader.is_granted for loader in loaders),
                    is_starved=index in starved,
                    starved_ns=generation.starved_time.total_ns(index, now_ns),
                    host=hosts[source.name],
                    cpu_ns=cost.cpu_ns,
                    user_ns=cost.user_ns,
                    wait_ns=cost.wait_ns,
                )
            )
        return found

    def _hosts_of(self, session: JobSession) -> dict[str, str]:
        known = self._hosts.get(session.identity)
        if known is not None and len(known) == len(session.job.sources):
            return known
        known = {}
        for source in session.job.sources:
            path = source.shards[0].path if source.shards else ""
            try:
                place = parse_url(path) if is_url(path) else None
                known[source.name] = "" if place is None else gate_host(place, self._config.stores)
            except MsdError:
                known[source.name] = ""
            if known[source.name] == "file":
                known[source.name] = ""
        self._hosts[session.identity] = known
        return known

    def _stores(self, sources: list[SourceLook]) -> list[StoreLook]:
        found = []
        for host in sorted({source.host for source in sources if source.host}):
            gate = self._gate(host)
            if gate is None:
                continue
            slots_max = self._config.stores.requests_per_host_max
            window, now_s = gate.window(), time.monotonic()
            ago_s = now_s - window.cut_at_s
            found.append(
                StoreLook(
                    host,
                    throttled_since_s=None if ago_s > 1e8 else ago_s,
                    is_closed=window.closed_until_s > now_s,
                    slots=int(window.slots_at(now_s, slots_max)),
                    slots_max=slots_max,
                )
            )
        return found

    def _gate(self, host: str) -> HostGate | None:
        if host not in self._gates:
            stores = self._config.stores
            try:
                gate = HostGate(stores.shared_folder(), host, stores.requests_per_host_max)
            except (OSError, MsdError):
                gate = None  # the workers say why they can't have it
            self._gates[host] = gate
        return self._gates[host]

    def _workers(self, session: JobSession, generation: Generation) -> list[WorkerLook]:
        job = session.job
        found = []
        for worker in session.workers.all():
            number = worker.number
            mark = None if worker.page is None else worker.page.mark()
            source = shard = ""
            if mark is not None and mark.source < len(job.sources):
                shards = job.sources[mark.source].shards
                source = job.sources[mark.source].name
                shard = shards[mark.shard].path if mark.shard < len(shards) else ""
            found.append(
                WorkerLook(
                    worker.role,
                    number,
                    process_look(worker.child.pid),
                    is_busy=_is_busy(worker, generation),
                    activity="" if mark is None else _ACTIVITIES.get(mark.state, ""),
                    source=source,
                    shard=shard,
                    place=-1 if mark is None else mark.first_place,
                    since_ns=0 if mark is None else mark.since_ns,
                )
            )
        return found

    def _peers(self, generation: Generation) -> list[PeerLook]:
        parcels = generation.parcels
        if parcels is None:
            return []
        awaited, states = parcels.awaited(), self._beside.peer_states()
        found = []
        for node in parcels.nodes:
            count, since_ns = awaited.get(node, (0, 0))
            reason = states.get(node, "")
            if count or reason:
                found.append(PeerLook(node, not reason, reason, count, since_ns))
        return found


def _is_busy(worker: Worker, generation: Generation) -> bool:
    if worker.role == "loader":
        return generation.is_worker_busy(worker.number)
    if worker.role == "shadow":
        return generation.is_shadow_busy(worker.number)
    return worker.building > 0


def _ring(generation: Generation, number: int) -> RingLook:
    ring = generation.rings[number]
    statistics = ring.state.statistics()
    debt = ring.state.oldest_debt()
    readers, begun = ring.state.readers, generation.begun_readers
    return RingLook(
        number,
        ring.plan.place.group,
        statistics.slots_count,
        statistics.free_count,
        statistics.filling_count,
        statistics.published_count,
        statistics.published_total,
        tuple(sorted(readers & begun)),
        debtor=None if debt is None else debt.reader,
        debtor_since_ns=0 if debt is None else debt.since_ns,
        is_behind_others=debt is not None and debt.is_behind_others,
        idle_readers=tuple(sorted(readers - begun)),
        published_ns=generation.published_ns.get(number, 0),
    )


def _ranks(session: JobSession, generation: Generation) -> list[RankLook]:
    found = []
    for _, member in sorted(session.members.items()):
        times = generation.waits.of(member.rank)
        found.append(
            RankLook(
                member.rank,
                member.ring,
                process_look(member.pid) if member.pid else ProcessLook(0, ""),
                batches=times.batches,
                waited_ns=times.waited_ns,
                interval_ns=times.interval_ns,
                released_ns=times.released_ns,
                waiting_since_ns=times.waiting_since_ns,
            )
        )
    return found
