"""Daemon and planner as services of Type=notify: systemd hears of start, life and end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node import running_node, wait_until
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes


class Listener:
    """What systemd would hear, with the sender's pid as it checks it (NotifyAccess=main)."""

    def __init__(self, path: Path) -> None:
        self.heard: list[tuple[int, str]] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock.bind(str(path))
        self._sock.setblocking(False)
        self.environ = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "1500000"}

    def words(self) -> list[str]:
        while True:
            try:
                data, about, _, _ = self._sock.recvmsg(4096, 256)
            except BlockingIOError:
                return [word for _, word in self.heard]
            pid = int.from_bytes(about[0][2][:4], sys.byteorder)
            self.heard.append((pid, data.decode()))

    def close(self) -> None:
        self._sock.close()


def check(listener: Listener, pid: int) -> None:
    words = listener.words()
    assert words[0] == "READY=1"
    assert words[-1] == "STOPPING=1"
    assert {sender for sender, _ in listener.heard} == {pid}


def test_the_daemon_tells_its_start_its_life_and_its_end(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "notify")
    with running_node(tmp_path / "n", environ=listener.environ) as node:
        wait_until(lambda: listener.words().count("WATCHDOG=1") >= 2, "two signs of life")
        # This test's own request is a client, too.
        assert any(re.fullmatch(r"STATUS=0 jobs, [01] clients", word) for word in listener.words())
        pid = node.process.pid
    check(listener, pid)
    listener.close()


def test_the_planner_tells_its_start_its_life_and_its_end(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "notify")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "msd_daemon.planner_app", "--listen", "tcp://127.0.0.1:0",
            "--state-dir", str(tmp_path / "state"),
        ],
        cwd=ROOT, env={**os.environ, **listener.environ}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: listener.words().count("WATCHDOG=1") >= 2, "two signs of life")
        assert "STATUS=leads, term 1" in listener.words()
    finally:
        process.terminate()
        process.wait(20)
    check(listener, process.pid)
    listener.close()
