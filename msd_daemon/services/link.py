"""The daemon's ends of its local sockets: frame links to children, packet peers to clients.

Both read through the loop's `add_reader` until nothing is left, send at once, and queue what the
kernel does not take. Nothing here decides anything.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from msd_client.contract.errors import ProtocolError, encode_error
from msd_client.contract.local_messages import (
    EVENT,
    PACKET_BYTES_MAX,
    RELEASE,
    ControlMessage,
    PacketJoiner,
    RingEvent,
    encode_control,
)
from msd_daemon.workers.frame_link import FRAME_BYTES_MAX, HEAD

RECEIVE_BYTES = 1 << 16
QUEUE_BYTES_MAX = 64 << 20
READ_ROUNDS_MAX = 16
"""Packets or reads taken from one peer before the loop looks at the others."""


ENDING_ROUNDS_MAX = 4096
"""Of a peer that is gone: more packets than a socket's buffer holds."""

PARTS_MAX = 64
"""Well under the kernel's limit of 1,024 buffers a call."""
SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class _QueuedSender:
    """Sends in order; what the kernel refuses waits for the socket to become writable."""

    def __init__(self, sock: socket.socket, *, is_stream: bool) -> None:
        self._sock = sock
        self._is_stream = is_stream
        self._queue: deque[tuple[bytes | memoryview, tuple[int, ...]]] = deque()
        self._queued_bytes = 0
        self._loop = asyncio.get_running_loop()

    @property
    def is_waiting(self) -> bool:
        """True while something is queued: what comes next must queue behind it."""
        return bool(self._queue)

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send or queue.

        Raises:
            BufferError: The peer does not read and the queue is full.
            OSError: The peer is gone.
        """
        if not self._queue:
            rest = self._send_some(data, fds)
            if rest is None:
                return
            self._loop.add_writer(self._sock.fileno(), self._flush)
            data, fds = rest
        self._queue.append((data, fds))
        self._queued_bytes += len(data)
        if self._queued_bytes > QUEUE_BYTES_MAX:
            raise BufferError(f"peer does not read: {self._queued_bytes} bytes wait for it")

    def send_parts(self, parts: list[bytes]) -> None:
        """Send the parts of a stream one after the other, without joining them first.

        Raises:
            BufferError: The peer does not read and the queue is full.
            OSError: The peer is gone.
        """
        if self._queue or len(parts) > PARTS_MAX:
            self.send(b"".join(parts))
            return
        try:
            sent = self._sock.sendmsg(parts, (), SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        if sent < sum(map(len, parts)):
            self.send(b"".join(parts)[sent:])

    def _send_some(self, data: Any, fds: tuple[int, ...]) -> tuple[Any, tuple[int, ...]] | None:
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self._sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            else:
                sent = self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return data, fds
        except OSError:
            close_all(fds)  # the peer is gone, they are still ours
            raise
        close_all(fds)  # they went with the first byte
        if self._is_stream and sent < len(data):
            return memoryview(data)[sent:], ()
        return None

    def _flush(self) -> None:
        with contextlib.suppress(OSError):
            while self._queue:
                data, fds = self._queue.popleft()
                self._queued_bytes -= len(data)
                rest = self._send_some(data, fds)
                if rest is not None:
                    self._queue.appendleft(rest)
                    self._queued_bytes += len(rest[0])
                    return
        self._loop.remove_writer(self._sock.fileno())

    def close(self) -> None:
        """Forget what waits."""
        if self._queue:
            self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._queue:
            close_all(fds)
        self._queue.clear()


def close_all(fds: tuple[int, ...]) -> None:
    """Close descriptors that were to be sent."""
    for fd in fds:
        os.close(fd)


class ChildLink:
    """Frames to and from one child; `fds` given to `send` are closed once sent.

    Frames of one turn of the loop leave in one call: waking a child costs more than its order.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[int, bytes], None],
        on_closed: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._sender = _QueuedSender(sock, is_stream=True)
        self._buffer = bytearray()
        self._outbox: list[bytes] = []
        self._received = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._received)
        self._on_frame = on_frame
        self._on_closed = on_closed
        self.is_open = True
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, kind: int, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send one frame; a closed link swallows it (its end of file is on the way)."""
        if not self.is_open:
            close_all(fds)
            return
        with contextlib.suppress(OSError):
            head = HEAD.pack(len(body), kind, 0)
            if fds:
                self.flush()
                self._sender.send(head + body, fds)
                return
            if not self._outbox:
                self._loop.call_soon(self.flush)
            self._outbox += (head, body)

    def flush(self) -> None:
        """Send what waits for the end of this turn of the loop."""
        if self._outbox and self.is_open:
            parts, self._outbox = self._outbox, []
            with contextlib.suppress(OSError):
                self._sender.send_parts(parts)

    def _readable(self) -> None:
        try:
            for _ in range(READ_ROUNDS_MAX):
                size = self._sock.recv_into(self._received)
                if not size:
                    self.close()
                    self._on_closed()
                    return
                self._take_in(size)
                if size < RECEIVE_BYTES or not self.is_open:
                    return
        except BlockingIOError:
            return
        except OSError:
            self.close()
            self._on_closed()

    def drain(self) -> None:
        """Take in all that a dead child had still sent; the link is closed afterwards."""
        self.drain_now()
        self.close()

    def drain_now(self) -> None:
        """Take in all that a child has sent so far."""
        while self.is_open:
            try:
                size = self._sock.recv_into(self._received)
            except OSError:
                return
            if not size:
                return
            self._take_in(size)

    def _take_in(self, size: int) -> None:
        """Hand on the frames that `size` received bytes complete; keep what is cut short."""
        if self._buffer:
            self._buffer += self._view[:size]
            taken = self._take_frames(memoryview(bytes(self._buffer)))
            del self._buffer[:taken]
            return
        taken = self._take_frames(self._view[:size])
        if taken < size:
            self._buffer += self._view[taken:size]

    def _take_frames(self, view: memoryview) -> int:
        """Hand on whole frames; return their bytes."""
        at, end = 0, len(view)
        while end - at >= HEAD.size:
            size, kind, _ = HEAD.unpack_from(view, at)
            if size > FRAME_BYTES_MAX:
                raise OSError(f"child frame of {size} bytes")
            if end - at < HEAD.size + size:
                break
            body = bytes(view[at + HEAD.size : at + HEAD.size + size])
            at += HEAD.size + size
            self._on_frame(kind, body)
        return at

    def close(self) -> None:
        """Close our end: the child leaves by itself."""
        if self.is_open:
            self.flush()
            self.is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._sender.close()
            self._sock.close()


class PacketPeer:
    """Packets to and from one client of the Unix socket."""

    def __init__(
        self,
        sock: socket.socket,
        on_event: Callable[[RingEvent], None],
        on_control: Callable[[ControlMessage], None],
        on_closed: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._sender = _QueuedSender(sock, is_stream=False)
        self._joiner = PacketJoiner()
        self._received = bytearray(PACKET_BYTES_MAX + 1)
        self._view = memoryview(self._received)
        self._on_event = on_event
        self._on_control = on_control
        self._on_closed = on_closed
        self.is_open = True
        self._loop.add_reader(sock.fileno(), self._readable)

    def send_packet(self, packet: bytes) -> None:
        """Send one packet (an encoded event): the shortest way, a rank waits at its end."""
        if self._sender.is_waiting or not self.is_open:
            self._guarded_send(packet, ())
            return
        try:
            self._sock.send(packet, SEND_FLAGS)
        except OSError:
            self._guarded_send(packet, ())  # it queues, or finds the peer gone

    def send_control(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a control message; `fds` are duplicated, the caller keeps its own."""
        self.send_encoded(list(encode_control(message)), fds)

    def send_encoded(self, packets: list[bytes], fds: tuple[int, ...] = ()) -> None:
        """Send an already encoded control message."""
        for number, packet in enumerate(packets):
            is_last = number == len(packets) - 1
            copies = tuple(os.dup(fd) for fd in fds) if is_last else ()
            self._guarded_send(packet, copies)

    def _guarded_send(self, packet: bytes, fds: tuple[int, ...]) -> None:
        if not self.is_open:
            for fd in fds:
                os.close(fd)
            return
        try:
            self._sender.send(packet, fds)
        except (OSError, BufferError) as error:
            self._loop.call_soon(self._send_failed, f"send failed: {error}")

    def _readable(self, *, is_ending: bool = False) -> None:
        try:
            for _ in range(ENDING_ROUNDS_MAX if is_ending else READ_ROUNDS_MAX):
                # Clients have nothing to hand in: without room for them the kernel drops descriptors.
                size = self._sock.recv_into(self._received)
                if not size:
                    self._drop("end of file")
                    return
                if size == EVENT.size and self._received[0] == RELEASE:
                    # Nearly every packet. It comes alone: the loop calls again where it does not.
                    self._on_event(RingEvent(*EVENT.unpack_from(self._received)))
                    if is_ending:
                        continue
                    return
                for message in self._joiner.feed(bytes(self._view[:size])):
                    if isinstance(message, RingEvent):
                        self._on_event(message)
                    else:
                        self._on_control(message)
                if not self.is_open:
                    return
        except BlockingIOError:
            return
        except ConnectionResetError:
            # It left with announcements unread. What it said before, a goodbye, is still there.
            self._loop.call_soon(self._reread)
        except ProtocolError as error:
            self.send_control({"note": "failed", "error": encode_error(error)})
            self._drop(str(error))
        except OSError as error:
            self._drop(f"receive failed: {error}")

    def _reread(self) -> None:
        """Take in all that a peer said before it was gone.

        The loop stops watching a socket that had an error: it does not call again for what is left.
        """
        if self.is_open:
            self._readable(is_ending=True)

    def _send_failed(self, reason: str) -> None:
        """Drop the peer, after whatever it still said: a goodbye is no accident."""
        if self.is_open:
            self._readable(is_ending=True)
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self._on_closed(reason)

    def close(self) -> None:
        """Close the connection without telling the owner."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._sender.close()
            self._sock.close()
