"""Log lines as JSON objects, and the cause that runs from an event to all that follows from it.

An event (a worker's end, a client's order, a lost planner) opens a cause; every line that is written
while it is dealt with, in tasks that it starts too, carries the cause's id and name. `grep` for one id
gives the story of one event.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every record: others were given as `extra`."""

_cause: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("cause", default=("", ""))
_numbers = itertools.count(1)


@contextlib.contextmanager
def caused_by(event: str) -> Iterator[str]:
    """Have what is logged inside, and in tasks begun there, carry a new cause; give its id.

    Args:
        event: What happened, in a word or two: `child_ended`, `msdctl skip`.
    """
    identity = f"{os.getpid()}-{next(_numbers)}"
    token = _cause.set((identity, event))
    try:
        yield identity
    finally:
        _cause.reset(token)


def present_cause() -> tuple[str, str]:
    """Return id and event of the cause that is dealt with, empty where none is."""
    return _cause.get()


class JsonFormatter(logging.Formatter):
    """One object a line.

    Keys: ts (Unix s), level, logger, message, pid, then cause_id and cause where there is one, what the
    line was given as extra, and exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        found: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        identity, event = _cause.get()
        if identity:
            found |= {"cause_id": identity, "cause": event}
        # What a line says of its own goes last: it may not rename what every line has.
        for key, value in vars(record).items():
            if key not in _PLAIN and value is not None:
                found[f"{key}_" if key in found else key] = value
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(level: str, form: str) -> None:
    """Log to standard error.

    Args:
        level: Least level: debug, info, warning, error.
        form: `text` or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
