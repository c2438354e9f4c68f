"""msd's daemon side, in this very process.

`msd_daemon.inline(job)` reads a job's stream, `msd_daemon.lineage(job, step)` says what a step of a
run held, `msd_daemon.find(job, source, key)` which steps held a record,
`msd_daemon.state_from_counts(job, consumed)` begins where another loader stopped.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msd_daemon.history.find_record import find as find
    from msd_daemon.history.lineage_rows import lineage as lineage
    from msd_daemon.history.start_state import state_from_counts as state_from_counts
    from msd_daemon.inline_reader import InlineStream as InlineStream
    from msd_daemon.inline_reader import inline as inline

_EXPORTS = {
    "InlineStream": "msd_daemon.inline_reader",
    "find": "msd_daemon.history.find_record",
    "inline": "msd_daemon.inline_reader",
    "lineage": "msd_daemon.history.lineage_rows",
    "state_from_counts": "msd_daemon.history.start_state",
}
__all__ = ["InlineStream", "find", "inline", "lineage", "state_from_counts"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'msd_daemon' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
