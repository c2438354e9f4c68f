"""Who a peer is, as the kernel says it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from msd_daemon.services.client_server import _peer_groups


def test_the_groups_of_a_peer_are_known() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert set(_peer_groups(ours)) == set(os.getgroups())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can have groups at will")
@pytest.mark.parametrize("count", [0, 1, 64, 65, 3000])
def test_however_many_they_are(count: int) -> None:
    code = (
        "import os, socket, sys\n"
        "from msd_daemon.services.client_server import _peer_groups\n"
        f"os.setgroups(range(5000, 5000 + {count}))\n"
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"assert sorted(_peer_groups(a)) == list(range(5000, 5000 + {count}))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
