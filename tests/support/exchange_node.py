"""A node's exchange for tests: a real fork server, a real process, a real pool, no daemon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from msd_client.contract.errors import MsdError
from msd_daemon.core.allocator import Allocator
from msd_daemon.services.exchange_port import (
    CurveKeys,
    ExchangePort,
    ParcelKey,
    ParcelPart,
    PeerAddress,
)
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.shm.chunk_layout import ChunkView
from msd_daemon.shm.mapping import map_read_write
from msd_daemon.shm.segment import make_segment
from tests.support.parcels import FilledPool, record_content

JOB = "job-1"
_FORK_SERVER = """
import socket, sys
from msd_daemon.workers.spawn import ForkServer, LinkClosed
try:
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
except LinkClosed:
    pass
"""


@contextlib.asynccontextmanager
async def fork_server(on_exit: Callable[[Child], None]) -> AsyncIterator[ForkClient]:
    """Run a fork server of its own, so that this process with its threads is not forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(  # noqa: ASYNC220 - started once, before the test waits for anything
            [sys.executable, "-c", _FORK_SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    client = ForkClient(ours, on_exit)
    try:
        yield client
    finally:
        client.close()
        process.wait(20)


class ExchangeNode:
    """One node: its port, its pool, and what the port told."""

    def __init__(self, name: str, pool_bytes: int, **shapes: Any) -> None:
        self.name = name
        self.segment = make_segment(pool_bytes, "auto", f"pool of {name}")
        self.mapping = map_read_write(self.segment.fd_read_write, self.segment.nbytes)
        self.pool = FilledPool(self.mapping.view, seed=len(name) + ord(name[-1]), **shapes)
        self.shapes = shapes
        self.rooms: Allocator | None = None
        """Set to have room given at once; left out, the test gives it."""
        self.lent: dict[ParcelKey, Any] = {}
        self.sizes: dict[ParcelKey, int] = {}
        self.came: dict[ParcelKey, list[list[ParcelPart]]] = {}
        self.acked: list[ParcelKey] = []
        self.declined: list[ParcelKey] = []
        self.failed: list[tuple[ParcelKey, MsdError]] = []
        self.peers: dict[str, tuple[bool, str]] = {}
        self.told: list[tuple[str, bool, str]] = []
        """All that was said of peers."""
        self.losses = 0
        self.changed = asyncio.Event()
        self.port: ExchangePort
        self.public_key: bytes | None = None

    # the port's owner

    def parcel_size(self, key: ParcelKey, size_bytes: int) -> None:
        self.sizes[key] = size_bytes
        if self.rooms is not None:
            if key in self.lent:
                self.rooms.give_back(self.lent.pop(key))
            piece = self.lent[key] = self.rooms.take(size_bytes)
            assert piece is not None, (size_bytes, self.lent, self.rooms.free_bytes)
            self.port.room(key, *piece)
        self.changed.set()

    def parcel_came(self, key: ParcelKey, parts: list[ParcelPart]) -> None:
        self.came.setdefault(key, []).append(parts)
        self.changed.set()

    def parcel_declined(self, key: ParcelKey) -> None:
        self.declined.append(key)
        self.changed.set()

    def parcel_acked(self, key: ParcelKey) -> None:
        self.acked.append(key)
        self.changed.set()

    def parcel_failed(self, key: ParcelKey, error: MsdError) -> None:
        self.failed.append((key, error))
        self.changed.set()

    def peer_changed(self, peer: str, is_up: bool, reason: str) -> None:
        self.peers[peer] = (is_up, reason)
        self.told.append((peer, is_up, reason))
        self.changed.set()

    def exchange_lost(self) -> None:
        self.losses += 1
        self.changed.set()

    # what tests ask

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until the port told enough."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def contents(self, key: ParcelKey) -> dict[tuple[int, int, int, int, int], Any]:
        """Return what came, by (source, block key, index, offset, length)."""
        (parts,) = self.came[key]
        found: dict[tuple[int, int, int, int, int], Any] = {}
        for part in parts:
            view = ChunkView(
                self.mapping.view[part.offset_bytes : part.offset_bytes + part.used_bytes]
            )
            assert view.header.source_index == part.source
            columns = zip(part.block_key, part.index, part.offset, part.length, strict=True)
            for record, names in enumerate(columns):
                name = (part.source, *map(int, names))
                assert name not in found
                found[name] = record_content(
                    view, record, 0, name[-1], self.pool.fields, self.pool.media
                )
        return found

    def expected(
        self, picks: Sequence[tuple[int, int, int, int]]
    ) -> dict[tuple[int, int, int, int, int], Any]:
        """Return what a consumer must find of these fragments of this node's pool."""
        chunks = self.pool.chunks
        return {
            (chunks[pick[0]].source.index, chunks[pick[0]].block_key, *pick[1:]): (
                self.pool.content(pick)
            )
            for pick in picks
        }

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.port.endpoint, self.public_key)


@contextlib.asynccontextmanager
async def exchange_node(
    name: str,
    *,
    pool_bytes: int = 4 << 20,
    keys: CurveKeys | None = None,
    fields: Sequence[Any] = (),
    media: Sequence[Any] = (),
    listen: str = "tcp://127.0.0.1:0",
    **options: Any,
) -> AsyncIterator[ExchangeNode]:
    """Start a node's exchange with a pool of one job."""
    node = ExchangeNode(name, pool_bytes, fields=fields, media=media)
    node.public_key = None if keys is None else keys.public
    try:
        async with fork_server(lambda child: bool(node.port.child_ended(child))) as forks:
            node.port = ExchangePort(forks, node, node=name, listen=listen, keys=keys, **options)
            await node.port.start()
            node.port.add_pool(JOB, node.segment, fields, media)
            try:
                yield node
            finally:
                node.port.close()
    finally:
        node.segment.close()
        node.mapping.close()
