"""A joined job: its training stream, its validation streams, and how a trainer gets them.

with msd_client.connect("job.yaml", mesh={"dp": 2, "tp": 2}) as data:
    for step in data.train:
        for microbatch in step:
            loss = model(microbatch.tokens, microbatch.position_ids)
        if step.number % 500 == 0:
            for step in data.val_web.once():
                ...
"""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Self

from msd_client.arguments import shown
from msd_client.contract.errors import (
    AvailabilityError,
    ConfigError,
    DaemonUnavailableError,
    MsdError,
    SessionClosedError,
    UsageError,
)
from msd_client.contract.paths import default_socket_path
from msd_client.contract.step_numbers import STEP_MAX
from msd_client.daemon_start import open_or_start
from msd_client.loader import ArrayKind, SkippedBatches, TrainLoader
from msd_client.mesh import Place, find_place
from msd_client.process_bound import ProcessBound
from msd_client.session import Session
from msd_client.step import Step

DEADLINES = ("first_batch_s", "next_batch_s", "join_s")
RESOLVE_TIMEOUT_S = 300.0
"""How long the daemon may take to resolve a job: file names, fingerprints, the tokenizer. `join_s`
is about the other ranks."""
DEADLINE_S_MAX = 1e9
REATTACH_PAUSE_S = 0.2
ACCEPTED = ("seed", "tokenizer", "batch", "media", "epochs", "mixture")
"""Keys of changes of a job that may be accepted, beside those of sources."""


class MixtureStep(int):
    """The first step that an event changes: a changed mixture, a skip.

    Attributes:
        known_from: First step behind whose completion states know of the event.
    """

    known_from: int

    def __new__(cls, step: int, known_from: int | None = None) -> Self:
        """Return the step; without `known_from` states know once the step itself is completed."""
        made = super().__new__(cls, step)
        made.known_from = step if known_from is None else known_from
        return made


@dataclass(frozen=True)
class JoinRequest:
    """How this rank joins: what `connect` was given, in the form that every stream needs."""

    place: Place
    daemon: Path | None
    """Socket path, None for this user's own daemon."""
    as_: ArrayKind
    is_copying: bool
    deadlines: Mapping[str, float]
    accept: tuple[str, ...] = ()
    """Keys of job changes that a resume may make."""
    reattach_s: float = 0.0
    """So long the next daemon is waited for where this one restarts; 0: not."""

    def open(
        self, skipped: SkippedBatches | None = None, **wanted: Any
    ) -> tuple[Session, TrainLoader, dict[str, Any]]:
        """Connect and join; return the connection, its stream and what the daemon said.

        Args:
            skipped: Where skipped microbatches are counted; None counts them in the stream.
            wanted: Request fields that name the job, or a validation stream of a joined one.

        Raises:
            MsdError: The daemon's refusal, or no daemon.
        """
        hello_s = self.deadlines.get("join_s", RESOLVE_TIMEOUT_S)
        if self.daemon is None:
            path = default_socket_path(os.environ, os.getuid())
            session = open_or_start(path, "trainer", hello_s)
        else:
            session = Session(self.daemon, "trainer", hello_s=hello_s)
        try:
            joined = self._join(session, wanted)
            stream = TrainLoader(
                session,
                joined,
                self.place.rank,
                self.as_,
                is_copying=self.is_copying,
                skipped=skipped,
                accept=self.accept,
                reattach=self._reattach(session.socket_path, wanted),
            )
        except MsdError:
            session.close()
            raise
        return session, stream, joined

    def _join(self, session: Session, wanted: Mapping[str, Any]) -> dict[str, Any]:
        joined: dict[str, Any] = session.request(
            "join",
            max(self.deadlines.get("join_s", 0.0), RESOLVE_TIMEOUT_S),
            **wanted,
            mesh=[list(axis) for axis in self.place.axes],
            rank=self.place.rank,
            run=self.place.run,
            deadlines=dict(self.deadlines),
            reattach=self.reattach_s > 0,
        ).body["ok"]
        return joined

    def _reattach(
        self, socket_path: Path, wanted: Mapping[str, Any]
    ) -> Callable[[], Session] | None:
        """Return what joins the daemon that comes next, None where that is not wanted.

        A pass of validation ends with its daemon: what it gave out can't be given out again.
        """
        if not self.reattach_s or "loader" in wanted:
            return None
        again = {key: value for key, value in wanted.items() if key != "forget_events_after"}

        def reattach() -> Session:
            deadline = time.monotonic() + self.reattach_s
            while True:
                session = None
                try:
                    # Never one of our own: whoever restarts it starts it.
                    session = Session(socket_path, "trainer")
                    self._join(session, again)
                    return session
                except (AvailabilityError, SessionClosedError) as error:
                    if session is not None:
                        session.close()
                    if time.monotonic() > deadline:
                        raise DaemonUnavailableError(
                            f"the daemon at {socket_path} went to restart, and none came back for "
                            f"{self.reattach_s:g} s ({error}): start msd-daemon, and all ranks from the "
                            "last state",
                            socket=str(socket_path),
                        ) from error
                time.sleep(REATTACH_PAUSE_S)

        return reattach


class ValidationLoader(ProcessBound):
    """A validation stream of a job (`loaders` in the job file)."""

    def __init__(
        self, name: str, sources: Sequence[str], joined_session: str, request: JoinRequest
    ) -> None:
        self.name = name
        self.sources = tuple(sources)
        """Names of its sources, in the order that `segment_source` counts them."""
        self._joined_session = joined_session
        self._request = request
        self._pid = os.getpid()
        self._is_open = False
        self._skipped = SkippedBatches()

    @property
    def skipped_microbatches(self) -> int:
        """Microbatches that all passes left without `skip_rest`."""
        return self._skipped.microbatches

    def once(self) -> Iterator[Step]:
        """Iterate one pass: the same rows on every call and mesh, the last step padded.

        Each rank of a pipeline stage has to call it; stages that leave it out hold nobody up. It
        never moves the training state. Memory is taken while a pass runs, within the daemon's
        budget, which was checked when the job was joined.

        Raises:
            UsageError: A pass is still open here.
            MsdError: As the training stream; also where the training session is over.
        """
        self._check_free()
        return self._pass()

    def _check_free(self) -> None:
        if os.getpid() != self._pid:
            raise SessionClosedError(
                "a forked child may not use its parent's loader: connect there"
            )
        if self._is_open:
            raise UsageError(
                f"a pass of {self.name!r} is still open here: finish it, or close() the iterator"
            )

    def _pass(self) -> Iterator[Step]:
        self._check_free()  # of two iterators, made before either began, the second is refused
        self._is_open = True
        try:
            session, stream, _ = self._request.open(
                self._skipped, session=self._joined_session, loader=self.name
            )
            try:
                yield from stream
            finally:
                session.close(stream.close())
        finally:
            self._is_open = False

    def __repr__(self) -> str:
        return f"ValidationLoader({self.name!r})"


class Data(ProcessBound):
    """A joined job: `train`, and each validation stream under its own name. A context manager."""

    def __init__(
        self,
        request: JoinRequest,
        session: Session,
        train: TrainLoader,
        joined: Mapping[str, Any],
    ) -> None:
        del session  # the stream has it, and another one behind a restart of the daemon
        self.rank = request.place.rank
        self.train = train
        self.loaders: dict[str, TrainLoader | ValidationLoader] = {"train": train}
        """All streams by name."""
        for name in joined["loaders"]:
            sources = joined.get("loader_sources", {}).get(name, ())
            self.loaders[name] = ValidationLoader(name, sources, joined["session"], request)

    @property
    def _session(self) -> Session:
        return self.train.session

    def __getattr__(self, name: str) -> Any:
        loaders = self.__dict__.get("loaders", {})
        if name in loaders:
            return loaders[name]
        known = ", ".join(loaders) or "none"
        raise AttributeError(f"the job has no loader {name!r}; it has {known}")

    def __repr__(self) -> str:
        return f"Data({self.train.job_name!r}, rank {self.rank}, loaders {', '.join(self.loaders)})"

    def set_mixture(self, weights: Mapping[str, float], *, at: int | None = None) -> MixtureStep:
        """Change the mixture while training; call it on one rank.

        Args:
            weights: Of every source by name, numbers >= 0; they hold until the next change, or the
                next point of the job's schedule.
            at: The step from which they hold, on all ranks; None for the first that is possible.

        Returns:
            The first step that is drawn with the new weights (planned steps are not changed), an
            int. Its `known_from` is the first step behind whose completion states know of the
            change, which may be before it takes effect: a state saved after that step brings the
            change back, after an earlier one the call has to be made again.

        Raises:
            UsageError: The weights are no map of names to numbers, or `at` is no step.
            ConfigError: A source is unknown, a weight is no weight, or the step is planned already:
                the message and `error.attributes["limit"]` name the first that is possible.
        """
        fields: dict[str, Any] = {"job": self.train.job_name, "weights": _weights(weights)}
        if at is not None:
            fields["at"] = _step(at, "set_mixture: at")
        reply = self._session.request("mixture", 30.0, **fields)
        body = reply.body["ok"]
        return MixtureStep(body["step"], body.get("known_from", body["step"]))

    def skip_steps(self, first: int, end: int) -> MixtureStep:
        """Leave the content of some steps out, all other content stays what it is; on one rank.

        Args:
            first: First plan step (`step.plan_step`) that is left out.
            end: The one behind the last.

        Returns:
            The trainer's number of the step that comes in their place, an int. Its `known_from` is
            the first step behind whose completion states know of the skip.

        Raises:
            UsageError: They are no numbers of steps.
            ConfigError: It is no run of steps, too long, or begins with one that is planned: the
                message and `error.attributes["limit"]` name the first that is possible.
        """
        steps = [_step(first, "skip_steps: first"), _step(end, "skip_steps: end")]
        body = self._session.request("skip", 30.0, job=self.train.job_name, steps=steps).body["ok"]
        return MixtureStep(body["step"], body["known_from"])

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
    rank: int | str | None = None,
    daemon: str | os.PathLike[str] = "auto",
    as_: ArrayKind | None = None,
    copy: bool = False,
    deadlines: Mapping[str, float] | None = None,
    accept: Sequence[str] = (),
    forget_events_after: int | None = None,
    reattach_s: float = 0.0,
) -> Data:
    """Join a job on this node.

    Args:
        job: Path of a job file, a job as a dict, or the name of a submitted job.
        mesh: Axes in order with sizes, like `{"dp": 2, "tp": 2}`, or a torch `DeviceMesh`; None
            takes one `dp` axis over the launcher's world.
        rank: Global rank, also as a launcher's text; None takes the launcher's (torchrun, mpirun, srun).
        daemon: Socket path; `auto` uses this user's default and starts a daemon where none answers.
        as_: `torch` or `numpy`; None takes torch where it is installed.
        copy: Copy every batch out of shared memory: writable, never holds a slot.
        deadlines: Overrides of first_batch_s, next_batch_s, join_s (seconds).
        accept: Keys of changes of the job that a loaded state is refused for otherwise (`seed`,
            `tokenizer`, `batch`, `sources.web`), beside those in MSD_ACCEPT (`seed,batch`).
        forget_events_after: Journalled events (mixture changes, skips) of later plan steps are
            dropped; None plays those back that a loaded state is older than.
        reattach_s: Where the daemon restarts (an update of it), all ranks of the job leave behind one
            step and go on with the next daemon, for which they wait so long; 0 raises
            SessionClosedError as the old one ends. Give it on every rank.

    Returns:
        The joined job; iterate `.train`.

    Raises:
        ConfigError: The job or the mesh is refused; all faults are listed.
        UsageError: An argument is not what it should be.
        DaemonUnavailableError: No daemon, and none could be started.
    """
    place = find_place(mesh, rank)
    if as_ not in (None, "torch", "numpy"):
        raise UsageError(f"connect: as_ is {as_!r}: write 'torch' or 'numpy'")
    if not isinstance(daemon, (str, os.PathLike)):
        raise UsageError(f"connect: daemon is {daemon!r}: write a socket path, or 'auto'")
    wanted = job_fields(job)
    if forget_events_after is not None:
        step = _step(forget_events_after, "connect: forget_events_after")
        wanted["forget_events_after"] = step
    request = JoinRequest(
        place,
        None if daemon == "auto" else Path(daemon),
        as_ or _default_kind(),
        copy,
        _deadlines(deadlines),
        _accepted(accept),
        _seconds(reattach_s),
    )
    session, train, joined = request.open(**wanted)
    return Data(request, session, train, joined)


def job_fields(job: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields that carry a job: text, folder for relative paths, name.

    Raises:
        UsageError: It is no job at all.
        ConfigError: The file can't be read, or the map holds what a file could not.
    """
    if isinstance(job, Mapping):
        text = _job_text(job)
        folder = _unicode(os.getcwd(), "the current folder")
        return {"text": text, "base_dir": folder, "name": str(job.get("name", "job"))}
    if not isinstance(job, (str, os.PathLike)) or not isinstance(os.fspath(job), str):
        raise UsageError(
            f"connect: job is {shown(job)}: pass the path of a job file, a dict, or the name of a "
            "submitted job"
        )
    path = Path(job)
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"job file {path} can't be read: {error.strerror or error}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"job file {path} can't be read: byte {error.start} is no UTF-8: save it as UTF-8"
            ) from error
        folder = _unicode(str(path.resolve().parent), "the folder of the job file")
        return {
            "text": text,
            "base_dir": folder,
            "name": _unicode(path.stem, "the name of the job file"),
        }
    return {"submitted": _unicode(os.fspath(job), "the name of the job")}


def _unicode(text: str, what: str) -> str:
    """Return a text that a message can hold.

    Raises:
        ConfigError: It is no Unicode: a path of other bytes than UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8: {text!r}; rename it") from error
    return text


def _job_text(job: Mapping[Any, Any]) -> str:
    """Return a job as JSON, which is YAML: what travels is what a file would hold."""

    def refuse(value: object) -> None:
        raise ConfigError(
            f"the job holds {shown(value)}: write what a job file can hold, numbers, text, lists "
            "and dicts, like str(path) or int(count)"
        )

    try:
        return json.dumps(dict(job), default=refuse)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, MsdError):
            raise
        raise ConfigError(
            f"the job can't be written as JSON ({error}): write what a job file can hold, keys of "
            "text or numbers, and no dict inside itself"
        ) from error


def _seconds(given: Any) -> float:
    if not _is_number(given) or not 0 <= given <= DEADLINE_S_MAX:
        raise UsageError(f"connect: reattach_s is {shown(given)}: write seconds, 0 for not at all")
    return float(given)


def _accepted(accept: Sequence[str]) -> tuple[str, ...]:
    if isinstance(accept, str) or not all(isinstance(key, str) for key in accept):
        raise UsageError(f"connect: accept is {accept!r}: write a list of keys, like ['seed']")
    named = os.environ.get("MSD_ACCEPT", "").split(",")
    keys = tuple(dict.fromkeys(key.strip() for key in (*accept, *named) if key.strip()))
    unknown = [key for key in keys if key not in ACCEPTED and not _is_source_key(key)]
    if unknown:
        raise UsageError(
            f"connect: accept (or MSD_ACCEPT) names {', '.join(map(repr, unknown))}: there are "
            f"{', '.join(ACCEPTED)} and sources.NAME"
        )
    return keys


def _is_source_key(key: str) -> bool:
    return key.startswith("sources.") and len(key) > len("sources.")


def _deadlines(given: object) -> dict[str, float]:
    if given is None:
        return {}
    remedy = 'write seconds, like {"next_batch_s": 60}'
    if not isinstance(given, Mapping):
        raise UsageError(f"connect: deadlines is {shown(given)}: {remedy}")
    unknown = sorted(str(name) for name in given if name not in DEADLINES)
    if unknown:
        raise UsageError(
            f"connect: deadlines {unknown} are unknown: there are {', '.join(DEADLINES)}"
        )
    for name, value in given.items():
        if not _is_number(value) or not 0 < value <= DEADLINE_S_MAX:
            raise UsageError(
                f"connect: deadline {name} is {shown(value)}: it is above 0 and at most "
                f"{DEADLINE_S_MAX:g}, {remedy}"
            )
    return {name: float(value) for name, value in given.items()}


def _weights(given: object) -> dict[str, float]:
    remedy = 'write numbers by source, like {"web": 6, "code": 2}'
    if not isinstance(given, Mapping):
        raise UsageError(f"set_mixture: weights is {shown(given)}: {remedy}")
    for name, value in given.items():
        if not isinstance(name, str) or not _is_number(value):
            raise UsageError(f"set_mixture: weight of {name!r} is {shown(value)}: {remedy}")
    return {name: float(value) for name, value in given.items()}


def _step(at: object, what: str) -> int:
    """Return a step's number, numpy's integers too."""
    try:
        if isinstance(at, bool):
            raise TypeError
        step = operator.index(at)  # type: ignore[arg-type]
        if not 0 <= step <= STEP_MAX:
            raise TypeError
    except TypeError:
        remedy = f"write the number of a step, a whole number from 0 to {STEP_MAX}"
        raise UsageError(f"{what} is {shown(at)}: {remedy}") from None
    return step


def _is_number(value: object) -> bool:
    """Return True for a number that a float holds, numpy's and those without an end too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _default_kind() -> ArrayKind:
    from importlib.util import find_spec

    return "torch" if find_spec("torch") is not None else "numpy"
