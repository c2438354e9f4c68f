"""What a user asks of a launch. Plain."""

from __future__ import annotations

from dataclasses import dataclass

READY_S = 180.0


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `msdctl up`."""

    shared: str = ""
    """Folder that all nodes see; empty: `~/.msd`."""
    planners: int = 1
    store: str = ""
    interface: str = ""
    config: str = ""
    state_dir: str = ""
    srun_options: tuple[str, ...] = ()
    timeout_s: float = READY_S
