"""The daemon's settings as the daemon itself holds them: plain, light, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msd_client.contract.plain import decode_plain, encode_plain
from msd_daemon.config.dashboard_options import DashboardOptions
from msd_daemon.config.federation_options import FederationOptions
from msd_daemon.stores.options import StoreOptions

CONTENT_DIR = "content"
"""Folder of the state folder."""


@dataclass(frozen=True)
class DaemonConfig:
    """The daemon's settings with every default filled in, and where each came from."""

    socket: Path
    runtime_dir: Path
    state_dir: Path
    idle_exit_s: float
    log_level: str
    log_format: str
    """`text` or `json`."""
    observe: bool
    """Look at jobs each second."""
    memory_bytes: int
    pool_bytes: int | None
    """None: derived from the job."""
    segment: Literal["auto", "shm", "memfd"]
    ring_slots: int | None
    """None: derived from the microbatches in flight."""
    loader_workers: int
    """A job begins with so many."""
    loader_workers_min: int
    loader_workers_max: int
    """Scaling keeps their number between these."""
    scaling: bool
    """False: partitions of sources stay on the workers that they begin on."""
    spares: int
    """Loader workers of a job that are set up and wait for the death of another."""
    shadow_bytes: int | None
    """Of the pool, for what the shadow of a critical source has ready; None: two chunks a loader."""
    late_s: float
    worker_memory_bytes: int
    """Private memory above which a loader worker is replaced."""
    horizon_steps: int
    journal_steps_kept: int
    allow_uids: tuple[int, ...]
    allow_gids: tuple[int, ...]
    roots: tuple[Path, ...]
    first_batch_s: float
    next_batch_s: float
    join_s: float
    reader_stuck_s: float
    restart_grace_s: float
    """0: a job ends with its last rank."""
    stores: StoreOptions
    """Remote shards: limits, cache, endpoints; names of variables, never a credential."""
    federation: FederationOptions | None
    """None: a node of its own, with a planner of its own."""
    dashboard: DashboardOptions | None
    """None: no dashboard, and no metrics."""
    origins: Mapping[str, str]
    """`section.key` to `default`, the file's path, `MSD__...` or `flag`."""

    @property
    def content_dir(self) -> Path:
        """Where copies of users' code and lists are kept, by content."""
        return self.state_dir / CONTENT_DIR


@dataclass(frozen=True)
class _PlainConfig:
    socket: str
    runtime_dir: str
    state_dir: str
    idle_exit_s: float
    log_level: str
    log_format: str
    observe: bool
    memory_bytes: int
    pool_bytes: int | None
    segment: Literal["auto", "shm", "memfd"]
    ring_slots: int | None
    loader_workers: int
    """A job begins with so many."""
    loader_workers_min: int
    loader_workers_max: int
    """Scaling keeps their number between these."""
    scaling: bool
    """False: partitions of sources stay on the workers that they begin on."""
    spares: int
    shadow_bytes: int | None
    late_s: float
    worker_memory_bytes: int
    horizon_steps: int
    journal_steps_kept: int
    allow_uids: tuple[int, ...]
    allow_gids: tuple[int, ...]
    roots: tuple[str, ...]
    first_batch_s: float
    next_batch_s: float
    join_s: float
    reader_stuck_s: float
    restart_grace_s: float
    stores: StoreOptions
    federation: FederationOptions | None
    dashboard: DashboardOptions | None
    origins: dict[str, str]


def encode_daemon_config(config: DaemonConfig) -> dict[str, Any]:
    """Return the settings as plain maps and scalars."""
    plain = encode_plain(config)
    for key in ("socket", "runtime_dir", "state_dir"):
        plain[key] = str(plain[key])
    plain["roots"] = [str(root) for root in config.roots]
    plain["origins"] = dict(config.origins)
    return dict(plain)


def decode_daemon_config(plain: object) -> DaemonConfig:
    """Return the settings from their plain form.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type.
    """
    found = decode_plain(_PlainConfig, plain, "daemon")
    values = {name: getattr(found, name) for name in _PlainConfig.__dataclass_fields__}
    for key in ("socket", "runtime_dir", "state_dir"):
        values[key] = Path(values[key])
    values["roots"] = tuple(Path(root) for root in found.roots)
    return DaemonConfig(**values)
