"""The dashboard's line to the daemon: one connection, one question at a time, answers kept for a moment.

However many look at the page, the daemon is asked once a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msd_client.contract.errors import AvailabilityError
from msd_client.session import Session

ANSWER_TIMEOUT_S = 10.0
KEPT_S = 0.8
"""So long an answer is given again."""
KEPT_MAX = 16


class DaemonLink:
    """Asks one daemon; connects again where it went away.

    Args:
        socket_path: The daemon's.
        clock: Monotonic seconds.
    """

    def __init__(self, socket_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.socket_path = socket_path
        self._clock = clock
        self._session: Session | None = None
        self._lock = asyncio.Lock()
        self._kept: dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[float, dict[str, Any]]] = {}

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Return the daemon's answer, at most KEPT_S old.

        Raises:
            DaemonUnavailableError: None answers there.
            MsdError: What it answered.
        """
        key = (verb, tuple(sorted(fields.items())))
        async with self._lock:
            kept = self._kept.get(key)
            if kept is not None and self._clock() - kept[0] < KEPT_S:
                return kept[1]
            answer = await asyncio.to_thread(self._ask, verb, fields)
            self._kept.pop(key, None)
            while len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = (self._clock(), answer)
            return answer

    def _ask(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        if self._session is None or not self._session.is_open:
            self._session = Session(self.socket_path, "control")
        try:
            answer: dict[str, Any] = self._session.request(verb, ANSWER_TIMEOUT_S, **fields).body[
                "ok"
            ]
        except AvailabilityError:
            self.close()
            raise
        return answer

    def close(self) -> None:
        """Leave the daemon."""
        if self._session is not None:
            self._session.close()
            self._session = None
