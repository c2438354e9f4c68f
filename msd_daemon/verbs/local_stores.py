"""Stores for the verbs that read sources in this process, set as the daemon's configuration says."""

from __future__ import annotations

from dataclasses import replace

from msd_client.msdctl.output import say
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.daemon_file import load_daemon_config
from msd_daemon.stores.options import configure_stores
from msd_daemon.stores.retry import tell_waits

DEADLINE_S = 30.0
"""Somebody waits at the terminal; a daemon outlives a longer fault of a store."""


def configure_local_stores() -> DaemonConfig:
    """Set this process's stores and return the configuration that says how.

    A read ends after 30 s unless `stores.deadline_s` was set; a long wait is told on stderr.

    Raises:
        ConfigError: The daemon's configuration is faulty.
    """
    config = load_daemon_config()
    if config.origins["stores.deadline_s"] == "default":
        config = replace(config, stores=replace(config.stores, deadline_s=DEADLINE_S))
    tell_waits(say)
    configure_stores(config.stores)
    return config
