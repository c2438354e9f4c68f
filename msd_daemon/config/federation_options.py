"""A daemon as a node of a cluster: its name, its planners, where its exchange listens. Plain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FederationOptions:
    """The `[federation]` table, every default filled in."""

    node: str
    """Name of this node in the cluster; with keys it is that of its key."""
    planners: tuple[str, ...]
    """Endpoints of all planners, the one that leads and those that stand by."""
    listen: str
    """Where the exchange listens for other nodes; port 0: any free one."""
    announce: str
    """Host by which other nodes reach this one; empty: as it listens."""
    keys_dir: str
    """Folder of keys; empty: none, on loopback alone."""
    is_data_encrypted: bool
    """Of samples between nodes; control always is, where there are keys."""
    loads: bool
    """False: its workers load nothing, ranks here read what other nodes load."""
