"""Typed errors of msd, grouped by who must act. Ground floor: imports nothing of msd.

Every error has a stable `code`, a message that names the thing, the value seen, the limit and the
remedy, and a flat dict of `attributes`; it crosses the wire as (code, message, attributes).
"""

from __future__ import annotations

from typing import ClassVar

Scalar = str | int | float | bool | None


class MsdError(Exception):
    """Root of all msd errors; raise one of its children.

    Args:
        message: What failed, on which named thing, seen value against limit, what to do.
        attributes: Machine-readable facts (source, shard, record, rank, needed_bytes ...).
    """

    code: ClassVar[str] = "msd"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **attributes: Scalar) -> None:
        super().__init__(message)
        self.message = message
        self.attributes: dict[str, Scalar] = attributes

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.code, self.message, self.attributes))


class UsageError(MsdError, RuntimeError):
    """The calling programmer must act."""

    code = "usage"
    exit_code = 2


class SessionClosedError(UsageError):
    """The loader or session was closed, or its job was stopped."""

    code = "usage.session_closed"


class StreamRewoundError(UsageError):
    """The job was rewound: load the state of an earlier step and iterate again."""

    code = "usage.rewound"


class BatchReleasedError(UsageError):
    """A batch was used after its explicit release."""

    code = "usage.batch_released"


class LeaseExhausted(UsageError):  # noqa: N818 - the documented public name
    """This reader holds every slot of its ring and asks for another one."""

    code = "usage.lease_exhausted"


class ConfigError(MsdError, ValueError):
    """The job, the daemon's configuration or the mesh must be changed before start."""

    code = "config"
    exit_code = 78


class JobError(ConfigError):
    """One or more faults of a job; `faults` holds (key path, value, message) of each."""

    code = "config.job"

    def __init__(self, message: str, **attributes: Scalar) -> None:
        super().__init__(message, **attributes)

    @property
    def faults(self) -> list[str]:
        """Return one line per fault."""
        return [line.strip() for line in self.message.splitlines()[1:]]


class MeshMismatchError(ConfigError):
    """The mesh does not fit the job, or differs between ranks."""

    code = "config.mesh"


class StrategyError(ConfigError):
    """A strategy of the user's own failed or gave what is no plan; names it and the step."""

    code = "config.strategy"


class StateMismatchError(ConfigError):
    """Ranks start from different states, or a state does not fit the job."""

    code = "config.state"


class BudgetError(ConfigError):
    """A job cannot fit its memory budget; the sums stand in the message."""

    code = "config.budget"


class AddressMissingError(ConfigError):
    """A name, interface or route that the configuration names has no address here, perhaps not yet."""

    code = "config.address"
    exit_code = 3  # service managers try again: at boot the network may be late


class ProtocolError(MsdError):
    """A peer sent what the contract does not allow."""

    code = "protocol"


class VersionMismatchError(ProtocolError):
    """Client and daemon are more than one minor version apart."""

    code = "protocol.version"


class DataError(MsdError):
    """The owner of the data must act."""

    code = "data"


class CorruptRecordError(DataError):
    """A record could not be read; names source, shard, record and byte offset."""

    code = "data.corrupt_record"


class TransformError(DataError):
    """A user's transform failed on a record; the attribute `cause` says how.

    `raised`: it raised. `refused`: what it was to take or gave is no sample. `time`, `memory`: a
    limit of the job was reached. `crash`: its process died.
    """

    code = "data.transform"

    @property
    def is_timeout(self) -> bool:
        """True where the call took longer than the job allows."""
        return self.attributes.get("cause") == "time"

    @property
    def is_quarantine(self) -> bool:
        """True where a limit or a dead process ended the call, not the user's code itself."""
        return self.attributes.get("cause") in ("time", "memory", "crash")


class SourceExhaustedError(DataError):
    """A source has no sample left and its policy does not allow another epoch."""

    code = "data.source_exhausted"


class ErrorBudgetExceededError(DataError):
    """Too many bad records of a source; the last ones are named."""

    code = "data.error_budget"


class ResourceError(MsdError):
    """The operator must act at run time: memory, descriptors, disk."""

    code = "resource"


class JournalDamagedError(ResourceError):
    """A journal can't be read: not one, cut short, or bytes changed; names the file and what."""

    code = "resource.journal_damaged"


class JournalUnavailableError(ResourceError):
    """A journal can't be written or opened now: no room, no permission; try again once mended."""

    code = "resource.journal"
    retryable = True


class SegmentUnavailableError(ResourceError):
    """A shared-memory segment cannot be made; needed and available bytes are named."""

    code = "resource.segment"


class SegmentCorruptError(ResourceError):
    """A slot header does not say what the daemon announced."""

    code = "resource.segment_corrupt"


class ChunkCorruptError(SegmentCorruptError, ValueError):
    """A chunk in the pool is not one, or a segment points outside of it."""

    code = "resource.chunk_corrupt"


class AvailabilityError(MsdError):
    """Nobody must act yet; retry."""

    code = "availability"
    retryable = True
    exit_code = 3


class DaemonUnavailableError(AvailabilityError):
    """No daemon answers, or it went away."""

    code = "availability.daemon"


class PlannerUnavailableError(AvailabilityError):
    """The planner went away or does not answer."""

    code = "availability.planner"


class NodeLostError(AvailabilityError):
    """A node of the cluster is gone, or can't be reached any more."""

    code = "availability.node"


class ExchangeUnavailableError(AvailabilityError):
    """The process that moves samples between nodes does not come up."""

    code = "availability.exchange"


class LeadershipLostError(AvailabilityError):
    """A planner that led leads no more: another one may, and the store takes nothing of it."""

    code = "availability.leadership"


class PlanStoreError(AvailabilityError):
    """The store of planners can't be used now: it does not answer, or has no room."""

    code = "availability.plan_store"


class WorkerLostError(AvailabilityError):
    """A worker process died or was stopped."""

    code = "availability.worker"


class ForkServerLostError(WorkerLostError):
    """The process that workers are forked from is gone: none can be replaced."""

    code = "availability.fork_server"


class StoreError(AvailabilityError):
    """An object store refused, or did not answer before the deadline; names bucket and key."""

    code = "availability.store"


class StoreMissingError(StoreError, FileNotFoundError):
    """An object is not, or no longer, there; readers treat it as a file that is gone."""

    code = "availability.store_missing"
    retryable = False


class DeadlineError(AvailabilityError, TimeoutError):
    """A wait reached its deadline; the message says what was being waited for."""

    code = "availability.deadline"
    exit_code = 5


class PermissionDeniedError(MsdError, PermissionError):
    """The peer may not do this."""

    code = "permission"
    exit_code = 6


class NotFoundError(MsdError, LookupError):
    """No such job, source or rank."""

    code = "not_found"
    exit_code = 4


class InternalError(MsdError):
    """A fault of msd itself."""

    code = "internal"
    exit_code = 70


class InvalidTransitionError(InternalError):
    """A state machine met an event its table does not allow."""

    code = "internal.transition"


class RemoteError(MsdError):
    """An error of a newer peer whose code this side does not know."""

    code = "remote"


def _all_errors(root: type[MsdError]) -> dict[str, type[MsdError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _all_errors(child)
    return found


def encode_error(error: MsdError) -> dict[str, object]:
    """Return the wire form of an error: code, message and attributes."""
    attributes = {
        key: _sendable(value) if isinstance(value, str) else value
        for key, value in error.attributes.items()
    }
    return {"code": error.code, "message": _sendable(error.message), "attributes": attributes}


def _sendable(text: str) -> str:
    """Return a text as UTF-8 holds it: paths of the system may be anything."""
    return text.encode(errors="backslashreplace").decode()


def decode_error(code: str, message: str, attributes: dict[str, Scalar]) -> MsdError:
    """Return the error that a peer sent; an unknown code gives `RemoteError`."""
    kind = _all_errors(MsdError).get(code)
    if kind is None:
        return RemoteError(f"[{code}] {message}", **attributes)
    return kind(message, **attributes)


def _rebuild(code: str, message: str, attributes: dict[str, Scalar]) -> MsdError:
    return decode_error(code, message, attributes)
