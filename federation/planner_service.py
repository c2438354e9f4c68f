"""The planner process: plans every job of its nodes, one step after the other, and journals first.

Root of its own process: one blocking loop over a ROUTER socket and the link to whoever started it
(end of file there means: leave). Several steps are planned per call, committed in one transaction
and sent in one message. All decisions are in federation.planning; this file carries them out.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from federation.journal import SNAPSHOT_EVERY_STEPS, EventRecord, Journal, StepRecord
from federation.messages import (
    CalibrationState,
    ChangeMixture,
    ChunksPublished,
    CloseJob,
    Envelope,
    JobEnded,
    JobFailed,
    JobOpened,
    Message,
    MixtureChanged,
    OpenJob,
    PlansMade,
    SourcesStarved,
    StepReleased,
    StepSeconds,
    decode_chunks,
    decode_envelope,
)
from federation.model.job import ResolvedJob, decode_job
from federation.model.mixture import integer_shares
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.calibrator import EVENT_KIND, Calibrator
from federation.planning.planner import Ended, Starved, StepPlanner
from federation.transport import SequenceGuard, prepare_socket
from federation.user_strategy import load_strategy
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import (
    ConfigError,
    DataError,
    InternalError,
    MsdError,
    PlannerUnavailableError,
    ProtocolError,
    encode_error,
)
from msd_client.contract.state import StateDelta, StreamState

STATE_EVERY_STEPS = 64
PENDING_CHANGES_MAX = 64
"""Mixture changes that may wait for their steps; a state holds the shares of each."""


def run(link: socket.socket) -> None:
    """Serve until the starter's end of `link` closes.

    The link first carries one msgpack map, length-prefixed (u32): {endpoint, term}; the answer is
    one byte once the endpoint is bound.
    """
    size = int.from_bytes(_read_exactly(link, 4), "little")
    config = unpack_map(_read_exactly(link, size))
    context = zmq.Context(io_threads=1)
    router = context.socket(zmq.ROUTER)
    try:
        prepare_socket(router)
        router.bind(config["endpoint"])
        link.sendall(b"r")
        PlannerService(router, link, config["term"]).serve()
    finally:
        router.close(linger=0)
        context.term()


def _read_exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return data


@dataclass
class _JobPlanning:
    """One open generation of a job."""

    identity: bytes
    generation: int
    job: ResolvedJob
    planner: StepPlanner
    journal: Journal
    journal_generation: int
    """Generation in the journal, which counts over all runs of the job."""
    horizon_steps: int
    released: int
    """Last step that every rank released."""
    next_step: int
    starved: tuple[int, ...] = ()
    told_starved: set[int] = field(default_factory=set)
    """Sources that the daemon was told of and has sent no chunk of since."""
    is_over: bool = False
    expected_digests: dict[int, str] = field(default_factory=dict)
    """By step: what a planner before this one journalled and nobody received."""
    calibrator: Calibrator | None = None
    """None where the job asks for no calibration."""

    @property
    def batch_steps(self) -> int:
        """How many steps a planning call waits for room for."""
        return max(1, self.horizon_steps // 2)


class Replayed(NamedTuple):
    """What a journal says of a generation up to a step."""

    state: StreamState
    events: list[EventRecord]
    """Accepted and not yet in the state; those of calibration are in none: all of the generation."""
    digests: dict[int, str]
    """Of steps from there on that were journalled already."""


def replay(journal: Journal, generation: int, step: int) -> Replayed:
    """Return the state before `step` and what was journalled behind it; those steps are dropped.

    Raises:
        PlannerUnavailableError: The journal lacks a step; start again from the trainers' state.
    """
    snapshot = journal.last_snapshot(generation, step)
    if snapshot is None:
        raise PlannerUnavailableError(
            f"the journal has no snapshot at or before step {step}: connect again with the last state"
        )
    state = StreamState.decode(snapshot[1])
    digests: dict[int, str] = {}
    for record in journal.steps_after(generation, state.step):
        if record.step >= step:
            digests[record.step] = record.digest
            continue
        if record.step != state.step:
            break
        state = state.apply(StateDelta.decode(record.delta))
    if state.step != step:
        raise PlannerUnavailableError(
            f"the journal ends at step {state.step}, step {step} is wanted: connect again with the "
            "last state",
            step=step,
        )
    journal.drop_steps(generation, step)
    # Events are numbered over all generations; those of this one follow its first state's count.
    # Calibration is none of their business: it moves no sample.
    known = state.event_number - journal.first_event_number(generation)
    events = journal.events(generation)
    counted = [event for event in events if event.kind != EVENT_KIND]
    calibrations = [event for event in events if event.kind == EVENT_KIND]
    return Replayed(state, counted[known:] + calibrations, digests)


def _weigh(planner: StepPlanner, calibrator: Calibrator, weights: Sequence[int], step: int) -> None:
    planner.weigh_cost(weights, step)
    calibrator.accepted(weights, step)


def _check_change(planning: _JobPlanning, step: int, first: int) -> None:
    """Refuse a mixture change at a step that is planned, or that the stream does not reach.

    Raises:
        ConfigError: It names the first step that is possible, or the limit.
    """
    if step < first:
        raise ConfigError(
            f"a mixture change at step {step} comes too late, the first possible step is {first}: "
            f"write {first} or a later one",
            seen=step,
            limit=first,
        )
    last = planning.job.steps
    if last is not None and step >= last:
        raise ConfigError(
            f"a mixture change at step {step} would never take effect, the job ends after step "
            f"{last - 1}: write an earlier step",
            seen=step,
            limit=last - 1,
        )
    waiting = len(planning.planner.state().pending_steps)
    if waiting >= PENDING_CHANGES_MAX:
        raise ConfigError(
            f"{waiting} mixture changes wait for their steps already, at most {PENDING_CHANGES_MAX} "
            "may, as every state holds them: write a schedule into the job",
            seen=waiting,
            limit=PENDING_CHANGES_MAX,
        )


class PlannerService:
    """Plans the jobs of the daemons that write to its ROUTER socket."""

    def __init__(self, router: zmq.Socket[bytes], link: socket.socket, term: int) -> None:
        self._router = router
        self._link = link
        self._term = term
        self._jobs: dict[str, _JobPlanning] = {}
        self._guards: dict[bytes, SequenceGuard] = {}
        self._sequences: dict[bytes, int] = {}

    def serve(self) -> None:
        """Serve until the link closes."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._link, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._link.fileno() in ready:
                return
            touched: dict[str, None] = {}
            while True:
                try:
                    frames = self._router.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                job = self._receive(frames)
                if job is not None:
                    touched[job] = None
            for job in touched:
                planning = self._jobs.get(job)
                if planning is not None:
                    self._guarded(job, planning.identity, planning.generation, self._advance)

    def _receive(self, frames: list[bytes]) -> str | None:
        identity, *rest = frames
        try:
            envelope = decode_envelope(rest)
            self._guards.setdefault(identity, SequenceGuard(repr(identity))).check(
                envelope.sequence
            )
        except ProtocolError as error:
            failure = JobFailed(encode_error(error))
            self._send(identity, "", 0, failure)
            return None
        self._guarded(
            envelope.job, identity, envelope.generation, lambda _: self._handle(identity, envelope)
        )
        return envelope.job

    def _guarded(self, job: str, identity: bytes, generation: int, action: Any) -> None:
        try:
            action(job)
        except MsdError as error:
            self._fail(job, identity, generation, error)
        except (
            ArithmeticError,
            LookupError,
            ValueError,
            TypeError,
            AssertionError,
            OSError,
        ) as error:
            import traceback

            traceback.print_exc()
            inner = InternalError(f"planner: {type(error).__name__}: {error}")
            self._fail(job, identity, generation, inner)

    def _fail(self, job: str, identity: bytes, generation: int, error: MsdError) -> None:
        planning = self._jobs.get(job)
        next_step = 0
        if planning is not None:
            planning.is_over = True
            if isinstance(error, DataError):
                next_step = planning.next_step  # the data before the fault is good
        self._send(identity, job, generation, JobFailed(encode_error(error), next_step))

    def _send(
        self,
        identity: bytes,
        job: str,
        generation: int,
        message: Message,
        frames: tuple[bytes, ...] = (),
    ) -> None:
        sequence = self._sequences.get(identity, 0)
        self._sequences[identity] = sequence + 1
        envelope = Envelope(job, generation, self._term, sequence, message, frames)
        self._router.send_multipart([identity, *envelope.encode()])

    def _handle(self, identity: bytes, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, OpenJob):
            self._open(identity, envelope, message)
            return
        planning = self._jobs.get(envelope.job)
        if planning is None or planning.generation != envelope.generation:
            return  # a message of a generation that ended meanwhile
        match message:
            case ChunksPublished():
                for meta in decode_chunks(message, envelope.frames):
                    planning.planner.add_chunk(meta)
                    planning.told_starved.discard(meta.source_index)
            case StepReleased():
                planning.released = max(planning.released, message.step)
            case StepSeconds():
                self._calibrate(envelope.job, planning, message)
            case ChangeMixture():
                self._change_mixture(envelope.job, planning, message)
            case CloseJob():
                planning.journal.close()
                del self._jobs[envelope.job]
            case _:
                raise ProtocolError(f"a daemon may not send {type(message).__name__}")

    def _open(self, identity: bytes, envelope: Envelope, message: OpenJob) -> None:
        old = self._jobs.pop(envelope.job, None)
        if old is not None:
            old.journal.close()
        job = decode_job(message.job)
        tree = ClientPlaceTree.from_mesh(dict(message.mesh))
        journal = Journal(Path(message.journal_path))
        if message.resume_step is None:
            state = StreamState.decode(message.state)
            state.check_job(job.stream_version, job.sample_digest())
            state = state.adopt(job.digest())
            journal_generation = journal.open_generation(
                state.step,
                state.encode(),
                state.event_number,
                job_digest=job.digest(),
                job=pack(message.job),
                mesh=pack({"mesh": message.mesh}),
            )
            replayed = Replayed(state, [], {})
            released = state.step - 1
        else:
            journal_generation = journal.last_generation()
            replayed = replay(journal, journal_generation, message.resume_step)
            state = replayed.state
            # Ranks may hold all that the planner before planned: a whole horizon beyond that would
            # not fit the pool. The daemon says what they released once it told of all chunks.
            released = state.step - 1 - message.horizon_steps
        planner = StepPlanner(job, tree, state, load_strategy(job))
        calibrator = None
        if job.calibration is not None:
            calibrator = Calibrator(job.calibration, job.cost, tree, message.horizon_steps)
        for event in replayed.events:
            if event.kind != EVENT_KIND:
                planner.change_mixture(unpack_map(event.body), event.step)
            elif calibrator is not None:
                _weigh(planner, calibrator, unpack_map(event.body)["weights"], event.step)
        planning = _JobPlanning(
            identity,
            envelope.generation,
            job,
            planner,
            journal,
            journal_generation,
            message.horizon_steps,
            released=released,
            next_step=state.step,
            expected_digests=replayed.digests,
            calibrator=calibrator,
        )
        self._jobs[envelope.job] = planning
        shares = planner.shares()
        told = planner.state()
        opened = JobOpened(
            state.step,
            planner.cursors(),
            planner.carried(),
            [index for index, share in enumerate(shares) if share > 0],
            shares,
            state.dropped.tolist(),
            told.event_number,
            told.pending_steps.tolist(),
            told.pending_shares.tolist(),
        )
        self._send(identity, envelope.job, envelope.generation, opened)
        if calibrator is not None:
            status = CalibrationState(calibrator.status())
            self._send(identity, envelope.job, envelope.generation, status)

    def _change_mixture(self, job: str, planning: _JobPlanning, message: ChangeMixture) -> None:
        # Not the very next step: no rank was told of that one yet, so the states before the change
        # takes effect can all the same know of it from there on.
        first = planning.next_step + 1
        step = first if message.at is None else message.at
        try:
            _check_change(planning, step, first)
            planning.planner.change_mixture(message.weights, step)
        except MsdError as error:
            refused = MixtureChanged(message.request, step, error=encode_error(error))
            self._send(planning.identity, job, planning.generation, refused)
            return
        planning.journal.append_event(
            planning.journal_generation, step, message.kind, pack(message.weights)
        )
        names = tuple(source.name for source in planning.job.sources)
        done = MixtureChanged(
            message.request,
            step,
            planning.planner.shares(),
            integer_shares(message.weights, names).tolist(),
            planning.next_step,
        )
        self._send(planning.identity, job, planning.generation, done)

    def _calibrate(self, job: str, planning: _JobPlanning, message: StepSeconds) -> None:
        """Take reported times; an accepted fit is journalled before a plan goes by it."""
        calibrator = planning.calibrator
        if calibrator is None or planning.is_over:
            return
        calibrator.reported(message.reports)
        step = planning.next_step
        fit = calibrator.fit_if_due(step)
        if fit is None:
            return
        if fit.is_accepted:
            body = pack({"weights": list(fit.weights), "parts": list(calibrator.parts)})
            planning.journal.append_event(planning.journal_generation, step, EVENT_KIND, body)
            _weigh(planning.planner, calibrator, fit.weights, step)
        told = CalibrationState(calibrator.status())
        self._send(planning.identity, job, planning.generation, told)

    def _advance(self, job: str) -> None:
        planning = self._jobs[job]
        if planning.is_over:
            return
        last = planning.released + planning.horizon_steps
        ahead = planning.next_step - 1 - planning.released
        if ahead > planning.horizon_steps - planning.batch_steps and not planning.starved:
            return
        plans: list[StepPlan] = []
        states: list[list[Any]] = []
        outcome: Starved | Ended | None = None
        try:
            while planning.next_step <= last:
                result = planning.planner.plan_step()
                if isinstance(result, (Starved, Ended)):
                    outcome = result
                    break
                plans.append(result)
                if planning.calibrator is not None:
                    planning.calibrator.planned(result.step, planning.planner.last_parts())
                planning.next_step += 1
                if planning.next_step % STATE_EVERY_STEPS == 0:
                    states.append([result.step, planning.planner.state().encode()])
        finally:
            if plans:
                self._publish(job, planning, plans, states)
        self._conclude(job, planning, outcome)

    def _publish(
        self, job: str, planning: _JobPlanning, plans: list[StepPlan], states: list[list[Any]]
    ) -> None:
        for plan in plans:
            expected = planning.expected_digests.pop(plan.step, plan.stream_digest)
            if expected != plan.stream_digest:
                raise InternalError(
                    f"step {plan.step} planned again differs from the journal: digest "
                    f"{plan.stream_digest} instead of {expected}",
                    step=plan.step,
                )
        records = [StepRecord(plan.step, plan.delta.encode(), plan.stream_digest) for plan in plans]
        last_step = plans[-1].step + 1
        is_due = last_step // SNAPSHOT_EVERY_STEPS > plans[0].step // SNAPSHOT_EVERY_STEPS
        snapshot = (last_step, planning.planner.state().encode()) if is_due else None
        planning.journal.append_steps(planning.journal_generation, self._term, records, snapshot)
        headers: list[dict[str, Any]] = []
        frames: list[bytes] = []
        counts: list[int] = []
        for plan in plans:
            header, parts = plan.encode()
            headers.append(header)
            frames += parts
            counts.append(len(parts))
        message = PlansMade(headers, counts, states)
        self._send(planning.identity, job, planning.generation, message, tuple(frames))

    def _conclude(self, job: str, planning: _JobPlanning, outcome: Starved | Ended | None) -> None:
        if isinstance(outcome, Ended):
            planning.is_over = True
            state = b"" if outcome.state is None else outcome.state.encode()
            ended = JobEnded(planning.next_step, outcome.reason, state)
            self._send(planning.identity, job, planning.generation, ended)
            return
        starved = outcome.sources if outcome is not None else ()
        planning.starved = starved
        # The daemon feeds a source once a notice: said again once its chunk came and did not help.
        if not planning.told_starved.issuperset(starved):
            planning.told_starved.update(starved)
            notice = SourcesStarved(list(starved))
            self._send(planning.identity, job, planning.generation, notice)
