"""Where `msdctl up` keeps the daemon, a rank waits for it and starts none of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from msd_client import daemon_start
from msd_client.contract.errors import DaemonUnavailableError
from msd_client.contract.paths import LAUNCHED


def test_a_rank_starts_no_daemon_where_a_launch_keeps_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a daemon of its own, in a cluster of another")

    monkeypatch.setattr(daemon_start, "_start", never)
    monkeypatch.setattr(daemon_start, "START_TIMEOUT_S", 0.1)
    with tempfile.TemporaryDirectory(prefix="msd-t", dir="/tmp") as folder:
        Path(folder, LAUNCHED).write_text("slurm-77.0\n")
        with pytest.raises(DaemonUnavailableError, match=r"that msdctl up started at .* 0\.1 s"):
            daemon_start.open_or_start(Path(folder, "msd.sock"), "trainer", 1.0)
