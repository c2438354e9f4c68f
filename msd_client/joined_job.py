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
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from msd_client.contract.errors import ConfigError, MsdError, UsageError
from msd_client.contract.paths import default_socket_path
from msd_client.daemon_start import open_or_start
from msd_client.loader import ArrayKind, TrainLoader
from msd_client.mesh import Place, find_place
from msd_client.session import Session
from msd_client.step import Step

DEADLINES = ("first_batch_s", "next_batch_s", "join_s")
RESOLVE_TIMEOUT_S = 300.0
"""How long the daemon may take to resolve a job: file names, fingerprints, the tokenizer. `join_s`
is about the other ranks."""


@dataclass(frozen=True)
class JoinRequest:
    """How this rank joins: what `connect` was given, in the form that every stream needs."""

    place: Place
    daemon: Path | None
    """Socket path, None for this user's own daemon."""
    as_: ArrayKind
    is_copying: bool
    deadlines: Mapping[str, float]

    def open(self, **wanted: Any) -> tuple[Session, TrainLoader, dict[str, Any]]:
        """Connect and join; return the connection, its stream and what the daemon said.

        Args:
            wanted: Request fields that name the job, or a validation stream of a joined one.

        Raises:
            MsdError: The daemon's refusal, or no daemon.
        """
        if self.daemon is None:
            session = open_or_start(default_socket_path(os.environ, os.getuid()), "trainer")
        else:
            session = Session(self.daemon, "trainer")
        try:
            joined = session.request(
                "join",
                max(self.deadlines.get("join_s", 0.0), RESOLVE_TIMEOUT_S),
                **wanted,
                mesh=[list(axis) for axis in self.place.axes],
                rank=self.place.rank,
                run=self.place.run,
                deadlines=dict(self.deadlines),
            ).body["ok"]
            stream = TrainLoader(
                session, joined, self.place.rank, self.as_, is_copying=self.is_copying
            )
        except MsdError:
            session.close()
            raise
        return session, stream, joined


class ValidationLoader:
    """A validation stream of a job (`loaders` in the job file)."""

    def __init__(self, name: str, joined_session: str, request: JoinRequest) -> None:
        self.name = name
        self._joined_session = joined_session
        self._request = request

    def once(self) -> Iterator[Step]:
        """Iterate one pass: the same rows on every call and mesh, the last step padded.

        Each rank of a pipeline stage has to call it; stages that leave it out hold nobody up. It
        never moves the training state. Memory is taken while a pass runs, within the daemon's
        budget, which was checked when the job was joined.

        Raises:
            MsdError: As the training stream; also where the training session is over.
        """
        session, stream, _ = self._request.open(session=self._joined_session, loader=self.name)
        try:
            yield from stream
        finally:
            session.close(stream.close())

    def __repr__(self) -> str:
        return f"ValidationLoader({self.name!r})"


class Data:
    """A joined job: `train`, and each validation stream under its own name. A context manager."""

    def __init__(
        self,
        request: JoinRequest,
        session: Session,
        train: TrainLoader,
        joined: Mapping[str, Any],
    ) -> None:
        self._session = session
        self.rank = request.place.rank
        self.train = train
        self.loaders: dict[str, TrainLoader | ValidationLoader] = {"train": train}
        """All streams by name."""
        for name in joined["loaders"]:
            self.loaders[name] = ValidationLoader(name, joined["session"], request)

    def __getattr__(self, name: str) -> Any:
        loaders = self.__dict__.get("loaders", {})
        if name in loaders:
            return loaders[name]
        known = ", ".join(loaders) or "none"
        raise AttributeError(f"the job has no loader {name!r}; it has {known}")

    def set_mixture(self, weights: Mapping[str, float]) -> int:
        """Change the mixture while training; call it on one rank.

        States of steps that this call finds announced do not know of the change; states of later
        ones do, also before it takes effect.

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
    unknown = sorted(set(wanted) - set(DEADLINES))
    if unknown:
        raise UsageError(
            f"connect: deadlines {unknown} are unknown: there are {', '.join(DEADLINES)}"
        )
    if as_ not in (None, "torch", "numpy"):
        raise UsageError(f"connect: as_ is {as_!r}: write 'torch' or 'numpy'")
    request = JoinRequest(
        place, None if daemon == "auto" else Path(daemon), as_ or _default_kind(), copy, wanted
    )
    session, train, joined = request.open(**job_fields(job))
    return Data(request, session, train, joined)


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
            raise ConfigError(
                f"job file {path} can't be read: {error.strerror or error}"
            ) from error
        return {"text": text, "base_dir": str(path.resolve().parent), "name": path.stem}
    return {"submitted": os.fspath(job)}


def _default_kind() -> ArrayKind:
    from importlib.util import find_spec

    return "torch" if find_spec("torch") is not None else "numpy"
