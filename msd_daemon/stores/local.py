"""Local files behind the interface of a store: `file://` URLs and plain paths."""

from __future__ import annotations

import os

from msd_daemon.stores.answers import FailureKind, ObjectInfo, RangeAnswer, RequestFailure


class LocalTransport:
    """Files below the root folder; keys are absolute paths without their first slash."""

    def read(self, key: str, begin: int, end: int) -> RangeAnswer:
        """Return the bytes [begin, end) of a file, fewer only at its end."""
        try:
            with open(f"/{key}", "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                body = bytearray()
                while begin + len(body) < end:
                    data = os.pread(file.fileno(), end - begin - len(body), begin + len(body))
                    if not data:
                        break
                    body += data
        except OSError as error:
            raise _failure(error) from error
        return RangeAnswer(body, status.st_size, str(status.st_mtime_ns))

    def stat(self, key: str) -> ObjectInfo:
        """Return a file's size and time of change."""
        try:
            status = os.stat(f"/{key}")
        except OSError as error:
            raise _failure(error) from error
        return ObjectInfo(key, status.st_size, str(status.st_mtime_ns))

    def list_page(self, folder: str, token: str) -> tuple[list[ObjectInfo], str | None]:
        """Return all files below a folder, sorted."""
        del token
        keys = [
            os.path.join(parent, name).lstrip("/")
            for parent, _, names in os.walk(f"/{folder}")
            for name in names
        ]
        return [self.stat(key) for key in sorted(keys) if os.path.isfile(f"/{key}")], None


def _failure(error: OSError) -> RequestFailure:
    kind = FailureKind.TRANSIENT
    if isinstance(error, FileNotFoundError):
        kind = FailureKind.MISSING
    elif isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)):
        kind = FailureKind.REFUSED
    return RequestFailure(kind, error.strerror or type(error).__name__)
