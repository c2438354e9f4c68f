"""msd's daemon side; `msd_daemon.inline(job)` reads a job's stream in this very process."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msd_daemon.inline_reader import InlineStream as InlineStream
    from msd_daemon.inline_reader import inline as inline

_EXPORTS = {
    "InlineStream": "msd_daemon.inline_reader",
    "inline": "msd_daemon.inline_reader",
}
__all__ = ["InlineStream", "inline"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'msd_daemon' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
