"""Parcels of 16 MiB from one exchange process to another, pool to pool over loopback TCP.

The peer is a plain TCP socket pair of two processes: `sendall` out of one pool, `recv_into` the
other, one byte back for each parcel. Every round runs both in turn, so that what else the machine
does weighs on both; figures are medians of rounds. CPU is that of both exchange processes and of the
process that plays both daemons; of the peer, of both its processes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import uvloop
import zmq

from bench.processes import cpu_s_of
from msd_daemon.core.allocator import Allocator, Piece
from msd_daemon.services.exchange_port import (
    CurveKeys,
    ExchangePort,
    FragmentColumns,
    ParcelKey,
    ParcelPart,
    PeerAddress,
)
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.shm.chunk_layout import encode_chunk_columns, encoded_bytes
from msd_daemon.shm.mapping import map_read_write
from msd_daemon.shm.segment import make_segment
from msd_daemon.workers.spawn import fork_first_server

MiB = 1 << 20
PARCEL_BYTES = 16 * MiB
POOL_BYTES = 128 * MiB
AHEAD = 3
"""Parcels that are offered and wanted at once, as steps are planned ahead."""
RECORD_TOKENS = 4096
CHUNK_RECORDS = 128
JOB = "bench"


@dataclass
class Cost:
    """Of moving some bytes."""

    nbytes: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """MB/s."""
        return self.nbytes / self.wall_s / 1e6

    @property
    def cpu(self) -> float:
        """CPU seconds per GB."""
        return self.cpu_s / self.nbytes * 1e9


# the peer


def run_plain(parcels: int) -> Cost:
    """Move parcels over a plain TCP socket pair of two processes."""
    listener = socket.create_server(("127.0.0.1", 0))
    report_read, report_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        sock = socket.create_connection(listener.getsockname())
        pool, offsets = _plain_pool(), _plain_offsets()
        sock.recv(1)
        before = time.process_time_ns()
        for number in range(parcels):
            begin = offsets[number % len(offsets)]
            sock.sendall(pool[begin : begin + PARCEL_BYTES])
            sock.recv(1)
        os.write(report_write, str(time.process_time_ns() - before).encode())
        os._exit(0)
    sock, _ = listener.accept()
    pool, offsets = _plain_pool(), _plain_offsets()
    sock.send(b"g")
    began, before = time.perf_counter(), time.process_time_ns()
    for number in range(parcels):
        at = offsets[number % len(offsets)]
        end = at + PARCEL_BYTES
        while at < end:
            at += sock.recv_into(pool[at:end])
        sock.send(b"a")
    wall_s = time.perf_counter() - began
    own = time.process_time_ns() - before
    os.waitpid(pid, 0)
    cpu_ns = own + int(os.read(report_read, 32))
    for fd in (report_read, report_write):
        os.close(fd)
    sock.close()
    listener.close()
    return Cost(parcels * PARCEL_BYTES, wall_s, cpu_ns / 1e9)


def _plain_pool() -> memoryview:
    segment = make_segment(POOL_BYTES, "auto", "bench pool")
    mapping = map_read_write(segment.fd_read_write, segment.nbytes)
    segment.close()
    mapping.view[:] = bytes(POOL_BYTES)
    return mapping.view


def _plain_offsets() -> list[int]:
    return list(range(0, POOL_BYTES, PARCEL_BYTES))


# the exchange


class _Node:
    """One daemon's part: a pool, half of it chunks, half of it room for parcels."""

    def __init__(self, name: str, forks: ForkClient, keys: CurveKeys | None, **sizes: int) -> None:
        self.name = name
        self.segment = make_segment(POOL_BYTES, "auto", f"bench pool {name}")
        self.mapping = map_read_write(
            self.segment.fd_read_write, self.segment.nbytes, should_collapse=False
        )
        self.chunks = _fill(self.mapping.view[: POOL_BYTES // 2])
        self.rooms = Allocator(POOL_BYTES, [Piece(0, POOL_BYTES // 2)])
        self.lent: dict[ParcelKey, Piece] = {}
        self.acked = self.came = 0
        self.changed = asyncio.Event()
        self.port = ExchangePort(
            forks, self, node=name, listen="tcp://127.0.0.1:0", keys=keys, **sizes
        )

    def parcel_size(self, key: ParcelKey, size_bytes: int) -> None:
        piece = self.rooms.take(size_bytes)
        assert piece is not None
        self.lent[key] = piece
        self.port.room(key, *piece)

    def parcel_came(self, key: ParcelKey, _parts: list[ParcelPart]) -> None:
        self.rooms.give_back(self.lent.pop(key))
        self.came += 1
        self.changed.set()

    def parcel_acked(self, _key: ParcelKey) -> None:
        self.acked += 1
        self.changed.set()

    def parcel_declined(self, key: ParcelKey) -> None:
        raise RuntimeError(f"{key} was wanted")

    def parcel_failed(self, key: ParcelKey, error: Exception) -> None:
        raise RuntimeError(f"{key}: {error}")

    def peer_changed(self, _peer: str, _is_up: bool, _reason: str) -> None:
        self.changed.set()

    def exchange_lost(self) -> None:
        raise RuntimeError("an exchange process died")

    def close(self) -> None:
        self.port.close()
        self.segment.close()
        self.mapping.close()


def _fill(view: memoryview) -> list[tuple[int, int]]:
    """Fill a pool with chunks of uint16 ids; return (offset, bytes) of each."""
    tokens = CHUNK_RECORDS * RECORD_TOKENS
    nbytes = encoded_bytes(CHUNK_RECORDS, 2 * tokens, has_index=False)
    chunks = []
    for offset in range(0, len(view) - nbytes + 1, -(-nbytes // 4096) * 4096):
        payload = encode_chunk_columns(
            view[offset : offset + nbytes],
            token_bytes=2,
            source_index=0,
            block_key=len(chunks),
            first_index=0,
            flags=0,
            window_blocks=0,
            offsets=np.arange(CHUNK_RECORDS + 1) * RECORD_TOKENS,
            status=np.zeros(CHUNK_RECORDS, np.uint8),
        )
        np.frombuffer(payload, np.uint16)[:] = np.arange(tokens) % 60_000
        chunks.append((offset, nbytes))
    return chunks


def _fragments(node: _Node, step: int) -> FragmentColumns:
    """Return whole records of 16 MiB together: every other one of some chunks, as where two nodes
    share a step; in a random order, as rows are packed."""
    count = PARCEL_BYTES // (2 * RECORD_TOKENS) - 4
    rng = np.random.default_rng(step)
    share = CHUNK_RECORDS * 2 * PARCEL_BYTES // (2 * RECORD_TOKENS * CHUNK_RECORDS)
    first = rng.integers(len(node.chunks) * CHUNK_RECORDS - share)
    picks = first + rng.permutation(share)[:count].astype(np.int64)
    chunk, sample = np.divmod(picks, CHUNK_RECORDS)
    offsets = np.array(node.chunks, np.int64)
    zeros = np.zeros(count, np.int32)
    return FragmentColumns(
        source=zeros,
        block_key=chunk,
        index=sample.astype(np.int32),
        offset=zeros,
        length=zeros + RECORD_TOKENS,
        chunk_offset=offsets[chunk, 0],
        chunk_bytes=offsets[chunk, 1],
        sample=sample.astype(np.int32),
        first_token=zeros,
    )


async def _move(nodes: tuple[_Node, _Node], parcels: int, generation: int) -> Cost:
    giver, taker = nodes
    offers = [_fragments(giver, step) for step in range(parcels)]
    pids = [node.port.pid for node in nodes]
    giver.acked = taker.came = 0
    before = [cpu_s_of(pid) for pid in pids if pid] + [time.process_time()]
    began = time.perf_counter()
    for step in range(parcels):
        key = ParcelKey(JOB, generation, step, giver.name, taker.name)
        giver.port.offer(key, offers[step])
        taker.port.want(key)
        while step - taker.came >= AHEAD - 1:
            taker.changed.clear()
            await taker.changed.wait()
    while giver.acked < parcels:
        giver.changed.clear()
        await giver.changed.wait()
    wall_s = time.perf_counter() - began
    after = [cpu_s_of(pid) for pid in pids if pid] + [time.process_time()]
    return Cost(parcels * PARCEL_BYTES, wall_s, sum(after) - sum(before))


class Pair:
    """Two exchange processes that know each other."""

    def __init__(self, is_encrypted: bool, **sizes: int) -> None:
        # Forked before this process has a loop: the fork server must have no thread.
        self._sock, _ = fork_first_server()
        self._is_encrypted = is_encrypted
        self._sizes = sizes
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._nodes = self._runner.run(self._start())
        self._generation = 0

    async def _start(self) -> tuple[_Node, _Node]:
        self._forks = ForkClient(self._sock, self._ended)
        keys = [CurveKeys(*zmq.curve_keypair()) if self._is_encrypted else None for _ in range(2)]
        a, b = (
            _Node(name, self._forks, pair, **self._sizes)
            for name, pair in zip("ab", keys, strict=True)
        )
        for node in (a, b):
            await node.port.start()
            node.port.add_pool(JOB, node.segment)
        addresses = {
            node.name: PeerAddress(node.port.endpoint, None if pair is None else pair.public)
            for node, pair in zip((a, b), keys, strict=True)
        }
        for node in (a, b):
            node.port.set_peers(addresses)
        return a, b

    def _ended(self, child: Child) -> None:
        for node in self._nodes:
            node.port.child_ended(child)

    def move(self, parcels: int) -> Cost:
        """Move so many parcels from one to the other."""
        self._generation += 1
        return self._runner.run(_move(self._nodes, parcels, self._generation))

    def close(self) -> None:
        """End both."""

        async def end() -> None:
            for node in self._nodes:
                node.close()
            self._forks.close()

        self._runner.run(end())
        self._runner.close()


def compare(pair: Pair, rounds: int, parcels: int) -> tuple[list[Cost], list[Cost]]:
    """Return the costs of the exchange and of the plain pair, round by round."""
    pair.move(AHEAD)  # connected, pages and buffers touched
    found = [(pair.move(parcels), run_plain(parcels)) for _ in range(rounds)]
    return [own for own, _ in found], [plain for _, plain in found]


def run_exchange(*, is_quick: bool, say: Callable[..., None]) -> dict[str, float]:
    """Return the figures of the exchange."""
    rounds, parcels = (3, 32) if is_quick else (7, 64)
    figures: dict[str, float] = {}
    for name, is_encrypted in (("", False), ("curve_", True)):
        pair = Pair(is_encrypted)
        try:
            own, plain = compare(pair, rounds, parcels // (2 if is_encrypted else 1))
        finally:
            pair.close()
        rows = list(zip(own, plain, strict=True))
        rate = statistics.median(cost.rate / peer.rate for cost, peer in rows)
        cpu = statistics.median(cost.cpu / peer.cpu for cost, peer in rows)
        figures |= {
            f"exchange_{name}over_tcp": round(rate, 3),
            f"exchange_{name}cpu_over_tcp": round(cpu, 3),
            f"exchange_{name}mb_per_s": round(statistics.median(cost.rate for cost in own)),
            f"exchange_{name}cpu_s_per_gb": round(statistics.median(cost.cpu for cost in own), 3),
        }
        if not is_encrypted:
            figures["tcp_mb_per_s"] = round(statistics.median(cost.rate for cost in plain))
            figures["tcp_cpu_s_per_gb"] = round(statistics.median(cost.cpu for cost in plain), 3)
        say(
            f"  {'encrypted' if is_encrypted else 'plain':9}: {rate:.2f} of the rate, "
            f"{cpu:.2f} x the CPU of a TCP socket pair "
            f"({figures[f'exchange_{name}mb_per_s']:.0f} MB/s, "
            f"{figures[f'exchange_{name}cpu_s_per_gb']:.2f} CPU-s/GB)"
        )
    return figures
