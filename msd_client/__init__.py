"""msd's client: join a job on this node and read its batches without a copy.

`connect(job, mesh=...)` gives the loaders of a job. Batches are read-only views of shared memory:
writing into one in place kills the process (SIGSEGV); `batch.clone()` or `connect(copy=True)` give
writable ones.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msd_client.batch import Batch as Batch
    from msd_client.loader import Data as Data
    from msd_client.loader import Step as Step
    from msd_client.loader import TrainLoader as TrainLoader
    from msd_client.loader import connect as connect
    from msd_client.state_folder import SavedState as SavedState
    from msd_client.state_folder import StateFolder as StateFolder

_EXPORTS = {
    "Batch": "msd_client.batch",
    "Data": "msd_client.loader",
    "SavedState": "msd_client.state_folder",
    "StateFolder": "msd_client.state_folder",
    "Step": "msd_client.loader",
    "TrainLoader": "msd_client.loader",
    "connect": "msd_client.loader",
}
__all__ = ["Batch", "Data", "SavedState", "StateFolder", "Step", "TrainLoader", "connect"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'msd_client' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
