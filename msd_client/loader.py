"""What a trainer iterates: steps of microbatches, their announcements, and the loader's state.

with msd_client.connect("job.yaml", mesh={"dp": 2, "tp": 2}) as data:
    for step in data.train:
        for microbatch in step:
            loss = model(microbatch.tokens, microbatch.position_ids)
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import (
    LeaseExhausted,
    MsdError,
    SessionClosedError,
    StateMismatchError,
    UsageError,
)
from msd_client.contract.paths import default_socket_path
from msd_client.contract.ring_layout import RingLayout
from msd_client.contract.state import StateDelta, StreamState
from msd_client.daemon_start import open_or_start
from msd_client.mesh import Place, find_place
from msd_client.ring_reader import RingReader
from msd_client.session import Session

ArrayKind = Literal["torch", "numpy"]


class Step:
    """One optimizer step: iterate it once for this rank's microbatches.

    Attributes:
        number: The trainer's step number, dense.
        plan_step: The planner's number of it (differs after skips).
        valid_tokens: Labels trained in the whole step, all ranks, known before its first microbatch.
        valid_segments: Segments with a trained label, all ranks.
        stats: wait seconds of this rank, shares wanted and realised, imbalance, fill, per source.
    """

    def __init__(self, loader: TrainLoader, meta: Mapping[str, Any]) -> None:
        self._loader = loader
        self.number: int = meta["step"]
        self.plan_step: int = meta["plan_step"]
        self.valid_tokens: int = meta["valid_tokens"]
        self.valid_segments: int = meta["valid_segments"]
        self.microbatches: int = meta["microbatches"]
        self.stats: dict[str, Any] = dict(meta["stats"])
        self.stats["wait_s"] = 0.0
        self._given = 0
        self._device: tuple[Any, bool] | None = None

    def to(self, device: Any, *, non_blocking: bool = True) -> Step:
        """Give every microbatch on this device."""
        self._device = (device, non_blocking)
        return self

    def loss_scale(self, reduction: Literal["mean", "sum"] = "mean") -> float:
        """Return the factor for the summed loss of a microbatch of this rank.

        `mean`: dp_count * cp_count / valid_tokens, so that gradients averaged over data-parallel
        ranks equal the mean over every trained token of the step. `sum`: dp_count * cp_count.
        """
        factor = float(self._loader.averaging_ranks)
        return factor / self.valid_tokens if reduction == "mean" else factor

    def __len__(self) -> int:
        return self.microbatches

    def __iter__(self) -> Iterator[Batch]:
        while self._given < self.microbatches:
            batch = self._loader.next_batch(self)
            self._given += 1
            if self._device is not None:
                device, non_blocking = self._device
                batch = batch.to(device, non_blocking=non_blocking)
            yield batch
            del batch

    @property
    def is_complete(self) -> bool:
        """True once every microbatch was given out."""
        return self._given == self.microbatches

    def skip_rest(self) -> None:
        """Take the microbatches that the trainer left, so that the next step can come."""
        while self._given < self.microbatches:
            self._loader.next_batch(self).release()
            self._given += 1


class TrainLoader:
    """The training stream of one rank. Iterating opens a generation with all ranks of the mesh."""

    def __init__(
        self,
        session: Session,
        joined: Mapping[str, Any],
        place: Place,
        as_: ArrayKind,
        *,
        is_copying: bool,
    ) -> None:
        self._session = session
        self._place = place
        self._as = as_
        self._is_copying = is_copying
        self.job_name: str = joined["job"]
        self.job_digest: str = joined["digest"]
        self.sample_digest: str = joined["sample_digest"]
        self.sources: tuple[str, ...] = tuple(joined["sources"])
        self.dp_group: int = joined["dp_group"]
        self.dp_count: int = joined["dp_count"]
        self.averaging_ranks: int = joined["averaging_ranks"]
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
        self._end: str | None = None
        self._is_first_batch = True
        self._spec: BatchSpec | None = None

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, bytes]:
        """Return the state after the last completed step, equal on all ranks.

        Legal at any time, also before the first batch and after the daemon went away. A step is
        completed once its last microbatch was given out; inside a step it is the one before.
        """
        if self._current is not None and self._current.is_complete:
            self._complete_current()
        if self._deltas:
            state = StreamState.decode(self._state)
            for encoded in self._deltas:
                state = state.apply(StateDelta.decode(encoded))
            self._state, self._deltas = state.encode(), []
        return {"msd": self._state}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from a saved state; batches already announced are dropped.

        Raises:
            StateMismatchError: Not a state of this job, or damaged.
        """
        try:
            encoded = state["msd"]
        except (KeyError, TypeError) as error:
            raise StateMismatchError('a state is a dict with the key "msd"') from error
        decoded = StreamState.decode(bytes(encoded))
        decoded.check_job(self._stream_version, self.sample_digest)
        adopted = decoded.adopt(self.job_digest)
        self._state = bytes(encoded) if adopted is decoded else adopted.encode()
        self._next_number = decoded.step
        self._deltas = []
        self._current = self._current_note = None
        self._end = None
        self._is_started = False
        self._session.ready.clear()
        self._session.notes.clear()

    # -- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        while (step := self._next_step()) is not None:
            yield step

    def _next_step(self) -> Step | None:
        if self._is_closed:
            raise SessionClosedError("this loader is closed: connect again")
        if not self._is_started:
            self._start()
        if self._current is not None:
            self._current.skip_rest()
            self._complete_current()
            self._current = None
        began = time.monotonic()
        if self._take_notes() is None and self._reader is not None:
            self._check_leases(self._reader)  # a step is announced with its first microbatch
        self._wait(lambda: self._take_notes() is not None, f"step {self._next_number}")
        note = self._take_notes()
        assert note is not None
        self._session.notes.popleft()
        if note["note"] == "ended":
            self._end = note["reason"]
            self._is_started = False
            return None
        step = Step(self, note)
        step.stats["wait_s"] = time.monotonic() - began
        self._current = step
        self._current_note = note
        return step

    def next_batch(self, step: Step) -> Batch:
        """Return this rank's next microbatch of `step`; waits for it (see `deadlines`)."""
        if self._is_closed:
            raise SessionClosedError("this loader is closed: connect again")
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
            step.stats["wait_s"] += time.monotonic() - began
        event = session.ready.popleft()
        self._is_first_batch = False
        lease = reader.open(event.slot, event.sequence, event.generation, event.payload_bytes)
        return Batch.from_lease(lease, self._spec, as_=self._as, copy=self._is_copying)

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
            f"rank {self._place.rank} holds all {reader.layout.slots} slots of its ring and asks for "
            "another microbatch: drop batches (del, or batch.release()) before the next one, pass "
            "copy=True to connect, batch.clone() what you keep, or raise ring.slots",
            held=len(reader.held),
            slots=reader.layout.slots,
        )

    def _start(self) -> None:
        state = self.state_dict()["msd"]
        session = self._session
        session.clear_failure()
        session.ready.clear()
        session.notes.clear()
        reply = session.request("start", self.deadlines["join_s"], state=state)
        body = reply.body["ok"]
        layout = RingLayout.decode(body["layout"])
        spec = BatchSpec.decode(body["spec"])
        if self._reader is not None:
            self._reader.close()
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

    def _take_notes(self) -> dict[str, Any] | None:
        notes = self._session.notes
        while notes:
            if notes[0].get("generation") == self._generation and notes[0]["note"] in (
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


class Data:
    """A joined job: its loaders under one connection. A context manager."""

    def __init__(
        self,
        session: Session,
        joined: Mapping[str, Any],
        place: Place,
        as_: ArrayKind,
        *,
        is_copying: bool,
    ) -> None:
        self._session = session
        self.rank = place.rank
        self.train = TrainLoader(session, joined, place, as_, is_copying=is_copying)

    def set_mixture(self, weights: Mapping[str, float]) -> int:
        """Change the mixture while training; call it on one rank.

        A state of a step before the returned one does not know of the change: after restoring such
        a state, change the mixture again.

        Returns:
            The first step that is drawn with the new weights (planned steps are not changed).

        Raises:
            ConfigError: A source is unknown or a weight is no weight.
        """
        reply = self._session.request(
            "mixture", 30.0, job=self.train.job_name, weights=dict(weights)
        )
        return int(reply.body["ok"]["step"])

    def close(self) -> None:
        """Leave the job. Other ranks go on; the last one's leaving ends it."""
        self._session.close(self.train.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    job: str | os.PathLike[str] | Mapping[str, Any],
    *,
    mesh: Mapping[str, int] | Any | None = None,
    rank: int | None = None,
    daemon: str | os.PathLike[str] = "auto",
    as_: ArrayKind | None = None,
    copy: bool = False,
    deadlines: Mapping[str, float] | None = None,
) -> Data:
    """Join a job on this node.

    Args:
        job: Path of a job file, a job as a dict, or the name of a submitted job.
        mesh: Axes in order with sizes, like `{"dp": 2, "tp": 2}`, or a torch `DeviceMesh`; None
            takes one `dp` axis over the launcher's world.
        rank: Global rank; None takes the launcher's (torchrun, Slurm, Open MPI).
        daemon: Socket path; `auto` uses this user's default and starts a daemon where none answers.
        as_: `torch` or `numpy`; None takes torch where it is installed.
        copy: Copy every batch out of shared memory: writable, never holds a slot.
        deadlines: Overrides of first_batch_s, next_batch_s, join_s (seconds).

    Returns:
        The joined job; iterate `.train`.

    Raises:
        ConfigError: The job or the mesh is refused; all faults are listed.
        DaemonUnavailableError: No daemon, and none could be started.
    """
    place = find_place(mesh, rank)
    wanted = dict(deadlines or {})
    unknown = sorted(set(wanted) - {"first_batch_s", "next_batch_s", "join_s"})
    if unknown:
        raise UsageError(
            f"connect: deadlines {unknown} are unknown: there are first_batch_s, next_batch_s, join_s"
        )
    if as_ not in (None, "torch", "numpy"):
        raise UsageError(f"connect: as_ is {as_!r}: write 'torch' or 'numpy'")
    if daemon == "auto":
        session = open_or_start(default_socket_path(os.environ, os.getuid()), "trainer")
    else:
        session = Session(Path(daemon), "trainer")
    try:
        joined = session.request(
            "join",
            wanted.get("join_s", 300.0),
            **job_fields(job),
            mesh=[list(axis) for axis in place.axes],
            rank=place.rank,
            run=place.run,
            deadlines=wanted,
        ).body["ok"]
        return Data(session, joined, place, as_ or _default_kind(), is_copying=copy)
    except MsdError:
        session.close()
        raise


def job_fields(job: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields that carry a job: text, folder for relative paths, name."""
    if isinstance(job, Mapping):
        text = json.dumps(dict(job))  # JSON is YAML; what travels is what a file would hold
        return {"text": text, "base_dir": os.getcwd(), "name": str(job.get("name", "job"))}
    path = Path(job)
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            from msd_client.contract.errors import ConfigError

            raise ConfigError(
                f"job file {path} can't be read: {error.strerror or error}"
            ) from error
        return {"text": text, "base_dir": str(path.resolve().parent), "name": path.stem}
    return {"submitted": os.fspath(job)}


def _releaser(session: Session, generation: int) -> Callable[[int, int], None]:
    """Return what a finalizer calls; it must not keep the loader alive, nor wait."""

    def release(slot: int, sequence: int) -> None:
        session.release(slot, sequence, generation)

    return release


def _default_kind() -> ArrayKind:
    from importlib.util import find_spec

    return "torch" if find_spec("torch") is not None else "numpy"


__all__ = ["Batch", "Data", "SessionClosedError", "Step", "TrainLoader", "connect"]
