"""Stores for the verbs that read sources in this process, set as the daemon's configuration says."""

from __future__ import annotations

from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.daemon_file import load_daemon_config
from msd_daemon.stores.options import configure_stores


def configure_local_stores() -> DaemonConfig:
    """Set this process's stores and return the configuration that says how.

    Raises:
        ConfigError: The daemon's configuration is faulty.
    """
    config = load_daemon_config()
    configure_stores(config.stores)
    return config
