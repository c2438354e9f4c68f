"""A process that takes a user's rights has no others left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from msd_client.contract.errors import PermissionDeniedError
from msd_daemon.workers import rights
from msd_daemon.workers.rights import Rights, rights_for

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give its rights up")

_CODE = """
import os, sys
from msd_daemon.workers.rights import Rights
secret, shared = sys.argv[1:3]
Rights(65534, 65534, (65534, 4242)).take()
assert os.getgroups() == [4242, 65534] or set(os.getgroups()) == {4242, 65534}
for call in (lambda: open(secret), lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.kill(1, 0)):
    try:
        call()
    except PermissionError:
        continue
    raise AssertionError(call)
open(shared).read()
status = open("/proc/self/status").read()
assert "CapEff:\\t0000000000000000" in status
assert "CapPrm:\\t0000000000000000" in status
assert "NoNewPrivs:\\t1" in status
print("done")
"""


@needs_root
def test_what_is_taken_is_all_that_is_left(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o001)
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    for path, mode, gid in ((secret, 0o600, 0), (shared, 0o640, 4242)):
        path.write_text("x")
        os.chown(path, 0, gid)
        path.chmod(mode)
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(secret), str(shared)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_jobs_of_the_daemons_own_user_and_of_root_need_none() -> None:
    assert rights_for(1000, (1000,), 1000) is None
    assert rights_for(0, (0,), 1000) is None


def test_others_need_a_daemon_that_may_become_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "may_become_others", lambda: True)
    assert rights_for(1001, (7, 8), 1000) == Rights(1001, 7, (7, 8))
    monkeypatch.setattr(rights, "may_become_others", lambda: False)
    with pytest.raises(PermissionDeniedError, match="--many-users"):
        rights_for(1001, (7, 8), 1000)
