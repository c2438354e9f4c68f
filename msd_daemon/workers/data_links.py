"""Plain TCP links for data frames, where the exchange does not encrypt.

ZeroMQ receives into memory of its own: a frame that it brings is gathered into a buffer first and copied
into its place after. Over these links a frame goes from pool to socket (sendmsg of the fragments where
they lie) and from socket to pool (recv_into). All that is asked and answered stays on ZeroMQ; so do data
frames while no link stands, so a port that a firewall closes costs speed alone.

A consumer connects and shows the token that its producer gave it with a Pong. Then frames come:
u32 header bytes | u32 data bytes | header (`exchange_messages`) | zeros up to a multiple of 256 | data.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import zmq

from federation.core.parcel_taker import FramePlace
from federation.exchange_messages import (
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    WIRE_VERSION,
    ParcelData,
    ParcelKey,
    decode_data,
    encode_data,
)
from msd_client.contract.errors import MsdError, ProtocolError
from msd_daemon.descriptors import is_readable

HELLO = struct.Struct("<4sI16s")
"""Magic, WIRE_VERSION, token."""
MAGIC = b"msdD"
HEAD = struct.Struct("<II")
HEAD_ALIGN_BYTES = 256
"""A head is received in one call where it has this size: nearly always."""
TOKEN_BYTES = 16
PIECES_MAX = 1000
"""More are gathered before: they would take several calls."""
PIECE_BYTES_MIN = 1024
"""Smaller pieces on the average are gathered, too: each costs the system as much as some hundred bytes do."""
TURN_BYTES = 8 << 20
"""Received from one link before others are looked at."""
WAKE_BYTES = 256 << 10
"""In the middle of a frame so much is waited for at once, where so much is left."""
SKIPPED_BYTES = 256 << 10
HELLO_NS = 5_000_000_000
STALLED_NS = 10_000_000_000
"""A link on which nothing moves for so long though something is to be sent is closed."""
STRANGERS_MAX = 64
"""Connections that have not shown a token."""
LOST_MS = 5000
"""The kernel gives a link up after so long without an answer."""


class DataOwner(Protocol):
    """What links ask of their exchange."""

    def frame_place(self, peer: str, data: ParcelData, size_bytes: int) -> FramePlace | None:
        """Return where a frame belongs that is on its way in; None: it is not wanted (any more)."""
        ...

    def frame_room(self, data: ParcelData, place: FramePlace, size_bytes: int) -> memoryview:
        """Return the bytes of the pool where a frame belongs."""
        ...

    def frame_came(self, peer: str, data: ParcelData, size_bytes: int, *, is_whole: bool) -> None:
        """A frame is here; not `is_whole`: some of it was written nowhere."""

    def link_lost(self, peer: str) -> None:
        """Nothing that was asked for comes over a peer's link any more."""


class _Address(NamedTuple):
    host: str
    port: int
    token: bytes


def encode_head(header: bytes, data_bytes: int) -> bytes:
    """Return what goes before a frame's data."""
    head = HEAD.pack(len(header), data_bytes) + header
    return head + bytes(-len(head) % HEAD_ALIGN_BYTES)


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        sock.setsockopt(socket.IPPROTO_TCP, option, 2)


class FrameSource(Protocol):
    """The bytes of a data frame, wherever they lie."""

    def __len__(self) -> int: ...

    @property
    def pieces(self) -> int:
        """In how many pieces they lie, about."""
        ...

    def send(self, sock: socket.socket, head: bytes | memoryview, done: int) -> int:
        """Send `head` and the bytes behind the first `done`; return how many bytes the system took.

        Raises:
            BlockingIOError: It takes nothing now.
            OSError: The connection is lost.
        """
        ...

    def copy(self, done: int, out: memoryview) -> None:
        """Write the bytes behind the first `done` into `out`, which is as long."""
        ...


class _Copied:
    """The rest of a frame, in memory of the link's own."""

    def __init__(self, data: memoryview, skipped: int) -> None:
        self._data = data
        self._skipped = skipped

    def __len__(self) -> int:
        return self._skipped + len(self._data)

    @property
    def pieces(self) -> int:
        return 1

    def send(self, sock: socket.socket, head: bytes | memoryview, done: int) -> int:
        return sock.sendmsg([head, self._data[done - self._skipped :]])

    def copy(self, done: int, out: memoryview) -> None:
        out[:] = self._data[done - self._skipped :]


class GivingLink:
    """The producer's end of a link: one frame at a time.

    Args:
        sock: Connected; the consumer has shown its token.
        peer: The consumer.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.is_watched_out = False
        """The poller looks whether something can be sent, not whether something came."""
        self.key: ParcelKey | None = None
        """Whose frame is being sent."""
        self.moved_ns = 0
        """When something was sent last."""
        self._head = memoryview(b"")
        """What of the frame's head is not sent."""
        self._source: FrameSource | None = None
        self._done = 0
        """Bytes of the source that are sent."""
        self._buffer = memoryview(b"")

    @property
    def is_busy(self) -> bool:
        """True while a frame is not sent to its end."""
        return self._source is not None

    def give(self, data: ParcelData, source: FrameSource) -> None:
        """Send a frame; what the system does not take now is sent by `flush`.

        Raises:
            OSError: The link is lost.
        """
        self.key = data.key
        self._head = memoryview(encode_head(encode_data(data), len(source)))
        self._source, self._done = source, 0
        self.moved_ns = time.monotonic_ns()
        pieces = source.pieces
        if pieces > PIECES_MAX or pieces * PIECE_BYTES_MIN > len(source):
            self.let_go()
        self.flush()

    def flush(self) -> None:
        """Send on.

        Raises:
            OSError: The link is lost.
        """
        source = self._source
        while source is not None:
            try:
                sent = source.send(self.sock, self._head, self._done)
            except BlockingIOError:
                return
            self.moved_ns = time.monotonic_ns()
            of_head = min(sent, len(self._head))
            self._head = self._head[of_head:]
            self._done += sent - of_head
            if self._done == len(source) and not self._head:
                source = self._source = self.key = None

    def let_go(self) -> None:
        """Keep a copy of what is left of the frame: the pool is not read any more."""
        if self._source is None or isinstance(self._source, _Copied):
            return
        left = len(self._source) - self._done
        if len(self._buffer) < left:
            self._buffer = memoryview(bytearray(left))
        self._source.copy(self._done, self._buffer[:left])
        self._source = _Copied(self._buffer[:left], self._done)

    def close(self) -> None:
        """Close it; a frame under way is lost."""
        self._source = self.key = None
        self.sock.close()


class TakingLink:
    """The consumer's end of a link.

    Args:
        peer: The producer.
        address: Where it listens, and the token that it gave.

    Raises:
        OSError: The address is none that can be connected to.
    """

    def __init__(self, peer: str, address: _Address) -> None:
        self.peer = peer
        self.address = address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.is_linked = False
        self.is_watched_out = True
        """As of a GivingLink: until it is connected."""
        self._head = memoryview(bytearray(HEADER_BYTES_MAX + 2 * HEAD_ALIGN_BYTES))
        self._wanted = HEAD_ALIGN_BYTES
        self._got = 0
        self._data: ParcelData | None = None
        """The frame whose bytes come now; None: its head does."""
        self._size = 0
        self._place: FramePlace | None = None
        self._is_sure = False
        """The frame's place was looked up in this turn: nothing but frames was heard of since."""
        self._low_water = 1
        try:
            _prepare(self.sock)
            with contextlib.suppress(BlockingIOError):
                self.sock.connect((address.host, address.port))
        except OSError:
            self.sock.close()
            raise

    def link(self) -> None:
        """Show the token, now that the connection is made or has failed.

        Raises:
            OSError: It has failed.
        """
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self.sock.send(HELLO.pack(MAGIC, WIRE_VERSION, self.address.token))
        self.is_linked = True

    def receive(self, owner: DataOwner, skipped: memoryview) -> None:
        """Take what has come, frame by frame.

        Args:
            owner: Knows where frames belong.
            skipped: Memory for bytes that are not wanted.

        Raises:
            OSError: The link is lost.
            ProtocolError: What came is no frame.
        """
        left = TURN_BYTES
        self._is_sure = False
        while left > 0:
            out = self._out(owner, skipped)
            try:
                count = self.sock.recv_into(out)
            except BlockingIOError:
                self._wait_for(min(self._wanted - self._got, WAKE_BYTES) if self._data else 1)
                return
            if not count:
                raise ConnectionResetError("the producer closed the link")
            left -= count
            self._got += count
            if self._got == self._wanted:
                self._step(owner)

    def _out(self, owner: DataOwner, skipped: memoryview) -> memoryview:
        if self._data is None:
            return self._head[self._got : self._wanted]
        if self._place is not None and not self._is_sure:
            # Its room may have been taken back since the last turn.
            self._is_sure = owner.frame_place(self.peer, self._data, self._size) == self._place
            if not self._is_sure:
                self._place = None
        if self._place is not None:
            return owner.frame_room(self._data, self._place, self._size)[self._got :]
        return skipped[: self._wanted - self._got]

    def _step(self, owner: DataOwner) -> None:
        """Go on from what is complete: a head, or a frame's data."""
        if self._data is not None:
            data, self._data = self._data, None
            self._got, self._wanted = 0, HEAD_ALIGN_BYTES
            is_whole = self._place is not None
            owner.frame_came(self.peer, data, self._size, is_whole=is_whole)
            return
        header_bytes, self._size = HEAD.unpack_from(self._head)
        if not 0 < header_bytes <= HEADER_BYTES_MAX or not 0 < self._size <= FRAME_BYTES_MAX:
            raise ProtocolError(f"a frame of {header_bytes} and {self._size} bytes")
        head_bytes = HEAD.size + header_bytes
        self._wanted = head_bytes + -head_bytes % HEAD_ALIGN_BYTES
        if self._got < self._wanted:
            return
        message = decode_data(bytes(self._head[HEAD.size : head_bytes]))
        self._data, self._got, self._wanted = message, 0, self._size
        self._place = owner.frame_place(self.peer, message, self._size)
        self._is_sure = True

    def _wait_for(self, low_water: int) -> None:
        # The kernel wakes a reader for each segment else; in the middle of a frame that is of no use.
        if low_water != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def close(self) -> None:
        """Close it; a frame under way is lost."""
        self.sock.close()


class DataLinks:
    """All links of one exchange process, both ends, and where consumers connect.

    Args:
        poller: Of the process's loop; what is ready goes to `ready`.
        host: Where to listen: a numeric address.
        owner: Gets what comes.
    """

    def __init__(self, poller: zmq.Poller, host: str, owner: DataOwner) -> None:
        self._poller = poller
        self._owner = owner
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(
            (host, 0), family=family, backlog=128, dualstack_ipv6=host == "::"
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._tokens: dict[str, bytes] = {}
        self._strangers: dict[int, tuple[socket.socket, int]] = {}
        """Who has shown no token, and since when."""
        self._giving: dict[str, GivingLink] = {}
        self._taking: dict[str, TakingLink] = {}
        self._by_fd: dict[int, GivingLink | TakingLink] = {}
        self._skipped = memoryview(bytearray(SKIPPED_BYTES))
        self._is_started = self._is_open = False

    def start(self) -> None:
        """Let consumers connect."""
        self._poller.register(self._listener.fileno(), zmq.POLLIN)
        self._is_started = self._is_open = True

    def token_of(self, peer: str) -> bytes:
        """Return the token by which a consumer is known that connects."""
        return self._tokens.setdefault(peer, os.urandom(TOKEN_BYTES))

    def keep_peers(self, peers: Collection[str]) -> None:
        """Close the links of all others."""
        for links in (self._giving, self._taking):
            for link in [link for name, link in links.items() if name not in peers]:
                self._drop(link)
        self._tokens = {name: token for name, token in self._tokens.items() if name in peers}

    def connect(self, peer: str, host: str, port: int, token: bytes) -> None:
        """Have a link to a producer; one that stands to the same process is kept."""
        address = _Address(host, port, token)
        known = self._taking.get(peer)
        if known is not None:
            if known.address == address:
                return
            self._drop(known)
        with contextlib.suppress(OSError):  # frames come over ZeroMQ; the next Pong tries again
            link = TakingLink(peer, address)
            self._taking[peer] = link
            self._by_fd[link.sock.fileno()] = link
            self._poller.register(link.sock.fileno(), zmq.POLLOUT)

    def disconnect(self, peer: str) -> None:
        """Close the link to a producer that does not answer."""
        link = self._taking.get(peer)
        if link is not None:
            self._drop(link)

    def giving(self, peer: str) -> GivingLink | None:
        """Return the link to a consumer, if one stands."""
        return self._giving.get(peer)

    def busy(self) -> set[str]:
        """Return the consumers whose links have not sent their last frame to its end."""
        return {name for name, link in self._giving.items() if link.is_busy}

    def give(self, link: GivingLink, data: ParcelData, source: FrameSource) -> bool:
        """Send a frame over a link that is not busy; return False where the link is lost."""
        try:
            link.give(data, source)
        except OSError:
            self._drop(link)
            return False
        self._watch(link)
        return True

    def let_go(self, is_concerned: Callable[[ParcelKey], bool]) -> None:
        """Read no pool any more for frames of parcels that are concerned."""
        for link in self._giving.values():
            if link.key is not None and is_concerned(link.key):
                link.let_go()

    def ready(self, fd: int) -> None:
        """Serve a descriptor that the poller found ready; one that is closed by now is passed over."""
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._strangers:
            self._greet(fd)
        elif fd in self._by_fd:
            self._serve(self._by_fd[fd])

    def tick(self, now_ns: int) -> None:
        """Close what says nothing and what does not move."""
        for fd, (sock, since_ns) in list(self._strangers.items()):
            if now_ns - since_ns > HELLO_NS:
                self._forget(fd)
                sock.close()
        if self._is_started and not self._is_open:
            self.start()
        for link in list(self._giving.values()):
            if link.is_busy and now_ns - link.moved_ns > STALLED_NS:
                self._drop(link)

    def close(self) -> None:
        """Close everything."""
        for link in list(self._by_fd.values()):
            self._drop(link)
        for fd, (sock, _) in list(self._strangers.items()):
            self._forget(fd)
            sock.close()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it is gone already
                continue
            except OSError:  # no descriptor is left: until `tick`
                self._poller.unregister(self._listener.fileno())
                self._is_open = False
                return
            if len(self._strangers) >= STRANGERS_MAX:
                sock.close()
                continue
            _prepare(sock)
            # Ready once all of it is here, or nothing more will be.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELLO.size)
            self._strangers[sock.fileno()] = (sock, time.monotonic_ns())
            self._poller.register(sock.fileno(), zmq.POLLIN)

    def _greet(self, fd: int) -> None:
        """Make a stranger with a token a link; one with anything else is cut."""
        sock, _ = self._strangers[fd]
        try:
            hello = sock.recv(HELLO.size)
        except OSError:
            hello = b""
        self._forget(fd)
        peer = self._peer_of(hello)
        if peer is None:
            sock.close()
            return
        known = self._giving.get(peer)
        if known is not None:
            self._drop(known)
        link = self._giving[peer] = GivingLink(sock, peer)
        self._by_fd[fd] = link
        self._poller.register(fd, zmq.POLLIN)

    def _peer_of(self, hello: bytes) -> str | None:
        if len(hello) != HELLO.size:
            return None
        magic, version, token = HELLO.unpack(hello)
        if magic != MAGIC or version != WIRE_VERSION:
            return None
        for peer, own in self._tokens.items():
            if hmac.compare_digest(token, own):
                return peer
        return None

    def _forget(self, fd: int) -> None:
        del self._strangers[fd]
        self._poller.unregister(fd)

    def _serve(self, link: GivingLink | TakingLink) -> None:
        try:
            if isinstance(link, GivingLink):
                if link.is_busy:
                    link.flush()
                elif is_readable(link.sock.fileno()):
                    raise ConnectionResetError("the consumer closed the link, or speaks on it")
            elif link.is_linked:
                link.receive(self._owner, self._skipped)
            else:
                link.link()
        except (OSError, MsdError):
            self._drop(link)
            return
        if self._by_fd.get(link.sock.fileno()) is link:
            self._watch(link)

    def _watch(self, link: GivingLink | TakingLink) -> None:
        wants_out = link.is_busy if isinstance(link, GivingLink) else not link.is_linked
        if wants_out != link.is_watched_out:
            # Of a consumer that reads nothing else comes but its end, which sending finds out too.
            self._poller.register(link.sock.fileno(), zmq.POLLOUT if wants_out else zmq.POLLIN)
            link.is_watched_out = wants_out

    def _drop(self, link: GivingLink | TakingLink) -> None:
        fd = link.sock.fileno()
        if self._by_fd.get(fd) is not link:  # what it brought had it dropped already
            return
        del self._by_fd[fd]
        self._poller.unregister(fd)
        if isinstance(link, GivingLink):
            del self._giving[link.peer]
        else:
            del self._taking[link.peer]
        link.close()
        if isinstance(link, TakingLink) and link.is_linked:
            self._owner.link_lost(link.peer)
