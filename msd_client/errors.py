"""The errors a trainer may want to catch, by name."""

from msd_client.contract.errors import (
    AvailabilityError,
    BatchReleasedError,
    BudgetError,
    ConfigError,
    DaemonUnavailableError,
    DataError,
    DeadlineError,
    JobError,
    LeaseExhausted,
    MeshMismatchError,
    MsdError,
    ResourceError,
    SessionClosedError,
    StateMismatchError,
    UsageError,
)

__all__ = [
    "AvailabilityError",
    "BatchReleasedError",
    "BudgetError",
    "ConfigError",
    "DaemonUnavailableError",
    "DataError",
    "DeadlineError",
    "JobError",
    "LeaseExhausted",
    "MeshMismatchError",
    "MsdError",
    "ResourceError",
    "SessionClosedError",
    "StateMismatchError",
    "UsageError",
]
