"""What a service tells systemd: that it is ready, that it lives, that it ends, and a line for people.

The protocol is a datagram of lines to the socket that NOTIFY_SOCKET names (sd_notify(3)). Without
that variable nothing is told. A message that can't be delivered is dropped: the watchdog notices.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

WATCHDOG_SHARE = 3
"""A sign of life that often within the time after which systemd would start us again."""


class ServiceManager:
    """The process that started this one and watches it, if one does.

    Args:
        environ: The environment.
        pid: Of this process: systemd's watchdog is meant for one.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL that abstract addresses begin with; vsock is for machines.
        self._address = "\0" + name[1:] if name.startswith("@") else name
        if not name.startswith(("/", "@")):
            self._address = ""
        self._beat_s = _watchdog_s(environ, os.getpid() if pid is None else pid) / WATCHDOG_SHARE
        self._beat_at = 0.0
        self._status = ""

    def ready(self) -> None:
        """Say that requests are answered from now on."""
        self._tell("READY=1")

    def reloading(self) -> None:
        """Say that the configuration is read again; `ready` follows."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that the end has begun."""
        self._tell("STOPPING=1")

    def alive(self) -> None:
        """Say that the loop comes round; as often as the watchdog needs it, however often called."""
        now = time.monotonic()
        if self._beat_s and now - self._beat_at >= self._beat_s:
            self._beat_at = now
            self._tell("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Show a line where `systemctl status` does, if it is another one."""
        if text != self._status:
            self._status = text
            self._tell("STATUS=" + text.replace("\n", " "))

    def _tell(self, line: str) -> None:
        if not self._address:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
            sock.setblocking(False)
            sock.sendto(line.encode(), self._address)


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """Return the time within which systemd wants a sign of life; 0: it wants none of this process."""
    meant = environ.get("WATCHDOG_PID", "")
    text = environ.get("WATCHDOG_USEC", "")
    if (meant and meant != str(pid)) or not text.isascii() or not text.isdecimal():
        return 0.0
    return int(text[:18]) / 1e6
