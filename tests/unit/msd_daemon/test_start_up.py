"""What a process imports as it starts: features that few jobs use are paid for by those."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "late"),
    [
        ("msd_daemon.services.daemon", ("msd_daemon.transforms", "sqlite3")),
        ("msd_daemon.workers.loader_main", ("federation.planning.sampling", "federation.planning.packing")),
        ("msd_daemon.workers.constructor_main", ("federation.planning", "msd_daemon.gather.route")),
    ],
)  # fmt: skip
def test_a_process_starts_without(module: str, late: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {late!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
