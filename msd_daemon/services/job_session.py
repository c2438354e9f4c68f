"""One job on this node: its ranks and one generation after the other.

Ranks join with a mesh and start with a state. When all have joined and those of the first pipeline
stage have started with one state, a generation begins; the next one begins when all are done with
it. Once the last rank left, the job waits a while for ranks to come back, on any mesh: workers and
pool stay as they are, so that the next generation goes on from what was read ahead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from federation.core.gathering import RankNeeds
from federation.messages import (
    CloseJob,
    Envelope,
    Message,
)
from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.planner_link import PlannerWire
from msd_client.contract.batch_spec import Stage
from msd_client.contract.errors import (
    MeshMismatchError,
    MsdError,
    SessionClosedError,
    UsageError,
    encode_error,
)
from msd_client.contract.local_messages import RingEvent, encode_control
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.budget import check_total
from msd_daemon.core.loader_costs import LoaderCosts
from msd_daemon.services.bad_records import BadRecords, check_source, mark_drawn
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.generation import Generation, StartTimes
from msd_daemon.services.generation_start import GenerationStart
from msd_daemon.services.job_folder import JobFolder
from msd_daemon.services.job_memory import job_pool_sums, validation_config
from msd_daemon.services.job_mesh import JobMesh
from msd_daemon.services.job_workers import JobWorkers
from msd_daemon.services.join_answer import join_answer
from msd_daemon.services.link import PacketPeer
from msd_daemon.services.membership import Member, Membership
from msd_daemon.services.old_rings import OldRings
from msd_daemon.services.planner_port import PlannerPort
from msd_daemon.services.quarantine import Quarantine
from msd_daemon.services.sources_page import sources_page
from msd_daemon.services.starts import Starts
from msd_daemon.services.stream_changes import StreamChanges
from msd_daemon.shm.segment import Segment, available_memory_bytes
from msd_daemon.workers.bad_notice import BadNotice
from msd_daemon.workers.rights import Rights

log = logging.getLogger(__name__)

WAITING = "waiting for ranks"
STOPPED_TEXT = "was stopped by msdctl stop"
"""So nodes that hear of it through the planner know a stop from a failure, too."""


class SessionHost(Protocol):
    """What a session asks of its daemon."""

    def session_closed(self, session: JobSession) -> None:
        """It is over."""

    def may_wait(self, session: JobSession) -> bool:
        """All its ranks left: return True where it may wait for them to come back."""
        ...

    def used_bytes(self, session: JobSession) -> int:
        """Return the shared memory of all other jobs."""
        ...


class JobSession:
    """A job with its joined ranks. Closed by `close`, once."""

    def __init__(
        self,
        job: ResolvedJob,
        mesh: list[tuple[str, int]],
        config: DaemonConfig,
        forks: ForkClient,
        planner: PlannerWire,
        *,
        identity: str,
        uid: int,
        host: SessionHost,
        stage: Stage | None = None,
        used_bytes: int = 0,
        reserved_bytes: int = 0,
        resolved_yaml: str = "",
        parent: JobSession | None = None,
        last_generation: int = 0,
        rights: Rights | None = None,
    ) -> None:
        """Hold a job; nothing is allocated before its ranks start.

        Args:
            job: The resolved job.
            mesh: Axes of the trainer in order, with sizes.
            config: The daemon's.
            forks: The fork server.
            planner: The planner's link.
            identity: Names the session on the wires and in the state folder.
            uid: Owner.
            host: The daemon.
            stage: The only pipeline stage whose ranks read it (validation), None for all.
            used_bytes: Shared memory of the daemon's other jobs.
            reserved_bytes: What the job's validation streams will need.
            resolved_yaml: The job with all defaults written out, kept beside the journal.
            parent: The training session, where this is a pass of validation.
            last_generation: Of the session of that identity before this one.
            rights: Of the owner, which the processes that read take; None: the daemon's.

        Raises:
            MeshMismatchError: The mesh does not fit the batch.
            BudgetError: The job does not fit the daemon's memory.
        """
        self.job = job
        self.identity = identity
        self.uid = uid
        self._rights = rights
        self._stage: Stage | None = stage
        self._mesh = JobMesh.plan(job, mesh, config.ring_slots, stage)
        self._take_members()
        self.generation: Generation | None = None
        self.former: Generation | None = None
        """The one before, until another begins with what it left in the pool."""
        self.forget_after: int | None = None
        """Journalled events of later plan steps are dropped where a generation begins."""
        self.state = "joining"
        self._is_stopped = False
        self._grace: asyncio.TimerHandle | None = None
        self._joined_ns = self._asked_ns = 0
        self._config = config if stage is None else validation_config(config)
        self.parent = parent
        self._folder = JobFolder(Path(config.state_dir), identity)
        self._resolved_yaml = resolved_yaml
        self._planner = PlannerPort(identity, planner, last_generation)
        self._host = host
        self._start_error: MsdError | None = None
        """What went wrong since a generation began to start."""
        self._early: list[Envelope] = []
        """What the planner sent behind JobOpened, before the generation was made of that."""
        self.created = time.time()
        self.changes = StreamChanges(self, self._planner)
        self.sums = job_pool_sums(job, self._config)
        self._old_rings = OldRings()
        self._check_budget(self._mesh, used_bytes, reserved_bytes)
        self._forks = forks
        self._read_job(job)

    def _read_job(self, job: ResolvedJob) -> None:
        """Have all that reads the job's sources made for it."""
        self.job = job
        self._bad = BadRecords(self._folder.path, job, self.uid)
        # A pass comes again, with the same rows: what it may not touch outlives its folder.
        kept = self._folder if self.parent is None else self.parent.folder
        self.quarantine = Quarantine(kept.quarantine, job)
        self._workers = JobWorkers(
            self,
            job,
            self._config,
            self._forks,
            self.sums.pool_bytes,
            self.quarantine,
            self._rights,
        )

    def adopt_job(self, job: ResolvedJob) -> None:
        """Go on with the job as a state has it: its sources may have grown while the stream ran.

        Raises:
            UsageError: Ranks read it already, as it was resolved from its files.
        """
        if job == self.job:
            return
        if self.generation is not None or self.membership.waiting():
            raise UsageError(
                f"job {self.job.name!r} runs, and the state's sources have other shards: close all "
                "ranks, connect again and load the state before iterating"
            )
        self._workers.close()
        self.former = None
        self._bad.close(None)
        self._read_job(job)

    def _check_budget(self, mesh: JobMesh, used_bytes: int, reserved_bytes: int) -> None:
        """Refuse what does not fit.

        Args:
            mesh: The job's, or one that it is to have.
            used_bytes: Of the daemon's other jobs.
            reserved_bytes: What its validation streams will need.

        Raises:
            BudgetError: The sums are in it.
        """
        needed = {
            "pool": self.sums.pool_bytes,
            "rings": mesh.rings_bytes,
            "rings of batches that are still held": self._old_rings.total_bytes,
            "validation": reserved_bytes,
        }
        available_bytes = available_memory_bytes()
        if self.former is not None:
            available_bytes += self.sums.pool_bytes  # it is there already
        check_total(needed, used_bytes, self._config.memory_bytes, available_bytes)

    @property
    def needed_bytes(self) -> int:
        """Shared memory of the job beside its validation streams."""
        return self.sums.pool_bytes + self._mesh.rings_bytes + self._old_rings.total_bytes

    def _take_members(self) -> None:
        self.membership, self.starts = self._make_members()

    def _make_members(self) -> tuple[Membership, Starts]:
        """Return who is to come, and how a generation begins with them."""
        membership = Membership(self.job.name, RankNeeds.of(self.tree, self._stage))
        return membership, Starts(self, membership)

    @property
    def mesh(self) -> list[tuple[str, int]]:
        """Axes of the trainer in order, with sizes."""
        return self._mesh.axes

    @property
    def tree(self) -> ClientPlaceTree:
        """Of the mesh."""
        return self._mesh.tree

    @property
    def is_waiting(self) -> bool:
        """True while all ranks are gone and may come back."""
        return self.state == WAITING

    def change_mesh(
        self, mesh: list[tuple[str, int]], used_bytes: int, reserved_bytes: int
    ) -> None:
        """Let ranks come with another mesh.

        Raises:
            MeshMismatchError: Ranks are here with the present one, or it does not fit the batch.
            BudgetError: Its rings do not fit the daemon's memory.
        """
        if self.members or not self.is_waiting:
            raise MeshMismatchError(
                f"job {self.job.name!r} runs with mesh {_shown(self.mesh)}, this rank brings "
                f"{_shown(mesh)}: give all ranks the same mesh; another one begins once all ranks left"
            )
        planned = JobMesh.plan(self.job, mesh, self._config.ring_slots, self._stage)
        self._check_budget(planned, used_bytes, reserved_bytes)
        log.info("job %s: mesh %s instead of %s", self.job.name, _shown(mesh), _shown(self.mesh))
        self._mesh = planned
        self._take_members()

    async def until_free(self) -> None:
        """Wait where ranks that nobody sees here may be leaving: those of other nodes."""

    # -- ranks -----------------------------------------------------------------------------------

    def join(
        self, rank: int, pid: int, peer: PacketPeer, deadlines: dict[str, float]
    ) -> dict[str, Any]:
        """Take a rank in and return what it must know.

        Raises:
            MeshMismatchError: The rank is outside the mesh or already here.
        """
        if rank not in self._mesh.ring_of:
            self.tree.coordinate(rank)  # names the mesh where the rank is outside
            raise MeshMismatchError(f"rank {rank} does not read job {self.job.name!r}", rank=rank)
        plan = self._mesh.ring_plans[self._mesh.ring_of[rank]]
        config = self._config
        limits = {
            "first_batch_s": config.first_batch_s,
            "next_batch_s": config.next_batch_s,
            "join_s": config.join_s,
            **deadlines,
        }
        running = 0 if self.generation is None else self.generation.number
        self.membership.add(Member(rank, pid, peer, plan.place.ring, limits, joined_after=running))
        self._joined_ns = time.monotonic_ns()
        if self.is_waiting:
            self.state = "joining"
            self._end_grace()
        return join_answer(self.job, self.tree, plan.place, rank, limits) | {
            "session": self.identity
        }

    @property
    def last_generation(self) -> int:
        """Number of the generation that began last."""
        return self._planner.generation

    @property
    def is_over(self) -> bool:
        """True where nobody is to be served any more."""
        return self.state in ("failed", "stopped", "closed")

    @property
    def members(self) -> dict[int, Member]:
        """Ranks that joined and did not leave."""
        return self.membership.members

    # -- generations -----------------------------------------------------------------------------

    async def begin_generation(self, state: bytes) -> None:
        """See StartsOwner.

        Raises:
            MsdError: It can't be made; nothing of it is left.
        """
        self._set_aside("restart")
        self._old_rings.settle(self.job.name, self.membership.waiting())
        if self._old_rings.total_bytes:
            self._check_budget(self._mesh, self._host.used_bytes(self), 0)
        self._start_error = None
        self._early = []
        asked_ns = time.monotonic_ns()
        number = self._number_generation()
        if self._resolved_yaml:
            about = {"job": self.job.name, "digest": self.job.digest(), "uid": str(self.uid)}
            await asyncio.to_thread(
                self._folder.keep_resolved, self._resolved_yaml, about, self._names
            )
            self._resolved_yaml = ""
        await self.quarantine.load()
        workers = await self._workers.ready(state, self.needed_bytes)
        self._pool_ready(workers.pool)
        if self.former is not None:
            await workers.reset(number)
        times = StartTimes(self._joined_ns or asked_ns, asked_ns)
        made = await self._start_of.make(state, self._workers, workers, times)
        self._check_start(made)
        self.generation, self.former, self._joined_ns = made, None, 0
        self.state = "running"
        self.starts.answer_all(made)
        made.begin()
        early, self._early = self._early, []
        for envelope in early:
            made.planner_message(envelope)
        log.info("job %s: generation %d begins at step %d", self.job.name, number, made.opened.step)

    def _pool_ready(self, pool: Segment) -> None:
        """The memory that samples lie in is there, and stays until the workers are closed."""

    def _number_generation(self) -> int:
        """Return the number of the generation that begins."""
        return self._planner.next_generation()

    def _check_start(self, made: Generation) -> None:
        """Drop a generation that was made while the job failed.

        Raises:
            MsdError: What went wrong.
        """
        if self._start_error is not None:
            made.close()
            raise self._start_error

    @property
    def _start_of(self) -> GenerationStart:
        return GenerationStart(self, self._mesh, self._config, self._planner)

    def _set_aside(self, reason: str) -> None:
        """End the running generation; what it read ahead stays for the next one."""
        if self.generation is not None:
            self._planning_ends(reason)
            self.generation.close()
            self._old_rings.ended(self.generation.number, self._mesh.rings_bytes)
            self.former, self.generation = self.generation, None

    def _planning_ends(self, reason: str) -> None:
        """The running generation needs no more plans here."""
        self._planner.send(CloseJob(reason))

    # -- planner ---------------------------------------------------------------------------------

    def planner_message(self, envelope: Envelope) -> None:
        """Take an envelope that names this job."""
        if not self._planner.take(envelope):
            return
        if self.generation is not None:
            self.generation.planner_message(envelope)
        else:
            # A state whose stream is over, or whose carried fragments fill a step, is planned on
            # at once: often in the same read as JobOpened.
            self._early.append(envelope)

    async def planner_restarted(self, planner: PlannerWire) -> None:
        """Have a new planner replay the journal and go on behind the last plan that arrived.

        Raises:
            PlannerUnavailableError: It did not open the job.
            MsdError: The journal can't be replayed.
        """
        has_to_be_told = self._planner.replaced(planner)
        generation = self.generation
        if not has_to_be_told or generation is None or self.is_over:
            return
        generation.planner_away()
        try:
            order = self._start_of.open_order(b"", generation.next_plan_step)
            await self._planner.open(order, generation.planner_back)
        except (MsdError, TimeoutError):
            if self.generation is generation and not self.is_over:
                raise  # else it was about a generation that ended meanwhile

    # -- what a generation asks of us --------------------------------------------------------------

    def send_planner(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        """Send to the planner in the running generation."""
        self._planner.send(message, frames)

    def send_reader_packet(self, rank: int, packet: bytes) -> None:
        """Send an event to a rank."""
        member = self.members.get(rank)
        if member is not None:
            member.peer.send_packet(packet)

    def send_reader_message(self, rank: int, packets: list[bytes]) -> None:
        """Send an encoded control message to a rank."""
        member = self.members.get(rank)
        if member is not None:
            member.peer.send_encoded(packets)

    def ask_to_attach_again(self) -> None:
        """Tell every rank behind which step to leave, to go on with the next daemon."""
        assert self.generation is not None
        after = self.generation.leave_after()
        log.info("job %s: ranks leave behind step %d, for the next daemon", self.job.name, after)
        note = {"note": "restarting", "generation": self.generation.number, "after": after}
        packets = list(encode_control(note))
        for member in self.members.values():
            member.peer.send_encoded(packets)

    def failed(self, error: MsdError) -> None:
        """Tell every rank that the job can't go on."""
        if self.is_waiting:
            self.close(error.message)  # nobody is here to be told
            return
        if self.state in ("failed", "closed"):
            return  # ranks were told what came first, or are gone
        self.state = "failed"
        self._start_error = error
        self._planner.fail(error)
        log.error("job %s: %s", self.job.name, error.message)
        note: dict[str, Any] = {"note": "failed", "error": encode_error(error)}
        if self.generation is not None:
            note["generation"] = self.generation.number
        packets = list(encode_control(note))
        for member in self.members.values():
            member.peer.send_encoded(packets)

    def bad_records(self, notice: BadNotice) -> None:
        """A chunk that comes next holds bad records: they are listed."""
        self._bad.add(notice)

    def child_ended(self, child: Child) -> None:
        """A fork server reaped a child that may be ours."""
        self._workers.child_ended(child)

    # -- readers ---------------------------------------------------------------------------------------

    def ranks_gone(self, stage: Stage) -> list[int]:
        """Return the ranks of a kind of pipeline stage that were to be here, and are not."""
        tree = self.tree
        return [
            rank
            for rank in range(tree.rank_count)
            if tree.stage(rank) == stage and rank not in self.members
        ]

    def released(self, rank: int, event: RingEvent) -> None:
        """A rank let go of a slot."""
        member = self.members.get(rank) or self.membership.leaving.get(rank)
        if self.generation is not None and member is not None:
            self.generation.released(rank, member.ring, event)

    def reported(self, rank: int, generation: int, step: int, nanoseconds: int) -> None:
        """A rank says how long it took for a step."""
        if self.generation is not None and self.generation.number == generation:
            self.generation.reported(rank, step, nanoseconds)

    def waiting(self, rank: int, generation: int, since_ns: int, taken: int) -> None:
        """A rank says since when it has waited for its next batch, and how many it was given."""
        member = self.members.get(rank)
        running = self.generation
        if running is not None and running.number == generation and member is not None:
            running.rank_waits(rank, member.ring, since_ns, taken)

    def leaving(self, rank: int, held: list[tuple[int, int]]) -> bool:
        """A rank said goodbye; its views still hold these (slot, sequence).

        It is no member any more, but its slots stay its own until it releases them or dies. Return
        False where nothing needs to wait for that: the job ends with it.
        """
        member = self.members.pop(rank, None)
        if member is None:
            return False
        if not self.members:
            self._all_left()
            return False
        self.membership.leaving[rank] = member
        if self.generation is not None:
            self.generation.reader_leaves(rank, member.ring, held)
        return True

    def left(self, rank: int, reason: str) -> None:
        """A rank is gone; the last one's leaving ends the job."""
        member = self.members.pop(rank, None)
        if member is not None and reason != "bye":
            log.warning(
                "job %s: rank %d (pid %d) is gone: %s", self.job.name, rank, member.pid, reason
            )
        if member is not None and not self.members:
            # Before its slots go round again: it may live on with views of them.
            self._all_left()
            return
        member = member or self.membership.leaving.pop(rank, None)
        if member is not None and self.generation is not None:
            self.generation.reader_lost(rank, member.ring)

    def _all_left(self) -> None:
        """Wait for ranks to come back, where the stream goes on; else end the job."""
        generation = self.generation
        if generation is not None:
            is_midway = self.state == "running" and generation.end_reason is None
        else:
            is_midway = self.former is not None and self.state in ("joining", "starting")
        if self.parent is not None or not is_midway or not self._host.may_wait(self):
            self.close("all ranks left")
            return
        self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        """Keep workers and pool for ranks that come back, a while."""
        self._set_aside("all ranks left")
        self._old_rings.forget()
        self.state = WAITING
        self._take_members()
        grace_s = self._config.restart_grace_s
        log.info("job %s: all ranks left, waiting %g s for them", self.job.name, grace_s)
        self._grace = asyncio.get_running_loop().call_later(
            grace_s, self.close, f"no rank came back within {grace_s:g} s"
        )

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def stop(self) -> None:
        """End the job on an operator's word; ranks get a typed error."""
        self._is_stopped = True
        if self.is_waiting:
            self.close("stopped by msdctl")
            return
        self.failed(self._stopped_by_operator())
        self.state = "stopped"

    def _stopped_by_operator(self) -> SessionClosedError:
        return SessionClosedError(f"job {self.job.name!r} {STOPPED_TEXT}")

    @property
    def is_stopped(self) -> bool:
        """True where an operator ended it, here or on another node of the cluster."""
        error = self._start_error
        told = isinstance(error, SessionClosedError) and STOPPED_TEXT in error.message
        return self._is_stopped or told

    def explain(self, rank: int) -> str:
        """Return what a rank is waiting for."""
        missing = self.membership.waiting_for()
        if missing and self.membership.waiting():
            return f"stage join: ranks {missing[:16]} have not joined or not started"
        member = self.members.get(rank)
        if self.generation is None or member is None:
            return f"the job is {self.state}"
        return self.generation.explain(member.ring)

    def check_stuck(self, now_ns: int) -> None:
        """Kill workers that are too long at a record; cut off readers that hold a slot too long."""
        self._workers.watch(now_ns)
        self.changes.watch(now_ns)
        if self.generation is None:
            return
        for ring in self.generation.rings.values():
            debt = ring.state.oldest_debt()
            if debt is None or not debt.is_behind_others or ring.state.has_free():
                continue
            stuck_s = (now_ns - debt.since_ns) / 1e9
            member = self.members.get(debt.reader)
            if member is None or stuck_s < self._config.reader_stuck_s:
                continue
            log.error(
                "job %s: rank %d (pid %d) holds %d slots of ring %d for %.0f s: cut off",
                self.job.name, member.rank, member.pid, debt.held_count, ring.plan.place.ring, stuck_s,
            )  # fmt: skip
            member.peer.close()
            self.left(member.rank, f"stuck for {stuck_s:.0f} s with {debt.held_count} slots")

    # -- numbers ---------------------------------------------------------------------------------------

    @property
    def folder(self) -> JobFolder:
        """The job's files."""
        return self._folder

    async def bad_page(self, source: str | None, offset: int, limit: int) -> dict[str, Any]:
        """Return a part of the list of bad records, each with whether the draw passed it.

        Raises:
            NotFoundError: The job has no such source.
        """
        check_source(self.job.name, source, self._names)
        page = await self._bad.page(source, offset, limit)
        cursors = self._cursors()
        mark_drawn(page, None if cursors is None else dict(zip(self._names, cursors, strict=True)))
        return page

    @property
    def _names(self) -> list[str]:
        return [source.name for source in self.job.sources]

    def _cursors(self) -> list[tuple[int, int]] | None:
        generation = self.generation or self.former
        return None if generation is None else generation.totals.cursors

    @property
    def workers(self) -> JobWorkers:
        """The job's processes."""
        return self._workers

    @property
    def error(self) -> str:
        """Why the job failed; empty where it did not."""
        return "" if self._start_error is None else self._start_error.message

    def pids(self) -> list[tuple[str, int]]:
        """Return (role, pid) of this job's children."""
        return self._workers.pids()

    @property
    def costs(self) -> LoaderCosts:
        """What reading the job's sources costs, live."""
        return self._workers.costs

    def sources_page(self) -> list[dict[str, Any]]:
        """Return what each source costs and what its loaders do, for msdctl."""
        return sources_page(self.job, self.generation, self._workers.profiles, self.costs)

    def scale(self, source: str, partitions: int | None, loaders: Sequence[int]) -> dict[str, Any]:
        """Have a source read in so many partitions; None: as the scaler finds. See Scaler.pin."""
        return self._workers.scale(source, partitions, loaders)

    def allow_loaders(self, loaders_max: int) -> dict[str, Any]:
        """Have no more loader workers than this from now on. See Scaler.allow."""
        return self._workers.allow_loaders(loaders_max)

    def scaling_status(self) -> dict[str, Any] | None:
        """Return what the scaler sees and did last."""
        return self._workers.scaling_status()

    def standby_status(self) -> dict[str, Any]:
        """Return spares and shadows with what they hold."""
        return self._workers.standby_status()

    def close(self, reason: str) -> None:
        """End the job: planner, workers, segments."""
        if self.state == "closed":
            return
        self.state = "closed"
        self._end_grace()
        log.info("job %s ends: %s", self.job.name, reason)
        self.starts.close()
        self._planner.fail(SessionClosedError(f"job {self.job.name!r} is over: {reason}"))
        self._bad.close(self._cursors())
        if self.generation is not None:
            self.send_planner(CloseJob(reason))
            self.generation.close()
            self.generation = None
        self._workers.close()
        if self.parent is not None:
            # Nobody resumes a pass: its journal would only grow from one to the next.
            self._folder.remove()
        self.changes.close()
        self._host.session_closed(self)


def _shown(mesh: Iterable[tuple[str, int]]) -> str:
    """Return a mesh for people: `dp 2 * tp 2`."""
    return " * ".join(f"{axis} {size}" for axis, size in mesh) or "of 1 rank"
