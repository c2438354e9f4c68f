"""One job on this node: its ranks and one generation after the other.

Ranks join with a mesh and start with a state. When all have joined and those of the first pipeline
stage have started with one state, a generation begins; the next one begins when all are done with
it. The last rank's leaving ends the job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from federation.messages import (
    CloseJob,
    Envelope,
    Message,
    OpenJob,
    StreamRewound,
)
from federation.model.job import ResolvedJob, encode_job
from federation.model.place_tree import ClientPlaceTree
from federation.planner_link import PlannerLink
from msd_client.contract.batch_spec import Stage
from msd_client.contract.errors import (
    InvalidTransitionError,
    MeshMismatchError,
    MsdError,
    SessionClosedError,
    StateMismatchError,
    StreamRewoundError,
    UsageError,
    WorkerLostError,
    encode_error,
)
from msd_client.contract.local_messages import RingEvent, encode_control
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.budget import PoolSums, check_total
from msd_daemon.core.pool import PoolState
from msd_daemon.core.ring_plan import RingPlan, plan_rings, rings_bytes
from msd_daemon.services.bad_records import BadRecords, mark_drawn
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.generation import Generation
from msd_daemon.services.job_folder import JobFolder
from msd_daemon.services.job_memory import job_pool_sums, validation_config
from msd_daemon.services.job_status import generation_status
from msd_daemon.services.job_workers import JobWorkers, note_fallback
from msd_daemon.services.join_answer import join_answer
from msd_daemon.services.link import PacketPeer
from msd_daemon.services.loss_hook import LossHook
from msd_daemon.services.membership import Member, Membership
from msd_daemon.services.planner_port import PlannerPort
from msd_daemon.services.quarantine import Quarantine
from msd_daemon.services.rings import close_rings, make_rings
from msd_daemon.shm.segment import available_memory_bytes
from msd_daemon.workers.bad_notice import BadNotice

log = logging.getLogger(__name__)

QUARANTINE_FILE = "quarantine.jsonl"
RETURN_GRACE_S = 10.0
"""How long a rank that came back alone waits for the others to load a state as well."""


class JobSession:
    """A job with its joined ranks. Closed by `close`, once."""

    def __init__(
        self,
        job: ResolvedJob,
        mesh: list[tuple[str, int]],
        config: DaemonConfig,
        forks: ForkClient,
        planner: PlannerLink,
        *,
        identity: str,
        uid: int,
        on_closed: Callable[[JobSession], None],
        stage: Stage | None = None,
        used_bytes: int = 0,
        reserved_bytes: int = 0,
        resolved_yaml: str = "",
        parent: JobSession | None = None,
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
            on_closed: Called once it is over.
            stage: The only pipeline stage whose ranks read it (validation), None for all.
            used_bytes: Shared memory of the daemon's other jobs.
            reserved_bytes: What the job's validation streams will need.
            resolved_yaml: The job with all defaults written out, kept beside the journal.
            parent: The training session, where this is a pass of validation.

        Raises:
            MeshMismatchError: The mesh does not fit the batch.
            BudgetError: The job does not fit the daemon's memory.
        """
        self.job = job
        self.identity = identity
        self.uid = uid
        self.mesh = mesh
        self.tree = ClientPlaceTree.from_mesh(dict(mesh))
        self.tree.check_batch(job.batch)
        self.ring_plans = {
            plan.place.ring: plan for plan in plan_rings(job, self.tree, config.ring_slots, stage)
        }
        self.membership = _membership(job.name, self.ring_plans, stage)
        self._ring_of = {
            rank: plan.place.ring for plan in self.ring_plans.values() for rank in plan.place.ranks
        }
        self.generation: Generation | None = None
        self.forget_after: int | None = None
        """Journalled events of later plan steps are dropped where a generation begins."""
        self.state = "joining"
        self._config = config if stage is None else validation_config(config)
        self.parent = parent
        self._folder = JobFolder(Path(config.state_dir), identity)
        self._resolved_yaml = resolved_yaml
        self._planner = PlannerPort(identity, planner)
        self._on_closed = on_closed
        self._start_error: MsdError | None = None
        """What went wrong since a generation began to start."""
        self._early: list[Envelope] = []
        """What the planner sent behind JobOpened, before the generation was made of that."""
        self._begin_task: asyncio.Task[None] | None = None
        self._created = time.time()
        self._hook: LossHook | None = None
        self.sums = self._check_budget(used_bytes, reserved_bytes)
        self._forks = forks
        self._read_job(job)

    def _read_job(self, job: ResolvedJob) -> None:
        """Have all that reads the job's sources made for it."""
        self.job = job
        self._bad = BadRecords(self._folder.path, job, self.uid)
        # A pass comes again, with the same rows: what it may not touch outlives its folder.
        kept = self._folder if self.parent is None else self.parent.folder
        self.quarantine = Quarantine(kept.path / QUARANTINE_FILE, job)
        self._workers = JobWorkers(
            self, job, self._config, self._forks, self.sums.pool_bytes, self.quarantine
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
        self._bad.close(None)
        self._read_job(job)

    def _check_budget(self, used_bytes: int, reserved_bytes: int) -> PoolSums:
        sums = job_pool_sums(self.job, self._config)
        needed = {"pool": sums.pool_bytes, "rings": rings_bytes(tuple(self.ring_plans.values()))}
        self.needed_bytes = sum(needed.values())
        needed["validation"] = reserved_bytes
        check_total(needed, used_bytes, self._config.memory_bytes, available_memory_bytes())
        return sums

    # -- ranks -----------------------------------------------------------------------------------

    def join(
        self, rank: int, pid: int, peer: PacketPeer, deadlines: dict[str, float]
    ) -> dict[str, Any]:
        """Take a rank in and return what it must know.

        Raises:
            MeshMismatchError: The rank is outside the mesh or already here.
        """
        if rank not in self._ring_of:
            self.tree.coordinate(rank)  # names the mesh where the rank is outside
            raise MeshMismatchError(f"rank {rank} does not read job {self.job.name!r}", rank=rank)
        plan = self.ring_plans[self._ring_of[rank]]
        config = self._config
        limits = {
            "first_batch_s": config.first_batch_s,
            "next_batch_s": config.next_batch_s,
            "join_s": config.join_s,
            **deadlines,
        }
        running = 0 if self.generation is None else self.generation.number
        self.membership.add(Member(rank, pid, peer, plan.place.ring, limits, joined_after=running))
        return join_answer(self.job, self.tree, plan.place, rank, limits) | {
            "session": self.identity
        }

    def start(self, rank: int, request: int, state: bytes) -> None:
        """A rank wants to iterate from a state; begins a generation once all ranks do.

        Raises:
            UsageError: The rank did not join, or waits already.
            StateMismatchError: A middle stage comes late, with another state.
        """
        member = self.members.get(rank)
        generation = self.generation
        if (
            member is not None
            and generation is not None
            and self.state == "running"
            and generation.awaits(rank, member.ring)
        ):
            member.start_request = request
            self._begin_late(member, generation, state)
            return
        self.membership.start(rank, request, state)
        if generation is None and self.state != "beginning":
            self.state = "starting"
        elif generation is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(RETURN_GRACE_S, self._refuse_newcomer, rank, request)
        self._begin_if_possible()

    def _refuse_newcomer(self, rank: int, request: int) -> None:
        """Tell a rank that came back alone that nobody is going to begin with it."""
        member, generation = self.members.get(rank), self.generation
        if member is None or generation is None or member.start_request != request:
            return
        reading = self.membership.reading()
        is_alone = [other.rank for other in self.membership.waiting()] == [rank]
        if not is_alone or not reading or member.joined_after != generation.number:
            return
        self.membership.refuse_start(
            UsageError(
                f"rank {rank} came to job {self.job.name!r} while ranks {reading[:16]} train on "
                f"without it (step {generation.next_plan_step} is planned next): restart all ranks "
                "from the last state, or have the others load it, too",
                rank=rank,
            )
        )

    def will_not_come(self, rank: int) -> None:
        """A rank left the training session of this pass of validation: those that wait are told."""
        if rank in self.members or not self.membership.needs(rank):
            return
        self.membership.refuse_start(
            UsageError(
                f"rank {rank} left the job, so no pass of {self.job.name!r} begins: restart all "
                "ranks from the last state",
                rank=rank,
            )
        )

    def done_reading(self, rank: int) -> None:
        """A rank reads no more of the running generation: it loaded a state, or came to the end."""
        member = self.members.get(rank)
        if member is not None:
            member.generation = 0
            self._begin_if_possible()

    def _begin_if_possible(self) -> None:
        if self.membership.waiting() and self.membership.can_begin and self.state != "beginning":
            self.state = "beginning"
            self._begin_task = asyncio.get_running_loop().create_task(self._begin())

    def _begin_late(self, member: Member, generation: Generation, state: bytes) -> None:
        """Let a rank of a later pipeline stage into the generation that runs.

        Raises:
            StateMismatchError: It comes with another state.
            UsageError: It is of a middle stage, and what it would begin with is gone.
        """
        if state != generation.state_bytes:
            raise StateMismatchError(
                f"rank {member.rank} starts job {self.job.name!r} from another state than the "
                f"first pipeline stage, which began at step {generation.opened.step}: load the same "
                "checkpoint on every rank",
                rank=member.rank,
            )
        try:
            owed = generation.reader_begins(member.rank, member.ring)
        except InvalidTransitionError as error:
            raise UsageError(
                f"rank {member.rank} (a middle pipeline stage) begins to read job {self.job.name!r} "
                f"too late ({error.message}): iterate from the first step on, or not at all",
                rank=member.rank,
            ) from error
        self._welcome(member, generation)
        generation.catch_up(member.rank, owed)

    async def _begin(self) -> None:
        try:
            await self._begin_generation(self.membership.common_state())
        except MsdError as error:
            self.membership.refuse_start(error)
            self.state = "failed"
        except (TimeoutError, OSError) as error:
            lost = WorkerLostError(f"job {self.job.name!r} could not start: {error!r}")
            self.membership.refuse_start(lost)
            self.state = "failed"

    @property
    def is_over(self) -> bool:
        """True where nobody is to be served any more."""
        return self.state in ("failed", "stopped", "closed")

    @property
    def members(self) -> dict[int, Member]:
        """Ranks that joined and did not leave."""
        return self.membership.members

    # -- generations -----------------------------------------------------------------------------

    async def _begin_generation(self, state: bytes) -> None:
        old = self.generation
        self.generation = None
        self._start_error = None
        self._early = []
        if old is not None:
            self._planner.send(CloseJob("restart"))
            old.close()
        number = self._planner.next_generation()
        begun = {m.rank for m in self.members.values() if m.started_with is not None}

        def readers_of(plan: RingPlan) -> frozenset[int]:
            return frozenset(
                rank
                for rank in plan.place.ranks
                if rank in self.members and (rank in begun or not self.membership.is_optional(rank))
            )

        if self._resolved_yaml:
            about = {"job": self.job.name, "digest": self.job.digest(), "uid": str(self.uid)}
            await asyncio.to_thread(self._folder.keep_resolved, self._resolved_yaml, about)
            self._resolved_yaml = ""
        await self.quarantine.load()
        workers = await self._workers.ready()
        if old is not None:
            await workers.reset(number)
        rings = await make_rings(self.ring_plans, number, readers_of, self._config.segment)
        for ring in rings.values():
            note_fallback(self.job.name, ring.segment)
        try:
            for ring in rings.values():
                self._workers.give_ring(ring, number)
            opened = await self._planner.open(self._open_order(state, None))
            if self._start_error is not None:
                raise self._start_error
        except BaseException:
            close_rings(rings)
            raise
        self.generation = Generation(
            self,
            self.job,
            number,
            workers=workers,
            pool=PoolState(self.sums.pool_bytes),
            sums=self.sums,
            rings=rings,
            opened=opened,
            state_bytes=state,
        )
        self.state = "running"
        for member in self.membership.waiting():
            self._answer_start(member, self.generation)
        self.generation.begin()
        early, self._early = self._early, []
        for envelope in early:
            self.generation.planner_message(envelope)
        log.info("job %s: generation %d begins at step %d", self.job.name, number, opened.step)

    def _answer_start(self, member: Member, generation: Generation) -> None:
        state, member.started_with = member.started_with, None
        assert state is not None
        try:
            self._begin_late(member, generation, state)
        except MsdError as error:  # it came while the generation was being made
            member.peer.send_control({"id": member.start_request, "error": encode_error(error)})

    def _welcome(self, member: Member, generation: Generation) -> None:
        """Answer a rank's start with its ring."""
        member.generation = generation.number
        ring = generation.rings[member.ring]
        body = {
            "layout": ring.layout.encode(),
            "spec": ring.plan.spec.encode(),
            "generation": generation.number,
            "step": generation.opened.step,
        }
        member.peer.send_control(
            {"id": member.start_request, "ok": body}, (ring.segment.fd_read_only,)
        )

    def _open_order(self, state: bytes, resume_step: int | None) -> OpenJob:
        return OpenJob(
            encode_job(self.job),
            [[axis, size] for axis, size in self.mesh],
            state,
            self.sums.planned_steps,
            str(self._folder.journal),
            resume_step,
            self._config.journal_steps_kept,
            self.forget_after if resume_step is None else None,
        )

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

    async def change_mixture(
        self, weights: dict[str, float], at: int | None = None
    ) -> tuple[int, int]:
        """Journal new weights from a step on, by default the first that is possible.

        Returns:
            The step from which they hold, and the first one behind which states know of them.

        Raises:
            ConfigError: A source is unknown, a weight is no weight, or the step is planned already.
            UsageError: The job does not run.
        """
        if self.generation is None:
            raise UsageError(f"job {self.job.name!r} is {self.state}: start iterating first")
        generation = self.generation
        step = await self._planner.change_mixture(weights, at)
        return step, generation.mixture_known_from

    async def skip_steps(self, first: int, end: int) -> dict[str, int]:
        """Leave the content of plan steps out; return where, and behind which step states know.

        Raises:
            ConfigError: It is no run of steps, or begins with one that is planned already.
            UsageError: The job does not run.
        """
        if self.generation is None or self.is_over:
            raise UsageError(f"job {self.job.name!r} is {self.state}: start iterating first")
        generation = self.generation
        answer = await self._planner.skip_steps(first, end)
        return {
            "first": answer.first,
            "end": answer.end,
            "step": answer.step,
            "known_from": generation.mixture_known_from,
        }

    async def rewind(
        self, step: int, skip: tuple[int, int] | None, forget_after: int | None
    ) -> StreamRewound:
        """Journal a rewind and end the generation: every rank gets StreamRewoundError.

        Raises:
            ConfigError: The skip is none, or begins before the step.
            NotFoundError: The journal does not hold the step.
        """
        answer = await self._planner.rewind(step, skip, forget_after)
        self.failed(
            StreamRewoundError(
                f"job {self.job.name!r} was rewound to step {step}: load the checkpoint of step "
                f"{step} (or an earlier one) into model, optimizer and data, and iterate again; "
                f"msdctl rewind {self.job.name} --to {step} --state FILE writes the data's state",
                step=step,
            )
        )
        return answer

    def report_loss(self, step: int, losses: dict[str, float]) -> None:
        """Hand a rank's losses to the job's hook.

        Raises:
            UsageError: The job has no hook.
            ConfigError: A source is unknown, or the hook failed.
        """
        rule = self.job.mixture_hook
        if rule is None:
            raise UsageError(
                f"job {self.job.name!r} has no mixture.hook to report losses to: add one, or leave "
                "report_loss out"
            )
        if self._hook is None:
            names = tuple(source.name for source in self.job.sources)
            self._hook = LossHook(rule, names, self._weights_in_force, self._hook_change)
        self._hook.report(step, losses)

    def _weights_in_force(self) -> dict[str, float]:
        wanted = self.generation.totals.wanted if self.generation is not None else []
        names = [source.name for source in self.job.sources]
        return dict(zip(names, wanted, strict=False))

    async def _hook_change(self, weights: dict[str, float]) -> int:
        return await self._planner.change_mixture(weights, kind="hook")

    async def planner_restarted(self, planner: PlannerLink) -> None:
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
            order = self._open_order(b"", generation.next_plan_step)
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

    def failed(self, error: MsdError) -> None:
        """Tell every rank that the job can't go on."""
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

    def released(self, rank: int, event: RingEvent) -> None:
        """A rank let go of a slot."""
        member = self.members.get(rank) or self.membership.leaving.get(rank)
        if self.generation is not None and member is not None:
            self.generation.released(rank, member.ring, event)

    def reported(self, rank: int, generation: int, step: int, nanoseconds: int) -> None:
        """A rank says how long it took for a step."""
        if self.generation is not None and self.generation.number == generation:
            self.generation.reported(rank, step, nanoseconds)

    def leaving(self, rank: int, held: list[tuple[int, int]]) -> bool:
        """A rank said goodbye; its views still hold these (slot, sequence).

        It is no member any more, but its slots stay its own until it releases them or dies. Return
        False where nothing needs to wait for that: the job ends with it.
        """
        member = self.members.pop(rank, None)
        if member is None:
            return False
        if not self.members:
            self.close("all ranks left")
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
            self.close("all ranks left")
            return
        member = member or self.membership.leaving.pop(rank, None)
        if member is not None and self.generation is not None:
            self.generation.reader_lost(rank, member.ring)

    def stop(self) -> None:
        """End the job on an operator's word; ranks get a typed error."""
        self.failed(SessionClosedError(f"job {self.job.name!r} was stopped by msdctl stop"))
        self.state = "stopped"

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
        """Return a part of the list of bad records, each with whether the draw passed it."""
        page = await self._bad.page(source, offset, limit)
        cursors = self._cursors()
        mark_drawn(page, None if cursors is None else dict(zip(self._names, cursors, strict=True)))
        return page

    @property
    def _names(self) -> list[str]:
        return [source.name for source in self.job.sources]

    def _cursors(self) -> list[tuple[int, int]] | None:
        return None if self.generation is None else self.generation.totals.cursors

    def pids(self) -> list[tuple[str, int]]:
        """Return (role, pid) of this job's children."""
        return self._workers.pids()

    def status(self) -> dict[str, Any]:
        """Return the job for msdctl."""
        status: dict[str, Any] = {
            "name": self.job.name,
            "id": self.identity,
            "digest": self.job.digest(),
            "uid": self.uid,
            "state": self.state,
            "mesh": [[axis, size] for axis, size in self.mesh],
            "created": self._created,
            "waiting_for_ranks": self.membership.waiting_for(),
            "ranks": [
                {
                    "rank": m.rank,
                    "pid": m.pid,
                    "dp_group": self.tree.dp_group(m.rank),
                    "stage": self.tree.stage(m.rank),
                }
                for m in self.members.values()
            ],
            "pool_bytes": self.sums.pool_bytes,
            "workers": [{"role": role, "pid": pid} for role, pid in self.pids()],
        }
        if self.generation is not None:
            status |= generation_status(self.generation, self.job)
        if self._hook is not None:
            hook = {"calls": self._hook.calls, "changed_step": self._hook.changed_step}
            status["mixture_hook"] = hook
        return status

    def close(self, reason: str) -> None:
        """End the job: planner, workers, segments."""
        if self.state == "closed":
            return
        self.state = "closed"
        log.info("job %s ends: %s", self.job.name, reason)
        if self._begin_task is not None and not self._begin_task.done():
            self._begin_task.cancel()
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
        if self._hook is not None:
            self._hook.close()
        self._on_closed(self)


def _membership(job_name: str, plans: dict[int, RingPlan], stage: Stage | None) -> Membership:
    primary: set[int] = set()
    needed: set[int] = set()
    optional: set[int] = set()
    for plan in plans.values():
        if plan.is_retaining and stage is None:
            optional.update(plan.place.ranks)
            continue
        needed.update(plan.place.ranks)
        if plan.place.stage != "last" or stage is not None:
            primary.update(plan.place.ranks)
    return Membership(job_name, frozenset(primary), frozenset(needed), frozenset(optional))
