"""What of a changed configuration a running daemon may take, key by key. Pure.

Each setting has one effect: `now` (in force at once), `next job` (jobs that begin later have it, those
that run keep what they began with), `restart` (only another daemon has it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from msd_daemon.config.daemon_config import DaemonConfig

Effect = Literal["now", "next job", "restart"]

EFFECTS: Mapping[str, tuple[str, Effect]] = {
    "socket": ("daemon.socket", "restart"),
    "runtime_dir": ("daemon.runtime_dir", "restart"),
    "state_dir": ("daemon.state_dir", "restart"),
    "idle_exit_s": ("daemon.idle_exit_s", "now"),
    "log_level": ("daemon.log_level", "now"),
    "log_format": ("daemon.log_format", "restart"),
    "observe": ("daemon.observe", "restart"),
    "memory_bytes": ("memory.memory_bytes", "next job"),
    "pool_bytes": ("memory.pool_bytes", "next job"),
    "segment": ("memory.segment", "next job"),
    "ring_slots": ("memory.ring_slots", "next job"),
    "loader_workers": ("workers.loader_workers", "next job"),
    "loader_workers_min": ("workers.loader_workers", "next job"),
    "loader_workers_max": ("workers.loader_workers_max", "next job"),
    "scaling": ("workers.scaling", "next job"),
    "spares": ("workers.spares", "next job"),
    "shadow_bytes": ("workers.shadow_bytes", "next job"),
    "late_s": ("workers.late_s", "next job"),
    "worker_memory_bytes": ("workers.memory_bytes", "next job"),
    "horizon_steps": ("planner.horizon_steps", "next job"),
    "journal_steps_kept": ("journal.steps_kept", "next job"),
    "allow_uids": ("access.allow_uids", "now"),
    "allow_gids": ("access.allow_gids", "now"),
    "roots": ("access.roots", "next job"),
    "first_batch_s": ("deadlines.first_batch_s", "next job"),
    "next_batch_s": ("deadlines.next_batch_s", "next job"),
    "join_s": ("deadlines.join_s", "next job"),
    "reader_stuck_s": ("deadlines.reader_stuck_s", "next job"),
    "restart_grace_s": ("deadlines.restart_grace_s", "next job"),
    "stores": ("stores", "next job"),
    "federation": ("federation", "restart"),
    "dashboard": ("dashboard", "now"),
}
"""Field of DaemonConfig to its key in daemon.toml (a section: all of its keys) and its effect."""


@dataclass(frozen=True)
class Reload:
    """What a reload comes to."""

    config: DaemonConfig
    """To go on with: the new one, but for what needs a restart."""
    changed: Mapping[Effect, tuple[str, ...]]
    """Keys that differ, by effect, in the order of daemon.toml."""

    def lines(self) -> list[str]:
        """Return what an operator is told, a line an effect."""
        told: Mapping[Effect, str] = {
            "now": "in force now",
            "next job": "for jobs that begin from now on",
            "restart": "kept as they were: they need a restart of the daemon",
        }
        found = [
            f"{', '.join(self.changed[it])}: {text}"
            for it, text in told.items()
            if self.changed[it]
        ]
        return found or ["nothing changed"]


def reload(old: DaemonConfig, new: DaemonConfig) -> Reload:
    """Return what a running daemon takes of a new configuration.

    Args:
        old: In force.
        new: Of the files as they are now.
    """
    if (old.state_dir, old.runtime_dir) != (new.state_dir, new.runtime_dir):
        # Folders of stores lie in these, which stay.
        stores = replace(
            new.stores, cache_dir=old.stores.cache_dir, shared_dir=old.stores.shared_dir
        )
        new = replace(new, stores=stores)
    changed: dict[Effect, list[str]] = {"now": [], "next job": [], "restart": []}
    kept: dict[str, object] = {}
    for field in fields(DaemonConfig):
        if field.name == "origins" or getattr(old, field.name) == getattr(new, field.name):
            continue
        key, effect = EFFECTS[field.name]
        changed[effect].append(key)
        if effect == "restart":
            kept[field.name] = getattr(old, field.name)
    return Reload(
        replace(new, **kept),  # type: ignore[arg-type]
        {effect: tuple(keys) for effect, keys in changed.items()},
    )


def effect_of(key: str) -> Effect:
    """Return the effect of a key of daemon.toml, as `section.key`."""
    by_key = dict(EFFECTS.values())
    return by_key.get(key) or by_key[key.partition(".")[0]]
