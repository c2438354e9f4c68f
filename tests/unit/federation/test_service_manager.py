"""What systemd is told, by the protocol of sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation import service_manager
from federation.service_manager import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@msd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1))
        sock.setblocking(False)
        yield name, sock


def told(sock: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(sock.recv(4096).decode())
        except BlockingIOError:
            return found


def test_each_word_is_told(listener: tuple[str, socket.socket]) -> None:
    name, sock = listener
    manager = ServiceManager({"NOTIFY_SOCKET": name})
    manager.ready()
    manager.status("2 jobs")
    manager.status("2 jobs")
    manager.status("a\nREADY=1")
    manager.alive()  # no watchdog
    manager.stopping()
    assert told(sock) == ["READY=1", "STATUS=2 jobs", "STATUS=a READY=1", "STOPPING=1"]


def test_a_sign_of_life_comes_three_times_within_the_watchdogs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(service_manager.time, "monotonic", lambda: now[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "n"))
        sock.setblocking(False)
        environ = {
            "NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"
        }  # fmt: skip
        manager = ServiceManager(environ, 7)
        for _ in range(31):
            manager.alive()
            now[0] += 0.1
        assert told(sock) in (["WATCHDOG=1"] * 3, ["WATCHDOG=1"] * 4)
        ServiceManager(environ, 8).alive()  # a child of the one that is meant
        assert told(sock) == []


@pytest.mark.parametrize(
    "environ",
    [
        {}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nonexistent/n"},
        {"NOTIFY_SOCKET": "@nobody", "WATCHDOG_USEC": "x"}, {"NOTIFY_SOCKET": "/" + "x" * 300},
        {"NOTIFY_SOCKET": "@nobody", "WATCHDOG_USEC": "-5"},
    ],
)  # fmt: skip
def test_without_systemd_nothing_happens(environ: dict[str, str]) -> None:
    manager = ServiceManager(environ)
    manager.ready()
    manager.alive()
    manager.status("x")
    manager.stopping()
