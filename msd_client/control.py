"""One-shot requests to a daemon: what msdctl and scripts use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msd_client.contract.paths import default_socket_path
from msd_client.session import Session

REQUEST_TIMEOUT_S = 10.0


def request(
    socket_path: Path | None, message: dict[str, Any], *, timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, Any]:
    """Send `{verb, ...}` to the daemon and return its answer.

    Args:
        socket_path: The daemon's socket; None for the default of this user.
        message: `verb` and its fields.
        timeout_s: Longest wait for the answer.

    Raises:
        DaemonUnavailableError: No daemon there.
        MsdError: What the daemon answered.
    """
    path = socket_path or default_socket_path(os.environ, os.getuid())
    fields = {key: value for key, value in message.items() if key != "verb"}
    session = Session(path, "control")
    try:
        answer: dict[str, Any] = session.request(message["verb"], timeout_s, **fields).body["ok"]
        return answer
    finally:
        session.close()
