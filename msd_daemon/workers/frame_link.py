"""Frames between the daemon and its children: a stream socket, a length, a kind, a body.

Frame: u32 body bytes | u16 kind | u16 zero | body. Descriptors ride on a frame's first byte.
This module is the blocking end that children use; the daemon's end is services/link.py.
"""

from __future__ import annotations

import array
import os
import socket
import struct

HEAD = struct.Struct("=IHH")
FRAME_BYTES_MAX = 64 << 20
FDS_BYTES = socket.CMSG_LEN(8 * 4)
RECEIVE_BYTES = 1 << 16


class LinkClosed(Exception):  # noqa: N818 - a signal, not an error
    """The daemon closed the link: the child must leave."""


def encode_frame(kind: int, body: bytes) -> bytes:
    """Return a frame as it travels."""
    return HEAD.pack(len(body), kind, 0) + body


class FrameLink:
    """A child's blocking end. Not for threads."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    def send(self, kind: int, body: bytes = b"") -> None:
        """Send one frame; blocks while the daemon does not read.

        Raises:
            LinkClosed: The daemon is gone.
        """
        self.send_frames([encode_frame(kind, body)])

    def send_frames(self, frames: list[bytes]) -> None:
        """Send encoded frames in one call; blocks while the daemon does not read.

        Raises:
            LinkClosed: The daemon is gone.
        """
        try:
            self._sock.sendall(b"".join(frames) if len(frames) > 1 else frames[0])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LinkClosed from error

    def pending(self) -> bool:
        """Return True where a whole frame is already buffered or readable without waiting."""
        if self._has_frame():
            return True
        self._fill(socket.MSG_DONTWAIT)
        return self._has_frame()

    def receive(self) -> tuple[int, bytes, list[int]]:
        """Return kind, body and descriptors of the next frame; blocks.

        Raises:
            LinkClosed: The daemon closed the link.
        """
        while not self._has_frame():
            self._fill(0)
        size, kind, _ = HEAD.unpack_from(self._buffer)
        end = HEAD.size + size
        body = bytes(memoryview(self._buffer)[HEAD.size : end])
        del self._buffer[:end]
        fds, self._fds = self._fds, []
        return kind, body, fds

    def _has_frame(self) -> bool:
        if len(self._buffer) < HEAD.size:
            return False
        size: int = HEAD.unpack_from(self._buffer)[0]
        return len(self._buffer) >= HEAD.size + size

    def _fill(self, flags: int) -> None:
        try:
            # socket.recv_fds drops its flags (python/cpython, seen in 3.11): call recvmsg itself.
            data, ancillary, _, _ = self._sock.recvmsg(RECEIVE_BYTES, FDS_BYTES, flags)
        except BlockingIOError:
            return
        except ConnectionResetError as error:
            raise LinkClosed from error
        if not data:
            raise LinkClosed
        self._buffer += data
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += array.array("i", rights[: len(rights) // 4 * 4])

    def close(self) -> None:
        """Close the socket and descriptors nobody took."""
        for fd in self._fds:
            os.close(fd)
        self._sock.close()
