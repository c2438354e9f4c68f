"""Settings of a cluster's planner, as its root reads them from `planner.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from federation.store.etcd_client import EtcdTls
from federation.store.plan_store import LEASE_S


@dataclass(frozen=True)
class PlannerConfig:
    """One planner of a cluster."""

    name: str
    """Told to nodes and other planners."""
    listen: str
    """Endpoint that it binds."""
    store: str
    """URL of the store that all planners of the cluster share."""
    state_dir: Path
    """Local folder: SQLite's store, working copies of journals."""
    announce: str | None = None
    """Endpoint at which nodes reach it; None: the one that is bound."""
    keys_dir: Path | None = None
    """Folder of CURVE keys; None: plain, on this machine alone."""
    lease_s: float = LEASE_S
    """So long a leader that says nothing is waited for."""
    tls: EtcdTls | None = None
    """Files for etcd over TLS."""
    log_level: str = "info"
    log_format: str = "text"
    """`text` or `json`."""
    endpoint_file: Path | None = None
    """Where the endpoint is written once it is bound, for whoever chose port 0."""
    ends_with_stdin: bool = False
    """It ends when its standard input closes, and not at signals: its launcher decides."""
