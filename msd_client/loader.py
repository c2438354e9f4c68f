"""The stream of one rank: announcements turned into steps and batches, and the loader's state."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from msd_client.arguments import saved_bytes, shown
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec, Stage
from msd_client.contract.errors import (
    AvailabilityError,
    LeaseExhausted,
    MsdError,
    SessionClosedError,
    StateMismatchError,
    UsageError,
)
from msd_client.contract.ring_layout import RingLayout
from msd_client.contract.state import StateDelta, StreamState
from msd_client.process_bound import ProcessBound
from msd_client.ring_reader import RingReader
from msd_client.session import Session
from msd_client.step import Step

log = logging.getLogger(__name__)

ArrayKind = Literal["torch", "numpy"]

RUNNING_TIMEOUT_S = 5.0
LOSS_TIMEOUT_S = 30.0
DONE_TIMEOUT_S = 5.0
RESUME_TIMEOUT_S = 60.0
REPORT_S_MAX = 1e6


@dataclass
class SkippedBatches:
    """What a trainer left of its steps without saying that it is meant."""

    microbatches: int = 0
    is_told: bool = False

    def add(self, step: Step, stage: Stage, job_name: str) -> None:
        """Count what is left of a step; warn once. A middle pipeline stage needs no batch."""
        self.microbatches += step.left
        if self.is_told or stage == "middle":
            return
        self.is_told = True
        log.warning(
            "step %d of job %r: %d of %d microbatches were not taken; they are skipped and count "
            "as trained. Call step.skip_rest() where that is meant (told once)",
            step.number,
            job_name,
            step.left,
            step.microbatches,
        )


class TrainLoader(ProcessBound):
    """The training stream of one rank. Iterating opens a generation with all ranks of the mesh."""

    def __init__(
        self,
        session: Session,
        joined: Mapping[str, Any],
        rank: int,
        as_: ArrayKind,
        *,
        is_copying: bool,
        skipped: SkippedBatches | None = None,
        accept: tuple[str, ...] = (),
        reattach: Callable[[], Session] | None = None,
    ) -> None:
        self._session = session
        self._reattach = reattach
        """Joins the next daemon; None: this rank ends with its own."""
        self._leave_after: int | None = None
        """The daemon restarts behind this step."""
        self._accept = accept
        self._rank = rank
        self._as = as_
        self._is_copying = is_copying
        self.job_name: str = joined["job"]
        self.job_digest: str = joined["digest"]
        self.sample_digest: str = joined["sample_digest"]
        self.sources: tuple[str, ...] = tuple(joined["sources"])
        self.dp_group: int = joined["dp_group"]
        self.dp_count: int = joined["dp_count"]
        self.stage: Stage = joined["stage"]
        """Which fields this rank's pipeline stage reads."""
        self.cp_rank: int = joined["cp_rank"]
        self.averaging_ranks: int = joined["dp_count"] * joined["cp_count"]
        self.source_loss_weights: tuple[float, ...] = tuple(joined["loss_weights"])
        """Of each source; empty where batches have no `loss_weights`."""
        self.wants_reports = bool(joined.get("wants_reports", False))
        """True where the job has a `calibration`: times given to `report_step` are used."""
        self.deadlines: dict[str, float] = joined["deadlines"]
        fresh = StreamState.initial(
            self.job_digest,
            self.sources,
            joined["stream_version"],
            sample_digest=self.sample_digest,
        )
        self._stream_version = fresh.stream_version
        self._state = fresh.encode()
        self._next_number = 0
        self._deltas: list[bytes] = []
        """Differences of completed steps since `_state`; every 64th step brings a whole state."""
        self._reader: RingReader | None = None
        self._generation = 0
        self._is_started = False
        self._is_closed = False
        self._current: Step | None = None
        self._current_note: dict[str, Any] | None = None
        self._waited_s = 0.0
        """For the batch that comes next."""
        self._dropped: weakref.WeakSet[Step] = weakref.WeakSet()
        """Steps that a state was loaded in the middle of."""
        self._skipped = skipped or SkippedBatches()
        self._end: str | None = None
        self._is_first_batch = True
        self._spec: BatchSpec | None = None
        self._old_readers: dict[int, RingReader] = {}
        """Of generations that are over, while views of their slots live."""

    @property
    def session(self) -> Session:
        """The connection to the daemon; another one behind its restart."""
        return self._session

    @property
    def skipped_microbatches(self) -> int:
        """Microbatches that were not taken when the next step was asked for, without `skip_rest`."""
        return self._skipped.microbatches

    def __repr__(self) -> str:
        step = self._next_number if self._current is None else self._current.number
        return (
            f"TrainLoader({self.job_name!r}, rank {self._rank}, dp_group {self.dp_group} of "
            f"{self.dp_count}, stage {self.stage}, at step {step})"
        )

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, bytes]:
        """Return the state after the last completed step, equal on all ranks.

        Legal at any time, also before the first batch and after the daemon went away. A step is
        completed once its last microbatch was given out; inside a step it is the one before.

        Raises:
            UsageError: This rank is of a middle pipeline stage that does not read the stream, while
                the others do: its copy would be stale. Save another rank's.
        """
        if self.stage == "middle" and not self._generation:
            self._refuse_stale()
        return {"msd": self._encoded_state()}

    def _encoded_state(self) -> bytes:
        if self._current is not None and self._current.is_complete:
            self._complete_current()
        if self._deltas:
            state = StreamState.decode(self._state)
            for encoded in self._deltas:
                state = state.apply(StateDelta.decode(encoded))
            self._state, self._deltas = state.encode(), []
        return self._state

    def _refuse_stale(self) -> None:
        try:
            is_running = self._session.request("running", RUNNING_TIMEOUT_S).body["ok"]["running"]
        except MsdError:
            return  # no daemon to ask: what this rank was given last is all there is
        if is_running:
            raise UsageError(
                f"rank {self._rank} is of a middle pipeline stage that has not read the running "
                "stream, so it has no state of it: save the state of a rank that reads, or iterate "
                "here too (it costs no payload)",
                rank=self._rank,
            )

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from a saved state; batches already announced are dropped.

        Where the job was changed since, the changes are told in the log of rank 0: those that move
        no sample, those that hold from the next step on (weights; sources added, removed, renamed),
        and those that `connect(accept=...)` accepted.

        Raises:
            StateMismatchError: Not a state of this job, damaged, or the job was changed in a way that
                was not accepted.
        """
        try:
            encoded = saved_bytes(state["msd"])
        except (KeyError, TypeError, IndexError) as error:
            raise StateMismatchError('a state is a dict with the key "msd"') from error
        decoded = StreamState.decode(encoded)
        decoded.check_version(self._stream_version)
        if decoded.job_digest == self.job_digest and decoded.sample_digest == self.sample_digest:
            self._state = encoded
        else:
            self._state = self._adapted(decoded, encoded)
        self._next_number = decoded.step
        self._deltas = []
        if self._current is not None:
            self._dropped.add(self._current)
        self._current = self._current_note = None
        self._end = None
        self._session.ready.clear()
        self._session.notes.clear()
        self._stop_reading()

    def _adapted(self, state: StreamState, encoded: bytes) -> bytes:
        """Return a state of a job that was changed since as one of this job.

        Raises:
            StateMismatchError: A change is refused.
        """
        accept = list(self._accept)
        try:
            answer = self._session.request(
                "resume", RESUME_TIMEOUT_S, state=encoded, accept=accept
            ).body["ok"]
        except AvailabilityError:
            # No daemon to ask: what moves no sample needs none.
            state.check_job(self._stream_version, self.sample_digest)
            return state.adopt(self.job_digest).encode()
        self.job_digest, self.sample_digest = answer["digest"], answer["sample_digest"]
        level = logging.WARNING if self._rank == 0 else logging.DEBUG
        for key, change_class, text in answer["changes"]:
            if change_class == "refused":  # by itself: the daemon would not have answered
                change_class, text = "accepted", text.replace("where accepted, ", "", 1)
            log.log(level, "job %r was changed, %s: %s: %s", self.job_name, change_class, key, text)
        return bytes(answer["state"])

    def _stop_reading(self) -> None:
        """Tell the daemon that this rank is done with its generation: the next one may begin."""
        if self._is_started:
            self._is_started = False
            with contextlib.suppress(MsdError):  # a state may be loaded after the daemon's death
                self._session.request("done", DONE_TIMEOUT_S)

    def report_step(self, number: int, seconds: float) -> bool:
        """Report how long this rank computed for a step, so that costs can be calibrated.

        Give forward and backward passes alone, not what was waited for: data, other ranks' gradients.
        Never waits: one small message, and none where the job has no `calibration`.

        Args:
            number: `step.number`.
            seconds: Above 0.

        Returns:
            True where the report went out.

        Raises:
            UsageError: The number or the seconds are none.
        """
        step, nanoseconds = _report_values(number, seconds)
        if not self.wants_reports or not self._generation:
            return False
        return self._session.notify(
            "report", generation=self._generation, step=step, nanoseconds=nanoseconds
        )

    def report_loss(self, losses: Mapping[str, float]) -> None:
        """Report the losses of the current step by source to the job's `mixture.hook`.

        Any rank may; the hook gets the mean of all that was reported since its last call. A request
        of some hundred microseconds: call it where losses are logged anyway. Losses that are not
        finite, or bools, are left out.

        Args:
            losses: Mean loss by name of the source; numbers, arrays or tensors of one.

        Raises:
            UsageError: The job has no hook, no step was given out yet, or the losses are no map of
                names to numbers.
            ConfigError: A source is unknown, or the hook's last call failed: it is told once, the
                weights stay what they were.
        """
        step = self._next_number - 1 if self._current is None else self._current.number
        if step < 0:
            raise UsageError("report_loss: no step was given out yet: call it inside the loop")
        plain = _losses(losses)
        self._session.request("loss", LOSS_TIMEOUT_S, job=self.job_name, step=step, losses=plain)

    # -- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        while (step := self._next_step()) is not None:
            yield step

    def _next_step(self) -> Step | None:
        if self._is_closed:
            raise SessionClosedError("this loader is closed: connect again")
        self._session.check_process()
        if not self._is_started:
            self._start()
        if self._current is not None:
            if not self._current.is_complete:
                self._skipped.add(self._current, self.stage, self.job_name)
            self._current.skip_rest()
            self._complete_current()
            self._current = None
        began = time.monotonic()
        note = self._next_note()
        while note is None:
            self._attach_again()
            note = self._next_note()
        self._session.notes.popleft()
        if note["note"] == "ended":
            self._end = note["reason"]
            if note["state"]:
                self._state, self._deltas = note["state"], []
            self._stop_reading()
            return None
        step = Step(self, note)
        step.stats["wait_s"] = time.monotonic() - began
        self._waited_s = step.stats["wait_s"]
        self._current = step
        self._current_note = note
        return step

    def _next_note(self) -> dict[str, Any] | None:
        """Return what comes next; wait for it. None: the daemon restarts behind the last step."""
        if self._take_notes() is None and self._reader is not None and not self._must_leave():
            self._check_leases(self._reader)  # a step is announced with its first microbatch
        self._wait(
            lambda: self._take_notes() is not None or self._must_leave(),
            f"step {self._next_number}",
        )
        return None if self._must_leave() else self._take_notes()

    def _must_leave(self) -> bool:
        self._take_notes()  # it may be the next one
        return self._leave_after is not None and self._next_number > self._leave_after

    def _attach_again(self) -> None:
        """Leave a daemon that restarts, and go on with the next one where this one ends.

        All ranks leave behind one step, so all bring one state. Views that live stay valid.
        """
        assert self._reattach is not None
        log.info(
            "job %r: the daemon restarts, rank %d goes on with the next one at step %d",
            self.job_name, self._rank, self._next_number,
        )  # fmt: skip
        self._encoded_state()
        self._session.close(self.close())
        self._session = self._reattach()
        self._is_closed = self._is_started = False
        self._leave_after, self._generation = None, 0
        self._old_readers = {}
        self._start()

    def next_batch(self, step: Step) -> Batch:
        """Return this rank's next microbatch of `step`; waits for it (see `deadlines`)."""
        if self._is_closed:
            raise SessionClosedError("this loader is closed: connect again")
        self._session.check_process()
        if step in self._dropped:
            raise UsageError(
                f"step {step.number}: a state was loaded since: go on with the next step of "
                "data.train"
            )
        if step is not self._current:
            raise UsageError(
                f"step {step.number} is over: iterate a step before asking the loader for the next"
            )
        reader = self._reader
        assert reader is not None
        session = self._session
        if not session.ready:
            self._check_leases(reader)
            began = time.monotonic()
            self._wait(lambda: bool(session.ready), f"a microbatch of step {step.number}")
            waited_s = time.monotonic() - began
            step.stats["wait_s"] += waited_s
            self._waited_s += waited_s
        event = session.ready.popleft()
        session.taken = event.sequence + 1
        if self._waited_s:
            session.waited_ns[event.sequence] = int(self._waited_s * 1e9)
            self._waited_s = 0.0
        self._is_first_batch = False
        lease = reader.open(event.slot, event.sequence, event.generation, event.payload_bytes)
        return Batch.from_lease(
            lease, self._spec, as_=self._as, copy=self._is_copying, cp_rank=self.cp_rank
        )

    def _check_leases(self, reader: RingReader) -> None:
        """Refuse to wait for a slot while this rank holds all of them."""
        self._session.take_in()
        reader.poll()
        while not self._session.ready and len(reader.held) == reader.layout.slots:
            if not reader.pending_count:
                break
            reader.wait_oldest_copy()
            self._session.take_in()
        if self._session.ready or self._session.notes or len(reader.held) < reader.layout.slots:
            return
        raise LeaseExhausted(
            f"rank {self._rank} holds all {reader.layout.slots} slots of its ring and asks for "
            "another microbatch: drop batches (del, or batch.release()) before the next one, pass "
            "copy=True to connect, batch.clone() what you keep, or raise ring.slots",
            held=len(reader.held),
            slots=reader.layout.slots,
        )

    def _start(self) -> None:
        state = self._encoded_state()
        session = self._session
        session.clear_failure()
        session.ready.clear()
        session.notes.clear()
        session.waited_ns.clear()
        session.taken = 0
        held = self._held_generations()
        reply = session.request("start", self.deadlines["join_s"], state=state, held=held)
        body = reply.body["ok"]
        layout = RingLayout.decode(body["layout"])
        spec = BatchSpec.decode(body["spec"])
        if self._reader is not None:
            self._reader.close()
            self._old_readers[self._generation] = self._reader
        (fd,) = reply.fds
        generation = body["generation"]
        # Slots of the generation before may have been announced until the daemon answered.
        session.ready = deque(e for e in session.ready if e.generation == generation)
        self._reader = RingReader(fd, layout, on_release=_releaser(session, generation))
        os.close(fd)
        self._spec = spec
        self._generation = session.generation = generation
        self._is_started = True
        self._is_first_batch = True

    def _held_generations(self) -> list[int]:
        """Return the generations before the next one of which views hold batches still."""
        if self._reader is not None:
            self._reader.poll()
        for generation, reader in list(self._old_readers.items()):
            reader.poll()
            if not reader.held:
                del self._old_readers[generation]
        held = list(self._old_readers)
        if self._reader is not None and self._reader.held:
            held.append(self._generation)
        return held

    def _take_notes(self) -> dict[str, Any] | None:
        notes = self._session.notes
        while notes:
            is_ours = notes[0].get("generation") == self._generation
            if is_ours and notes[0]["note"] == "restarting" and self._reattach is not None:
                self._leave_after = int(notes[0]["after"])
            if is_ours and notes[0]["note"] in (
                "step",
                "ended",
            ):
                return notes[0]
            notes.popleft()
        return None

    def _wait(self, is_done: Any, what: str) -> None:
        key = "first_batch_s" if self._is_first_batch else "next_batch_s"
        self._session.wait(is_done, self.deadlines[key], f"{what} of job {self.job_name!r}")

    def _complete_current(self) -> None:
        """Move the state past the current step, once."""
        note, self._current_note = self._current_note, None
        if note is None:
            return
        self._next_number = note["step"] + 1
        if note["state"]:
            self._state, self._deltas = note["state"], []
        else:
            self._deltas.append(note["delta"])

    def close(self) -> set[tuple[int, int]]:
        """Stop reading; live views stay valid. Return (slot, sequence) of what they hold."""
        self._is_closed = True
        reader, self._reader = self._reader, None
        if reader is None:
            return set()
        reader.poll()
        held = set(reader.held.items())
        reader.close()
        return held


def _releaser(session: Session, generation: int) -> Callable[[int, int], None]:
    """Return what a finalizer calls; it must not keep the loader alive, nor wait."""

    def release(slot: int, sequence: int) -> None:
        session.release(slot, sequence, generation)

    return release


def _losses(given: object) -> dict[str, float]:
    """Return losses as floats, nan for those of no meaning, which are left out."""
    remedy = 'write numbers by source, like {"web": 2.1, "code": 1.3}'
    if not isinstance(given, Mapping):
        raise UsageError(f"report_loss: losses is {shown(given)}: {remedy}")
    found = {}
    for name, loss in given.items():
        if not isinstance(name, str):
            raise UsageError(f"report_loss: a source is {shown(name)}: {remedy}")
        try:
            if isinstance(loss, (str, bytes, bytearray)):
                raise TypeError
            found[name] = math.nan if isinstance(loss, (bool, np.bool_)) else float(loss)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's is the last
            raise UsageError(f"report_loss: loss of {name!r} is {shown(loss)}: {remedy}") from None
    return found


def _report_values(number: object, seconds: object) -> tuple[int, int]:
    """Return a report's step and nanoseconds."""
    if isinstance(number, bool) or not isinstance(number, Integral) or int(number) < 0:
        raise UsageError(f"report_step: number is {number!r}: pass step.number")
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise UsageError(f"report_step: seconds is {seconds!r}: pass a number of seconds")
    if not 0 < float(seconds) < REPORT_S_MAX:
        raise UsageError(
            f"report_step: seconds is {seconds!r}: it is above 0 and below {REPORT_S_MAX:g}; measure "
            "with time.monotonic(), on a GPU after synchronize() or with events"
        )
    return int(number), max(1, round(float(seconds) * 1e9))
