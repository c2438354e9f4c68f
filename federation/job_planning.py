"""One open generation of a job in the planner's process: plans ahead, journals, then tells.

What is planned waits here until it is durable: a journal that can't be written is tried again, and
no step is planned meanwhile. A journal that turns out damaged makes room for a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from federation.journal import Journal
from federation.journal_place import JournalPlace, LocalPlace
from federation.messages import (
    CalibrationState,
    ChangeMixture,
    ChunksPublished,
    JobEnded,
    JobFailed,
    JobOpened,
    JournalStalled,
    Message,
    MixtureChanged,
    OpenJob,
    PlansMade,
    RewindStream,
    SkipAccepted,
    SkipSteps,
    SourcesStarved,
    StepReleased,
    StepSeconds,
    StepsSkipped,
    StreamRewound,
    decode_chunks,
)
from federation.model.chunk import ChunkMeta
from federation.model.job import decode_job
from federation.model.mixture import integer_shares
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.plan_journal import PlanJournal
from federation.planning.calibrator import EVENT_KIND, Calibrator
from federation.planning.planner import Ended, Starved, StepPlanner
from federation.replay import planned_already, replay, restore_state
from federation.stream_events import (
    change_mixture,
    check_resume,
    first_changed_step,
    forget_events,
    play_back,
    rewind,
    skip_steps,
)
from federation.user_strategy import load_strategy
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import (
    ConfigError,
    DataError,
    InternalError,
    JournalDamagedError,
    JournalUnavailableError,
    LeadershipLostError,
    MsdError,
    ProtocolError,
    encode_error,
)
from msd_client.contract.state import StreamState

log = logging.getLogger(__name__)

STATE_EVERY_STEPS = 64

Tell = Callable[[Message, tuple[bytes, ...]], None]
TellPlans = Callable[[list[StepPlan], list[list[Any]]], None]
"""Sends durable plans, with [step, encoded state behind it] of some."""


class JobPlanning:
    """A generation that is planned. Made by `begin` or `take_over`.

    Args:
        order: What the daemon asked for.
        tell: Sends to the daemon.
        journal: Of this generation; closed by `close`.
        state: The state before the first step that is planned.
    """

    def __init__(
        self,
        order: OpenJob,
        tell: Tell,
        journal: PlanJournal,
        state: StreamState,
    ) -> None:
        self._tell = tell
        self.tell_plans: TellPlans = self._tell_whole_plans
        """How plans leave; a cluster's nodes get a part of each."""
        self._journal = journal
        self._horizon_steps = order.horizon_steps
        self._job = decode_job(order.job)
        tree = ClientPlaceTree.from_mesh(dict(order.mesh), order.rank_nodes)
        self._planner = StepPlanner(self._job, tree, state, load_strategy(self._job))
        self._next_step = state.step
        self._released = state.step - 1
        """Last step that every rank released."""
        self._is_over = False
        self.failure: JobFailed | None = None
        """Why the job can't go on, once it was said."""
        self._starved: tuple[int, ...] = ()
        self._told_starved: set[int] = set()
        """Sources that the daemon was told of and has sent no chunk of since."""
        self._told_plan_step = state.plan_step
        """Up to where the daemon knows what was left out."""
        self._expected_digests: dict[int, str] = {}
        """By step: what a planner before this one journalled and nobody received."""
        self._former_digests: dict[int, str] = {}
        """By step: what a generation before this one planned behind the same state."""
        self._changed_from: int | None = None
        """Plan step of the first event that this generation has and that one had not."""
        self._plans: list[StepPlan] = []
        """Not durable yet."""
        self._states: list[list[Any]] = []
        self._outcome: Starved | Ended | MsdError | None = None
        """What is to be said behind them."""
        self._has_planned = False
        """True until what the last pass came to was told."""
        self.stalled = ""
        """Why they wait; empty where they do not."""
        self._calibrator = None
        """None where the job asks for no calibration."""
        if self._job.calibration is not None:
            self._calibrator = Calibrator(
                self._job.calibration, self._job.cost, tree, order.horizon_steps
            )

    # -- start -----------------------------------------------------------------------------------

    @staticmethod
    def begin(
        order: OpenJob, term: int, tell: Tell, place: JournalPlace | None = None
    ) -> JobPlanning:
        """Open a generation at the state that ranks brought.

        Args:
            order: What the daemon asked for.
            term: Of this planner.
            tell: Sends to the daemon.
            place: Of the journal; default: the file that the order names.

        Raises:
            LeadershipLostError: The journal is another planner's.
            StateMismatchError: It is of another job, or a rewind cut it off.
            JournalUnavailableError: The journal can't be written.
            MsdError: Job, mesh or strategy do not fit.
        """
        job = decode_job(order.job)
        state = StreamState.decode(order.state)
        state.check_job(job.stream_version, job.sample_digest())
        state = state.adopt(job.digest())
        place = place or LocalPlace(Path(order.journal_path))
        journal = place.open_or_begin(order.steps_kept)
        try:
            try:
                return JobPlanning._begin_in(place, journal, order, term, tell, state)
            except JournalDamagedError as error:
                journal = place.replace(journal, error)
                return JobPlanning._begin_in(place, journal, order, term, tell, state)
        except BaseException:
            journal.close()
            raise

    @staticmethod
    def _begin_in(
        place: JournalPlace,
        journal: Journal,
        order: OpenJob,
        term: int,
        tell: Tell,
        state: StreamState,
    ) -> JobPlanning:
        is_fresh = not (state.plan_step or state.event_number)
        check_resume(journal, state, is_fresh=is_fresh)
        if order.forget_after is not None:
            forget_events(journal, order.forget_after, "connect(forget_events_after=)")
        former = planned_already(journal, state, pack(order.job))
        written = PlanJournal.begin(place, journal, order, term, state)
        planning = JobPlanning(order, tell, written, state)
        planning._former_digests = former
        played = play_back(planning._planner, journal)
        planning._note_changed(first_changed_step(state, planning._planner.state()))
        if played:
            log.warning(
                "job %s goes on at step %d: events %s were journalled behind it and hold again",
                planning._job.name,
                state.step,
                ", ".join(f"{it.event_number} ({it.kind} at {it.step})" for it in played[:16]),
            )
        planning._say_opened()
        return planning

    @staticmethod
    def take_over(
        order: OpenJob, term: int, tell: Tell, place: JournalPlace | None = None
    ) -> JobPlanning:
        """Go on with the journal's last generation, from the step that ranks wait for.

        Args:
            order: What the daemon asked for.
            term: Of this planner.
            tell: Sends to the daemon.
            place: Of the journal; default: the file that the order names.

        Raises:
            LeadershipLostError: The journal is another planner's.
            PlannerUnavailableError: The journal lacks that step.
            JournalDamagedError: It can't be read; it is left where it is.
            JournalUnavailableError: It can't be written.
        """
        assert order.resume_step is not None
        place = place or LocalPlace(Path(order.journal_path))
        journal = place.open(order.steps_kept)
        try:
            generation = journal.last_generation()
            replayed = replay(journal, generation, order.resume_step)
            written = PlanJournal(place, journal, generation, order, term, replayed.state)
            planning = JobPlanning(order, tell, written, replayed.state)
            # Ranks may hold all that the planner before planned: a whole horizon beyond that would
            # not fit the pool. The daemon says what they released once it told of all chunks.
            planning._released -= order.horizon_steps
            planning._expected_digests = replayed.digests
            play_back(planning._planner, journal)
            for event in replayed.calibrations:
                if planning._calibrator is not None:
                    planning._weigh(unpack_map(event.body)["weights"], event.step)
        except BaseException:
            journal.close()
            raise
        planning._say_opened()
        return planning

    def _say_opened(self) -> None:
        planner = self._planner
        state, shares = planner.state(), planner.shares()
        opened = JobOpened(
            state.step,
            planner.cursors(),
            planner.carried(),
            [index for index, share in enumerate(shares) if share > 0],
            shares,
            state.dropped.tolist(),
            state.event_number,
            state.pending_steps.tolist(),
            state.pending_shares.tolist(),
            state.plan_step,
            state.pending_skips.tolist(),
        )
        self._tell(opened, ())
        if self._calibrator is not None:
            self._tell(CalibrationState(self._calibrator.status()), ())

    # -- what the daemon says --------------------------------------------------------------------

    def chunk_came(self, meta: ChunkMeta) -> None:
        """Take the metadata of a chunk."""
        self._planner.add_chunk(meta)
        self._told_starved.discard(meta.source_index)

    def loaders_changed(self) -> None:
        """Others load from now on: what the draw waits for is told of again."""
        self._told_starved.clear()

    def take(self, message: Message, frames: tuple[bytes, ...]) -> None:
        """Take what a daemon says of the running generation.

        Raises:
            ProtocolError: It is no message of a daemon.
        """
        match message:
            case ChunksPublished():
                for meta in decode_chunks(message, frames):
                    self.chunk_came(meta)
            case StepReleased():
                self.step_released(message.step)
            case StepSeconds():
                self.calibrate(message)
            case ChangeMixture():
                self.change_mixture(message)
            case SkipSteps():
                self.skip_steps(message)
            case RewindStream():
                self.rewind(message)
            case _:
                raise ProtocolError(f"a daemon may not send {type(message).__name__}")

    def step_released(self, step: int) -> None:
        """Every rank released all steps up to this one."""
        self._released = max(self._released, step)

    def change_mixture(self, message: ChangeMixture) -> None:
        """Journal weights; answers, also with a refusal."""
        # Not the very next step: no rank was told of that one yet, so the states before the change
        # takes effect can all the same know of it from there on.
        first = self._next_step + 1
        step = first if message.at is None else message.at
        plan_step = 0
        try:
            self._check_step("a mixture change at step", step, first)
            plan_step = self._planner.plan_step_of(step)
            change_mixture(
                self._planner,
                self._journal.file,
                self._journal.generation,
                message.weights,
                plan_step,
                message.kind,
            )
        except LeadershipLostError:
            raise  # whether it is durable is the journal's to say, to whoever leads next
        except MsdError as error:
            refused = MixtureChanged(message.request, step, error=encode_error(error))
            self._tell(refused, ())
            return
        self._note_changed(plan_step)
        names = tuple(source.name for source in self._job.sources)
        done = MixtureChanged(
            message.request,
            step,
            self._planner.shares(),
            integer_shares(message.weights, names).tolist(),
            self._next_step,
            plan_step=plan_step,
        )
        self._tell(done, ())

    def skip_steps(self, message: SkipSteps) -> None:
        """Journal a skip; answers, also with a refusal."""
        first, end = message.first, message.end
        try:
            possible = self._planner.plan_step_of(self._next_step + 1)
            if first < possible:
                raise ConfigError(
                    f"a skip from plan step {first} on comes too late, the first possible one is "
                    f"{possible}: write {possible}:{max(end, possible + 1)} or later steps, or "
                    "rewind and skip them (msdctl rewind JOB --to STEP --skip A:B)",
                    seen=first,
                    limit=possible,
                )
            skip_steps(self._planner, self._journal.file, self._journal.generation, first, end)
        except LeadershipLostError:
            raise  # whether it is durable is the journal's to say, to whoever leads next
        except MsdError as error:
            refused = SkipAccepted(message.request, first, end, error=encode_error(error))
            self._tell(refused, ())
            return
        self._note_changed(first)
        state = self._planner.state()
        left_out = _left_out_before(state, first)
        step = first - state.plan_step - left_out + state.step
        self._tell(SkipAccepted(message.request, first, end, step, self._next_step), ())

    def rewind(self, message: RewindStream) -> None:
        """Journal a rewind and plan no more; answers, also with a refusal."""
        try:
            if message.step > self._journal.durable.step:
                raise ConfigError(
                    f"a rewind to step {message.step}: the job has planned up to step "
                    f"{self._journal.durable.step - 1}: write an earlier one",
                    seen=message.step,
                    limit=self._journal.durable.step,
                )
            skip = message.skip
            done = rewind(
                self._journal.file,
                message.step,
                event_number=self._planner.state().event_number,
                skip=None if skip is None else (int(skip[0]), int(skip[1])),
                forget_after=message.forget_after,
            )
        except LeadershipLostError:
            raise  # whether it is durable is the journal's to say, to whoever leads next
        except MsdError as error:
            refused = StreamRewound(message.request, message.step, error=encode_error(error))
            self._tell(refused, ())
            return
        self._is_over = True
        self._plans.clear()
        self._tell(StreamRewound(message.request, done.step, done.plan_step, done.forgotten), ())

    def _check_step(self, what: str, step: int, first: int) -> None:
        """Refuse an event at a step that is planned, or that the stream does not reach.

        Raises:
            ConfigError: It names the first step that is possible, or the limit.
        """
        if step < first:
            raise ConfigError(
                f"{what} {step} comes too late, the first possible step is {first}: write {first} "
                "or a later one",
                seen=step,
                limit=first,
            )
        last = self._job.steps
        if last is not None and step >= last:
            raise ConfigError(
                f"{what} {step} would never take effect, the job ends after step {last - 1}: write "
                "an earlier step",
                seen=step,
                limit=last - 1,
            )

    def calibrate(self, message: StepSeconds) -> None:
        """Take reported times; an accepted fit is journalled before a plan goes by it."""
        calibrator = self._calibrator
        if calibrator is None or self._is_over:
            return
        calibrator.reported(message.reports)
        step = self._next_step
        fit = calibrator.fit_if_due(step)
        if fit is None:
            return
        if fit.is_accepted:
            body = pack({"weights": list(fit.weights), "parts": list(calibrator.parts)})
            try:
                self._journal.append_fit(step, EVENT_KIND, body)
            except JournalUnavailableError:
                return  # another fit comes; nobody has to know of this one
            self._weigh(fit.weights, step)
        self._tell(CalibrationState(calibrator.status()), ())

    def _weigh(self, weights: Any, step: int) -> None:
        assert self._calibrator is not None
        self._planner.weigh_cost(weights, step)
        self._calibrator.accepted(weights, step)

    # -- plans -----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Plan as far ahead as may be, once as many steps have room as a call is worth."""
        if self._is_over or not self._settle():
            return
        last = self._released + self._horizon_steps
        ahead = self._next_step - 1 - self._released
        batch_steps = max(1, self._horizon_steps // 2)
        if ahead > self._horizon_steps - batch_steps and not self._starved:
            return
        self._has_planned = True
        try:
            while self._next_step <= last:
                result = self._planner.plan_step()
                if not isinstance(result, StepPlan):
                    self._outcome = result
                    break
                self._take(result)
        except MsdError as error:
            self._outcome = error
        finally:
            self._settle()

    def _take(self, plan: StepPlan) -> None:
        """Keep a plan until it is durable."""
        expected = self._expected_digests.pop(plan.step, plan.stream_digest)
        if expected != plan.stream_digest:
            raise InternalError(
                f"step {plan.step} planned again differs from the journal: digest "
                f"{plan.stream_digest} instead of {expected}",
                step=plan.step,
            )
        if self._changed_from is not None and plan.plan_step >= self._changed_from:
            self._former_digests.clear()
        former = self._former_digests.pop(plan.step, plan.stream_digest)
        if former != plan.stream_digest:
            # Nobody holds the former step any more, so the run can go on: but not unseen.
            self._former_digests.clear()
            log.error(
                "job %s: step %d comes out otherwise than before the restart (digest %s instead of "
                "%s): a shard, a transform or the machine gave other content; msdctl verify says which",
                self._job.name, plan.step, plan.stream_digest, former,
            )  # fmt: skip
        self._plans.append(plan.with_encoded_delta())
        if self._calibrator is not None:
            self._calibrator.planned(plan.step, self._planner.last_parts())
        self._next_step += 1
        if self._next_step % STATE_EVERY_STEPS == 0:
            self._states.append([plan.step, self._planner.state().encode()])

    def _note_changed(self, plan_step: int | None) -> None:
        """An event changes the stream from a plan step on: nothing behind it is compared."""
        known = [step for step in (self._changed_from, plan_step) if step is not None]
        self._changed_from = min(known, default=None)

    def _settle(self) -> bool:
        """Make durable and tell what was planned; False where it has to wait."""
        if self._plans:
            try:
                self._journal.write(self._plans, self._state_behind(self._plans))
            except JournalUnavailableError as error:
                if not self.stalled:
                    self.stalled = error.message
                    log.warning("job %s waits: %s", self._job.name, error.message)
                    self._tell(JournalStalled(error.message), ())
                return False
            if self.stalled:
                self.stalled = ""
                log.warning("job %s goes on: its journal is written again", self._job.name)
                self._tell(JournalStalled(""), ())
            self._tell_plans()
        if not self._has_planned:
            return True
        outcome, self._outcome, self._has_planned = self._outcome, None, False
        if isinstance(outcome, MsdError):
            self.fail(outcome)
        else:
            self._conclude(outcome)
        return not self._is_over

    def _state_behind(self, plans: list[StepPlan]) -> StreamState:
        """Return the state behind these plans: a skip may have been begun beyond them."""
        state = self._planner.state()
        if self._planner.skipped() is None:
            return state
        state = self._journal.durable
        for plan in plans:
            state = state.apply(plan.delta)
        return state

    def _tell_whole_plans(self, plans: list[StepPlan], states: list[list[Any]]) -> None:
        headers: list[dict[str, Any]] = []
        frames: list[bytes] = []
        counts: list[int] = []
        for plan in plans:
            header, parts = plan.encode()
            headers.append(header)
            frames += parts
            counts.append(len(parts))
        self._tell(PlansMade(headers, counts, states), tuple(frames))

    def _tell_plans(self) -> None:
        self.tell_plans(self._plans, self._states)
        self._told_plan_step = self._plans[-1].plan_step + 1
        self._plans, self._states = [], []

    def _conclude(self, outcome: Starved | Ended | None) -> None:
        if isinstance(outcome, Ended):
            self._is_over = True
            state = b"" if outcome.state is None else outcome.state.encode()
            self._tell(JobEnded(self._next_step, outcome.reason, state), ())
            return
        self._starved = outcome.sources if outcome is not None else ()
        if outcome is not None:
            self._tell_skipped()
        # The daemon feeds a source once a notice: said again once its chunk came and did not help.
        if not self._told_starved.issuperset(self._starved):
            self._told_starved.update(self._starved)
            self._tell(SourcesStarved(list(self._starved)), ())

    def _tell_skipped(self) -> None:
        """Tell of steps that were left out, in whose middle the planner waits for records."""
        skipped = self._planner.skipped()
        if skipped is not None and skipped.plan_step > self._told_plan_step:
            self._told_plan_step = skipped.plan_step
            self._tell(StepsSkipped(skipped.plan_step), skipped.encode())

    def shares(self) -> list[float]:
        """Return the share of each source in the mixture of the next step."""
        return self._planner.shares()

    @property
    def next_step(self) -> int:
        """The step that is planned next."""
        return self._next_step

    def planned_state(self) -> StreamState:
        """Return the state behind the last step that was planned."""
        return self._planner.state()

    def state_behind(self, step: int) -> StreamState:
        """Return the state behind a step whose plan is durable, read from the journal.

        Raises:
            NotFoundError: The journal does not hold it.
        """
        if self._journal.durable.step == step + 1:
            return self._journal.durable
        return restore_state(self._journal.file, step + 1, self._journal.generation)

    def fail(self, error: MsdError, *, is_at_once: bool = False) -> None:
        """Say that the job can't go on; steps before a fault of the data are served.

        Args:
            error: Why.
            is_at_once: Whatever it is, not even planned steps can be served.
        """
        self._is_over = True
        has_steps = isinstance(error, DataError) and not is_at_once
        self.failure = JobFailed(encode_error(error), self._next_step if has_steps else 0)
        self._tell(self.failure, ())

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def _left_out_before(state: StreamState, plan_step: int) -> int:
    """Return how many plan steps are left out from the next one up to another."""
    skips = state.pending_skips
    return sum(
        max(0, min(end, plan_step) - max(first, state.plan_step)) for first, end in skips.tolist()
    )
