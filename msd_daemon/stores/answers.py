"""What one request to a store gave: an answer, or why there is none and what that asks for."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class FailureKind(enum.Enum):
    """What a failed request asks for."""

    THROTTLED = enum.auto()
    """Too many requests: all of this node slow down, this one comes again."""
    TRANSIENT = enum.auto()
    """Connection, time-out, short body, server error: comes again."""
    DENIED = enum.auto()
    """Rights or credentials: comes again once, with fresh ones."""
    MISSING = enum.auto()
    """No such object."""
    REFUSED = enum.auto()
    """Any other answer; coming again would not help."""


class RequestFailure(Exception):  # noqa: N818 - caught and classed, never the user's
    """One request failed.

    Args:
        kind: What that asks for.
        reason: For people; never holds a URL's query, a header or a body.
        retry_after_s: What the server asked for, 0 where it did not.
    """

    def __init__(self, kind: FailureKind, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RangeAnswer:
    """Bytes of an object, and which object they are of."""

    body: bytes | bytearray
    size_bytes: int
    """Of the whole object."""
    validator: str
    """ETag, or Last-Modified where there is none; empty where the server gives neither."""


class ObjectInfo(NamedTuple):
    """An object as a listing or a head request has it."""

    key: str
    size_bytes: int
    validator: str


class Transport(Protocol):
    """Requests to one bucket or host; each method call is one try, safe in any thread."""

    def read(self, key: str, begin: int, end: int) -> RangeAnswer:
        """Return the bytes [begin, end) of an object, fewer only at its end.

        Raises:
            RequestFailure: There is no whole answer.
        """
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's size and validator.

        Raises:
            RequestFailure: There is none, or no answer.
        """
        ...

    def list_page(self, folder: str, token: str) -> tuple[list[ObjectInfo], str | None]:
        """Return some objects below a folder, and what to give for those behind them.

        Args:
            folder: Begins every key: with its slash, or empty.
            token: Of the page before; empty for the first one. None came with the last.

        Raises:
            RequestFailure: The page could not be had.
        """
        ...


STATUS_THROTTLED = frozenset({429, 503})
STATUS_TRANSIENT = frozenset({408, 425, 500, 502, 504, 507, 509, 520, 521, 522, 523, 524})
STATUS_DENIED = frozenset({401, 403})
STATUS_MISSING = frozenset({404, 410})

_CODES = {
    "SlowDown": FailureKind.THROTTLED,
    "RequestLimitExceeded": FailureKind.THROTTLED,
    "Throttling": FailureKind.THROTTLED,
    "TooManyRequests": FailureKind.THROTTLED,
    "RequestTimeout": FailureKind.TRANSIENT,
    "InternalError": FailureKind.TRANSIENT,
    "ExpiredToken": FailureKind.DENIED,
    "InvalidToken": FailureKind.DENIED,
    "TokenRefreshRequired": FailureKind.DENIED,
}


def kind_of_status(status: int, code: str = "") -> FailureKind:
    """Return what an HTTP status asks for; `code` is the store's own error code, if it gave one."""
    by_code = _CODES.get(code)
    if by_code is not None and (status == 400 or status >= 500):
        return by_code
    if status in STATUS_THROTTLED:
        return FailureKind.THROTTLED
    if status in STATUS_TRANSIENT or status > 504:
        return FailureKind.TRANSIENT
    if status in STATUS_DENIED:
        return FailureKind.DENIED
    return FailureKind.MISSING if status in STATUS_MISSING else FailureKind.REFUSED


def clean_validator(etag: str | None, last_modified: str | None = None) -> str:
    """Return an ETag without quotes and weakness mark, else the modification time, else nothing."""
    text = (etag or "").strip().removeprefix("W/").strip('"')
    return text or (last_modified or "").strip()


def object_fingerprint(name: str, size_bytes: int, validator: str) -> str:
    """Return the fingerprint (32 hex digits) of an object: its name, size and validator.

    The name is the last part of the key, so that a moved folder keeps its fingerprints.
    """
    text = f"{size_bytes}\n{validator}\n{name}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
