"""The hub process of the ring bench: the daemon's links and slot states around one ring.

    python -m bench.ring_hub --fd LINK --socket PATH --readers N --count N --warmup N

Client server, packet peers, child link and slot states are the daemon's own; only the plan is
missing: the same microbatch is built again and again. It tells its own CPU per slot and leaves when
its input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.ring_payload import GENERATION, make_pool, make_ring, make_spec
from bench.ring_roles import tell
from msd_client.contract.codec import pack
from msd_client.contract.local_messages import READY, RingEvent
from msd_daemon.core.slots import RingState
from msd_daemon.services.client_server import DEFERRED, Client, ClientServer
from msd_daemon.services.generation import BUILDS_PER_CONSTRUCTOR
from msd_daemon.services.link import ChildLink
from msd_daemon.services.scheduling import ask_for_short_slice
from msd_daemon.workers.messages import FILLED, TASK_HEAD, FromConstructor, ToConstructor

SLOTS = 4


class Hub:
    """One ring, one constructor, some readers, `count` slots."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._count, self._warmup = options.count, options.warmup
        self._spec = make_spec(options.payload_bytes)
        self._pool = make_pool(self._spec)
        self._layout, self._segment, self._mapping = make_ring(self._spec.payload_bytes_max, SLOTS)
        self._state = RingState(SLOTS, frozenset(range(options.readers)))
        self._ranks: dict[Client, int] = {}
        self._clients: dict[int, Client] = {}
        self._building = 0
        self._ordered = 0
        self._released = 0
        self._cpu_ns = 0
        self.is_over = asyncio.Event()
        self.failure = ""
        self._constructor = ChildLink(
            socket.socket(fileno=options.fd), self._constructor_frame, self.is_over.set
        )
        segments = self._pool.segments
        # Shifted labels: the last token of every document has none.
        self._valid_tokens = int(segments.length.sum()) - segments.count
        self._server = ClientServer(
            Path(options.socket),
            lambda _uid, _gids: True,
            {"join": self._join, "explain": self._explain},
            self._release,
            lambda _client, _held: False,
            lambda _client, _reason: None,
        )

    def begin(self) -> None:
        """Give the constructor its pool and ring."""
        pool, ring = self._pool.segment, self._segment
        self._constructor.send(
            ToConstructor.SETUP, pack({"pool_bytes": pool.nbytes}), (os.dup(pool.fd_read_only),)
        )
        order = {
            "ring": 0,
            "nbytes": ring.nbytes,
            "layout": self._layout.encode(),
            "spec": self._spec.encode(),
            "generation": GENERATION,
        }
        self._constructor.send(ToConstructor.RING, pack(order), (os.dup(ring.fd_read_write),))

    async def _join(self, client: Client, body: dict[str, Any]) -> object:
        self._ranks[client] = body["rank"]
        self._clients[body["rank"]] = client
        answer = {
            "layout": self._layout.encode(),
            "spec": self._spec.encode(),
            "generation": GENERATION,
        }
        assert client.peer is not None
        client.peer.send_control({"id": body["id"], "ok": answer}, (self._segment.fd_read_only,))
        if len(self._clients) == len(self._state.readers):
            self._order_builds()
        return DEFERRED

    async def _explain(self, _client: Client, _body: dict[str, Any]) -> dict[str, str]:
        return {"text": "every slot was built"}

    def _order_builds(self) -> None:
        while (
            self._building < BUILDS_PER_CONSTRUCTOR
            and self._ordered < self._count
            and self._state.has_free()
        ):
            slot, sequence = self._state.begin_fill(0)
            self._building += 1
            self._ordered += 1
            segments = self._pool.segments
            valid_tokens = self._valid_tokens
            head = TASK_HEAD.pack(
                0,
                slot,
                sequence,
                GENERATION,
                sequence,
                sequence,
                0,
                segments.count,
                valid_tokens,
                0,
                0,
            )
            self._constructor.send(ToConstructor.BUILD, head + segments.encode())

    def _constructor_frame(self, kind: int, body: bytes) -> None:
        if kind == FromConstructor.READY:
            return
        if kind != FromConstructor.FILLED:
            self.failure = f"constructor answered {kind}: {body!r}"
            self.is_over.set()
            return
        _, slot, sequence, generation, payload_bytes, _ = FILLED.unpack(body)
        self._building -= 1
        for publication in self._state.fill_ended(
            slot, sequence, payload_bytes, time.monotonic_ns()
        ):
            event = RingEvent(
                READY, publication.slot, publication.sequence, generation, publication.payload_bytes
            ).encode()
            for rank in self._state.readers:
                peer = self._clients[rank].peer
                assert peer is not None
                peer.send_packet(event)
        self._order_builds()

    def _release(self, client: Client, event: RingEvent) -> None:
        if not self._state.released(event.slot, event.sequence, self._ranks[client]):
            return
        self._released += 1
        self._order_builds()
        if self._released == self._warmup:
            self._cpu_ns = time.process_time_ns()
        elif self._released == self._count:
            used_ns = time.process_time_ns() - self._cpu_ns
            tell(at="end", cpu_us=used_ns / 1e3 / (self._count - self._warmup))

    def close(self) -> None:
        self._constructor.close()
        self._server.close()
        self._mapping.close()
        self._segment.close()
        self._pool.close()


async def serve(options: argparse.Namespace) -> None:
    hub = Hub(options)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), hub.is_over.set)
    try:
        hub.begin()
        tell(at="up", pid=os.getpid())
        gc.freeze()  # as the daemon does
        await hub.is_over.wait()
    finally:
        hub.close()
    if hub.failure:
        raise SystemExit(hub.failure)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("fd", "readers", "count", "warmup", "payload-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--socket", required=True)
    ask_for_short_slice()  # as the daemon does
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
