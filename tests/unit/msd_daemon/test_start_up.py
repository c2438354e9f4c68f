"""What a process imports as it starts: features that few jobs use are paid for by those."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("state_dir", ["/proc/nope", "{}/file", "{}/file/below"])
def test_a_state_folder_that_cannot_be_made_is_named_with_its_key(
    tmp_path: Path, state_dir: str
) -> None:
    (tmp_path / "file").touch()
    where = state_dir.format(tmp_path)
    arguments = ["--state-dir", where, "--socket", str(tmp_path / "d.sock")]
    ran = subprocess.run(
        [sys.executable, "-m", "msd_daemon", *arguments],
        capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"MSD__DAEMON__RUNTIME_DIR": str(tmp_path / "run")},
    )  # fmt: skip
    assert ran.returncode == 78
    assert f"daemon.state_dir {where} can't be made" in ran.stderr
