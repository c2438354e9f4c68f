"""Where the dashboard of a daemon listens. Plain."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class DashboardOptions:
    """The `[dashboard]` table, every default filled in."""

    host: str
    """Address that it binds."""
    port: int
    """0: any free one."""
    token_file: str
    """File with the token that visitors need; empty: none, on loopback alone."""


def is_loopback(host: str) -> bool:
    """Tell whether an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:8710`, `[::1]:8710` or `localhost:0`.

    Raises:
        ValueError: It is none, `problem; remedy`.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("is not HOST:PORT; write one as 127.0.0.1:8710")
    return host, int(port)
