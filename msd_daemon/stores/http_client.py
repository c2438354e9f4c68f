"""GET requests over kept connections of the standard library; every failure is classed.

A body is read into one buffer of the size asked for, so that a server cannot make a process grow.
"""

from __future__ import annotations

import email.utils
import http.client
import os
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from msd_daemon.stores.answers import FailureKind, RequestFailure, kind_of_status

ERROR_BODY_BYTES = 4096
TEXT_BYTES_MAX = 64 << 20
REDIRECTS_MAX = 5
IDLE_CONNECTIONS_MAX = 32
SLOWEST_BYTES_PER_S = 32 * 1024
"""A body that trickles slower is a stall, though no silence is as long as the read time-out."""

_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PATH_SAFE = "/%:=&?~#+!$,;'@()*[]-._"


class Place(NamedTuple):
    """Where a connection goes."""

    scheme: str
    host: str
    port: int


class Reply(NamedTuple):
    """An answer of status 200 or 206, or 416."""

    status: int
    headers: http.client.HTTPMessage
    body: bytearray
    linked_etag: str
    """X-Linked-Etag of the first hop, where a hub redirects to its storage."""


class HttpClient:
    """Connections of a process to any hosts; safe in any thread.

    Args:
        connect_timeout_s: Longest wait for a connection.
        read_timeout_s: Longest silence inside an answer.
    """

    def __init__(self, connect_timeout_s: float, read_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._lock = threading.Lock()
        self._idle: dict[Place, list[http.client.HTTPConnection]] = {}
        self._tls: ssl.SSLContext | None = None

    def get(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        body_bytes_max: int = TEXT_BYTES_MAX,
        follows: bool = True,
    ) -> Reply:
        """Return an answer with its whole body.

        Args:
            url: Absolute URL; it may be signed, no message repeats its query.
            headers: Sent as they are; Authorization goes to the first host alone.
            body_bytes_max: A longer body is refused before it is read.
            follows: Whether redirects are followed.

        Raises:
            RequestFailure: The status is an error, the connection failed, or the body was cut.
        """
        linked_etag = ""
        first = _place_of(url)
        for _ in range(REDIRECTS_MAX + 1):
            place = _place_of(url)
            sent = dict(headers)
            if place != first:
                sent.pop("Authorization", None)
            status, answered, body = self._try(place, url, sent, body_bytes_max)
            if status not in _REDIRECTS:
                return Reply(status, answered, body, linked_etag)
            linked_etag = linked_etag or answered.get("X-Linked-Etag", "")
            target = answered.get("Location")
            if not follows or not target:
                raise RequestFailure(
                    FailureKind.REFUSED, f"HTTP {status}: the object lies elsewhere (region?)"
                )
            url = urljoin(url, target)
            if urlsplit(url).scheme not in ("http", "https"):
                raise RequestFailure(FailureKind.REFUSED, "redirected to what is no HTTP URL")
        raise RequestFailure(FailureKind.REFUSED, f"over {REDIRECTS_MAX} redirects")

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _try(
        self, place: Place, url: str, headers: Mapping[str, str], body_bytes_max: int
    ) -> tuple[int, http.client.HTTPMessage, bytearray]:
        while True:
            connection = self._take(place)
            is_fresh = connection is None
            if connection is None:
                connection = self._connect(place)
            try:
                parts = urlsplit(url)
                target = quote(parts.path or "/", safe=_PATH_SAFE)
                if parts.query:
                    target += f"?{parts.query}"
                if isinstance(connection, _ProxiedConnection):
                    target = f"{place.scheme}://{parts.netloc}{target}"
                connection.request(
                    "GET", target, headers={"Accept-Encoding": "identity", **headers}
                )
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The server may have closed a kept connection since its last answer.
                if is_fresh or isinstance(error, TimeoutError):
                    raise _lost(error) from error
                continue
            except ValueError as error:
                connection.close()
                raise RequestFailure(
                    FailureKind.REFUSED, "the key makes no HTTP request"
                ) from error
            return self._receive(place, connection, response, body_bytes_max)

    def _receive(
        self,
        place: Place,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        body_bytes_max: int,
    ) -> tuple[int, http.client.HTTPMessage, bytearray]:
        is_kept = False
        try:
            if response.status in (200, 206):
                body = self._read_body(response, body_bytes_max)
            else:
                # What a server writes beside an error may hold keys and signatures: the code alone.
                body = bytearray(response.read(ERROR_BODY_BYTES))
            is_kept = response.isclosed() and not response.will_close
        except (OSError, http.client.HTTPException) as error:
            raise _lost(error) from error
        finally:
            if is_kept:
                self._give_back(place, connection)
            else:
                connection.close()
        if response.status in (200, 206, 416) or response.status in _REDIRECTS:
            return response.status, response.headers, body
        found = _CODE.search(body)
        code = "" if found is None else found.group(1).decode()
        raise RequestFailure(
            kind_of_status(response.status, code),
            f"HTTP {response.status}" + (f" {code}" if code else ""),
            retry_after_s(response.headers.get("Retry-After"), time.time()),
        )

    def _read_body(self, response: http.client.HTTPResponse, bytes_max: int) -> bytearray:
        length = response.length
        if length is not None and length > bytes_max:
            raise RequestFailure(
                FailureKind.REFUSED,
                f"the answer has {length} bytes where at most {bytes_max} were asked for: does the "
                "server know byte ranges?",
            )
        latest = time.monotonic() + self._read_timeout_s + bytes_max / SLOWEST_BYTES_PER_S
        body = bytearray(length) if length is not None else bytearray()
        if length is None:
            while data := response.read1(1 << 16):
                body += data
                if len(body) > bytes_max:
                    raise RequestFailure(
                        FailureKind.REFUSED, f"the answer has over {bytes_max} bytes"
                    )
                _check_pace(latest)
            return body
        view, done = memoryview(body), 0
        while done < length:
            count = response.readinto(view[done : done + (1 << 20)])
            if count == 0:
                raise RequestFailure(
                    FailureKind.TRANSIENT, f"the body ended after {done} of {length} bytes"
                )
            done += count
            _check_pace(latest)
        response.read()  # takes the end of the answer, so that the connection can be kept
        return body

    def _take(self, place: Place) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(place)
            return idle.pop() if idle else None

    def _give_back(self, place: Place, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(place, [])
            if len(idle) < IDLE_CONNECTIONS_MAX:
                idle.append(connection)
                return
        connection.close()

    def _connect(self, place: Place) -> http.client.HTTPConnection:
        proxy = _proxy_of(place)
        timeout_s = self._connect_timeout_s
        connection: http.client.HTTPConnection
        if place.scheme == "https":
            at = place if proxy is None else proxy
            connection = http.client.HTTPSConnection(
                at.host, at.port, timeout=timeout_s, context=self._tls_context()
            )
            if proxy is not None:
                connection.set_tunnel(place.host, place.port)
        elif proxy is not None:
            connection = _ProxiedConnection(proxy.host, proxy.port, timeout=timeout_s)
        else:
            connection = http.client.HTTPConnection(place.host, place.port, timeout=timeout_s)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _lost(error, "connecting: ") from error
        connection.sock.settimeout(self._read_timeout_s)
        with_delay: socket.socket = connection.sock
        with_delay.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _ProxiedConnection(http.client.HTTPConnection):
    """A connection to a proxy for plain HTTP: it is sent whole URLs."""


def _place_of(url: str) -> Place:
    parts = urlsplit(url)
    return Place(
        parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    )


def _proxy_of(place: Place) -> Place | None:
    proxies = urllib.request.getproxies_environment()
    url = proxies.get(place.scheme)
    if not url or urllib.request.proxy_bypass_environment(place.host, proxies):  # type: ignore[attr-defined]
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return Place("http", parts.hostname or "", parts.port or 80)


def _check_pace(latest: float) -> None:
    if time.monotonic() > latest:
        raise RequestFailure(FailureKind.TRANSIENT, "the body trickles: taken for a stall")


def _lost(error: Exception, doing: str = "") -> RequestFailure:
    if isinstance(error, ssl.SSLCertVerificationError):
        return RequestFailure(
            FailureKind.REFUSED, f"{doing}its certificate is not trusted ({error.verify_message})"
        )
    if isinstance(error, TimeoutError):
        what = "no bytes came for the read time-out" if not doing else "it timed out"
    elif isinstance(error, socket.gaierror):
        what = "the host's name is unknown"
    elif isinstance(error, OSError) and error.errno is not None:
        what = os.strerror(error.errno) if error.errno > 0 else type(error).__name__
    else:
        what = type(error).__name__
    return RequestFailure(FailureKind.TRANSIENT, f"{doing}{what}")


def retry_after_s(text: str | None, now: float) -> float:
    """Return what a Retry-After header asks for: seconds or a date; 0 where it is no such thing."""
    if not text:
        return 0.0
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(min(int(text[:9]), 86_400))
    try:
        date = email.utils.parsedate_to_datetime(text)
        return min(max(0.0, date.timestamp() - now), 86_400.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0
