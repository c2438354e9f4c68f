"""Code run as another user against a daemon of this test's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node import Node
from tests.support.sources import ROOT

OTHER_UID = 65534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")

_BECOME = """
import os, sys
import msd_client
import msd_client.numpy_adapter
from pathlib import Path
from msd_client.control import request
os.setgroups([]); os.setgid(65534); os.setuid(65534)
SOCKET = Path(sys.argv[1])
"""


def open_to_others(path: Path) -> None:
    """Let others pass through the folders down to a path."""
    for folder in [path, *path.parents]:
        mode = folder.stat().st_mode
        if folder.is_dir() and mode & 0o001 == 0:
            folder.chmod(mode | 0o001)


def as_other_user(code: str, node: Node, *arguments: str) -> str:
    """Run code as OTHER_UID and return what it printed; SOCKET, request and msd_client are there."""
    open_to_others(node.folder)
    node.socket.chmod(0o666)
    done = subprocess.run(
        [sys.executable, "-c", _BECOME + code, str(node.socket), *arguments],
        capture_output=True, text=True, check=False, timeout=100, cwd=ROOT,
    )  # fmt: skip
    return done.stdout + done.stderr
