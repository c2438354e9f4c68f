"""Reading ranges over HTTP: web servers as they are, signed S3 URLs, Hugging Face repositories."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from msd_daemon.stores.answers import (
    FailureKind,
    ObjectInfo,
    RangeAnswer,
    RequestFailure,
    clean_validator,
)
from msd_daemon.stores.http_client import HttpClient, Reply

_CONTENT_RANGE = re.compile(r"^bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})$")


class WebTransport:
    """Objects of one web server; it cannot be listed.

    Args:
        client: Connections.
        url_of: Makes the URL of a key for a method; may sign it.
        headers: Sent with each request.
        follows: Whether redirects are followed.
    """

    def __init__(
        self,
        client: HttpClient,
        url_of: Callable[[str, str], str],
        headers: Mapping[str, str] | None = None,
        *,
        follows: bool = True,
    ) -> None:
        self._client = client
        self._url_of = url_of
        self._headers = dict(headers or {})
        self._follows = follows

    def read(self, key: str, begin: int, end: int) -> RangeAnswer:
        """Return the bytes [begin, end) of an object, fewer only at its end."""
        reply = self._client.get(
            self._url_of("GET", key),
            {**self._headers, "Range": f"bytes={begin}-{end - 1}"},
            body_bytes_max=end - begin,
            follows=self._follows,
        )
        validator = _validator(reply)
        if reply.status == 416:
            return RangeAnswer(b"", _range_of(reply)[2], validator)
        if reply.status == 200:
            if begin:
                raise RequestFailure(FailureKind.REFUSED, "the server does not know byte ranges")
            return RangeAnswer(reply.body, len(reply.body), validator)
        first, last, size_bytes = _range_of(reply)
        if first != begin or last != min(end, size_bytes) - 1:
            raise RequestFailure(
                FailureKind.TRANSIENT,
                f"bytes {begin} to {end} were asked for, the answer says {first} to {last + 1}",
            )
        if len(reply.body) != last + 1 - first:
            raise RequestFailure(
                FailureKind.TRANSIENT,
                f"the body has {len(reply.body)} bytes of the {last + 1 - first} that it announces",
            )
        return RangeAnswer(reply.body, size_bytes, validator)

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's size and validator, asked for with its first byte.

        A ranged GET and not a HEAD: signed URLs and many servers answer it the same way.
        """
        reply = self._client.get(
            self._url_of("GET", key),
            {**self._headers, "Range": "bytes=0-0"},
            body_bytes_max=1,
            follows=self._follows,
        )
        if reply.status == 200:
            return ObjectInfo(key, len(reply.body), _validator(reply))
        return ObjectInfo(key, _range_of(reply)[2], _validator(reply))

    def list_page(self, folder: str, token: str) -> tuple[list[ObjectInfo], str | None]:
        """Raise: a web server cannot be listed."""
        del token
        raise RequestFailure(
            FailureKind.REFUSED, f"a web server cannot be listed (below {folder!r})"
        )


def _range_of(reply: Reply) -> tuple[int, int, int]:
    found = _CONTENT_RANGE.match(reply.headers.get("Content-Range", "").strip())
    if found is None:
        if reply.status == 416:
            return 0, -1, 0
        raise RequestFailure(FailureKind.TRANSIENT, "the answer does not say which bytes it holds")
    first, last, size = found.groups()
    return int(first or 0), int(last if last is not None else -1), int(size)


def _validator(reply: Reply) -> str:
    if reply.linked_etag:
        return clean_validator(reply.linked_etag)
    return clean_validator(reply.headers.get("ETag"), reply.headers.get("Last-Modified"))
