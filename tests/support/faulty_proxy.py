"""An HTTP server on loopback that counts requests and does to some of them what networks do.

It forwards to another server, or serves objects of its own; `choose` says for each request which
fault it gets, if any, so that tests decide by number and path, never by time.
"""

from __future__ import annotations

import http.client
import http.server
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote

_HOP = frozenset({"connection", "transfer-encoding", "content-length", "date", "server"})


@dataclass(frozen=True)
class Fault:
    """What happens to a request in place of its answer."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset_after: int = -1
    """Bytes of the body before a reset; -1 is none."""
    cut_after: int = -1
    """Bytes of the body before an orderly end that comes too soon."""
    stall_after: int = -1
    """Bytes of the body before nothing more comes, with the connection open."""
    shrink_to: int = -1
    """The answer says and holds so many bytes, however many were asked for."""


class Seen(NamedTuple):
    """A request as it came."""

    number: int
    method: str
    path: str
    """With its query."""
    range: str
    headers: Mapping[str, str]
    """By name in lower case."""

    @property
    def is_listing(self) -> bool:
        return "list-type=2" in self.path or "/tree/" in self.path or "comp=list" in self.path


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


Choose = Callable[[Seen], Fault | None]
Serve = Callable[[Seen], Answer]


class FaultyServer:
    """One server; `requests` holds all that came."""

    def __init__(self, serve: Serve) -> None:
        self.requests: list[Seen] = []
        self.choose: Choose = lambda _: None
        self.released = threading.Event()
        self.serve = serve
        self.port = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def note(self, method: str, path: str, headers: Mapping[str, str]) -> Seen:
        with self._lock:
            seen = Seen(len(self.requests), method, path, headers.get("range", ""), headers)
            self.requests.append(seen)
        return seen

    def reads(self) -> list[Seen]:
        """Return the requests that were no listings."""
        return [seen for seen in self.requests if not seen.is_listing]

    def listings(self) -> list[Seen]:
        return [seen for seen in self.requests if seen.is_listing]


def forward_to(port: int) -> Serve:
    """Return what asks the server at a port."""

    def serve(seen: Seen) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            headers = {
                name: value
                for name, value in seen.headers.items()
                if name.lower() not in {"connection", "accept-encoding"}
            }
            connection.request(seen.method, seen.path, headers=headers)
            response = connection.getresponse()
            kept = [(k, v) for k, v in response.getheaders() if k.lower() not in _HOP]
            return Answer(response.status, kept, response.read())
        finally:
            connection.close()

    return serve


def serve_objects(objects: Mapping[str, bytes], *, knows_ranges: bool = True) -> Serve:
    """Return what serves objects by path, with ETags, as a plain web server does."""

    def serve(seen: Seen) -> Answer:
        content = objects.get(unquote(seen.path.partition("?")[0].lstrip("/")))
        if content is None:
            return Answer(404, [], b"")
        tag = [("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')]
        if not seen.range or not knows_ranges:
            return Answer(200, tag, content)
        begin, end = (int(part) for part in seen.range.removeprefix("bytes=").split("-"))
        if begin >= len(content):
            return Answer(416, [*tag, ("Content-Range", f"bytes */{len(content)}")], b"")
        body = content[begin : end + 1]
        place = f"bytes {begin}-{begin + len(body) - 1}/{len(content)}"
        return Answer(206, [*tag, ("Content-Range", place)], body)

    return serve


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultyServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        seen = self.owner.note(
            self.command, self.path, {k.lower(): v for k, v in self.headers.items()}
        )
        fault = self.owner.choose(seen)
        if fault is not None and fault.status:
            self._send(Answer(fault.status, list(fault.headers.items()), fault.body), Fault())
            return
        self._send(self.owner.serve(seen), fault or Fault())

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _send(self, answer: Answer, fault: Fault) -> None:
        body = answer.body
        headers = answer.headers
        if fault.shrink_to >= 0 and answer.status == 206:
            body = body[: fault.shrink_to]
            headers = [
                (k, v if k != "Content-Range" else _shrunk(v, len(body))) for k, v in headers
            ]
        self.send_response(answer.status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        limits = [n for n in (fault.reset_after, fault.cut_after, fault.stall_after) if n >= 0]
        try:
            self.wfile.write(body[: limits[0]] if limits else body)
            self.wfile.flush()
        except OSError:
            self.close_connection = True
            return
        if fault.stall_after >= 0:
            self.owner.released.wait(60)
        if fault.reset_after >= 0:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RD)
        if limits:
            self.close_connection = True


def _shrunk(text: str, count: int) -> str:
    place, _, size = text.removeprefix("bytes ").partition("/")
    begin = int(place.partition("-")[0])
    return f"bytes {begin}-{begin + count - 1}/{size}"


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that go away are what the tests are about


@contextmanager
def running_server(serve: Serve) -> Iterator[FaultyServer]:
    owner = FaultyServer(serve)
    handler = type("Handler", (_Handler,), {"owner": owner})
    server = _Server(("127.0.0.1", 0), handler)
    owner.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield owner
    finally:
        owner.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
