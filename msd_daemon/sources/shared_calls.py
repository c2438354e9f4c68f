"""Processes of the user's code that the source loaders of a worker have in common.

What a call gives depends on the record and its key alone, and a worker makes one call at a time: two
loaders of one function need one process. It ends with the last loader that uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from federation.model.recipe import UserCall


def open_call(rule: UserCall) -> Any:
    """Return the caller of a user's function, a process of its own (transforms.user_process)."""
    from msd_daemon.transforms.user_process import open_user_call

    return open_user_call(
        rule, memory_bytes_max=rule.memory_bytes_max, sample_s_max=rule.sample_s_max
    )


class SharedCalls:
    """Of one thread.

    Args:
        opener: Makes a caller; it has a `close`.
    """

    def __init__(self, opener: Callable[[UserCall], Any] = open_call) -> None:
        self._opener = opener
        self._opened: dict[UserCall, Any] = {}
        self._users: dict[UserCall, int] = {}

    def open(self, rule: UserCall) -> tuple[Any, Callable[[], None]]:
        """Return the caller of a function, and what says that it is not used any more, once."""
        if rule not in self._opened:
            self._opened[rule] = self._opener(rule)
        self._users[rule] = self._users.get(rule, 0) + 1
        is_closed = False

        def close() -> None:
            nonlocal is_closed
            if not is_closed:
                is_closed = True
                self._close(rule)

        return self._opened[rule], close

    def _close(self, rule: UserCall) -> None:
        self._users[rule] -= 1
        if not self._users[rule]:
            del self._users[rule]
            self._opened.pop(rule).close()
