"""msd's client: join a job on this node and read its batches without a copy.

`connect(job, mesh=...)` gives the loaders of a job. Batches are read-only views of shared memory:
writing into one in place kills the process (SIGSEGV); `batch.clone()` or `connect(copy=True)` give
writable ones.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msd_client import errors as errors
    from msd_client.batch import Batch as Batch
    from msd_client.joined_job import Data as Data
    from msd_client.joined_job import MixtureStep as MixtureStep
    from msd_client.joined_job import ValidationLoader as ValidationLoader
    from msd_client.joined_job import connect as connect
    from msd_client.loader import TrainLoader as TrainLoader
    from msd_client.state_folder import SavedState as SavedState
    from msd_client.state_folder import StateFolder as StateFolder
    from msd_client.step import Step as Step

_EXPORTS = {
    "Batch": "msd_client.batch",
    "Data": "msd_client.joined_job",
    "MixtureStep": "msd_client.joined_job",
    "SavedState": "msd_client.state_folder",
    "StateFolder": "msd_client.state_folder",
    "Step": "msd_client.step",
    "TrainLoader": "msd_client.loader",
    "ValidationLoader": "msd_client.joined_job",
    "connect": "msd_client.joined_job",
}
__all__ = [
    "Batch",
    "Data",
    "MixtureStep",
    "SavedState",
    "StateFolder",
    "Step",
    "TrainLoader",
    "ValidationLoader",
    "connect",
    "errors",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("msd_client.errors")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'msd_client' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
