"""Peers that mean harm, at a planner with keys: they get nothing, and a node beside them is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest
import zmq

from federation.authenticator import PENDING_MAX
from federation.cluster_hello import NodeHello, PlannerHello, encode_hello
from federation.core.packet import Flag, Kind, Packet
from federation.packets import WIRE_VERSION, decode_packet, encode_packet
from federation.secure_sockets import CurveKeys, secure_client, secure_server
from tests.support.cluster_ends import LinkLog, RouterThread, on_uvloop, running_link
from tests.support.cluster_keys import KeyCase
from tests.support.tcp_proxy import tcp_proxy


@pytest.fixture
def case(tmp_path: Path) -> KeyCase:
    return KeyCase(tmp_path, "p0", "n1", "n2")


@pytest.fixture
def planner(case: KeyCase) -> Iterator[RouterThread]:
    one = RouterThread("127.0.0.1:0", case.keys("p0"), answer=True)
    yield one
    one.close()


@asynccontextmanager
async def served(case: KeyCase, planner: RouterThread) -> AsyncIterator[LinkLog]:
    """A node that is up before, and whose one session is up and served after."""
    place = f"p0@{planner.endpoint}"
    async with running_link(place, node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
        yield log
        log.say(4711)
        await log.until(lambda: log.numbers and log.numbers[-1] == 4711, "echo after the attack")
        assert planner.ups("n1") == len(log.ups) == 1
        assert not planner.downs("n1")
        assert not log.downs


class RawPeer:
    """A DEALER that sends what it likes."""

    def __init__(self, endpoint: str, own: CurveKeys | None, server: bytes | None) -> None:
        self.context = zmq.Context()
        self.sock = self.context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        if own is not None and server is not None:
            secure_client(self.sock, own, server)
        self.sock.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.sock.send_multipart(frames)

    def receive(self, timeout_ms: int = 5_000) -> list[bytes] | None:
        return self.sock.recv_multipart() if self.sock.poll(timeout_ms) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close(linger=0)
        self.context.term()


def listed(case: KeyCase, planner: RouterThread, name: str = "n2") -> RawPeer:
    keys = case.keys(name)
    return RawPeer(planner.endpoint, keys.own, keys.public_keys("p0")[0])


def stranger(case: KeyCase, planner: RouterThread) -> RawPeer:
    keys = CurveKeys(*zmq.curve_keypair())
    return RawPeer(planner.endpoint, keys, case.keys("n1").public_keys("p0")[0])


HELLO = encode_packet(Packet(Kind.HELLO, 5, 0, frames=(encode_hello(NodeHello("n2")),)))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"MSDL"],
        [HELLO[0][:-1], HELLO[1]],
        [HELLO[0]],
        [HELLO[0], b"\xc1"],
        [HELLO[0], HELLO[1], b"more"],
        [HELLO[0], b"\x82\xa4node\xa2n2\xa5facts" + b"\x91" * 900],
        encode_packet(Packet(Kind.DATA, 5, 5, 0, frames=(b"x",))),
        encode_packet(Packet(Kind.DATA, 5, 5, 1, flags=Flag.JOINS, frames=(b"x",) * 300)),
    ],
)
@on_uvloop
async def test_malformed_packets_of_a_listed_key_are_refused(
    case: KeyCase, planner: RouterThread, frames: list[bytes]
) -> None:
    async with served(case, planner) as log:
        with listed(case, planner) as peer:
            for _ in range(20):
                peer.send(*frames)
            await log.until(lambda: planner.router.rejected["malformed"] >= 20)
    assert planner.ups("n2") == 0


@on_uvloop
async def test_another_wire_version_is_told_so_once(case: KeyCase, planner: RouterThread) -> None:
    async with served(case, planner) as log:
        with listed(case, planner) as peer:
            newer = HELLO[0][:4] + bytes([WIRE_VERSION + 1]) + HELLO[0][5:] + b"new field"
            for _ in range(50):
                peer.send(newer, HELLO[1])
            await log.until(lambda: planner.router.rejected["version"] == 50)
            answer = peer.receive()
            assert answer is not None
            refused = decode_packet(answer)
            assert refused.kind is Kind.REFUSED
            assert b"wire version 2" in refused.frames[0]
            assert peer.receive(200) is None, "one answer a second, however often it asks"


@on_uvloop
async def test_oversized_frame_ends_its_connection_alone(
    case: KeyCase, planner: RouterThread
) -> None:
    async with served(case, planner) as log:
        with listed(case, planner) as peer:
            peer.send(*HELLO)
            assert peer.receive() is not None
            counts = planner.router._connections.authenticator.counts  # type: ignore[union-attr]
            before = counts["disconnected"]
            peer.send(HELLO[0], bytes(8 << 20))
            await log.until(lambda: counts["disconnected"] > before)
    assert planner.ups("n2") == 0


@on_uvloop
async def test_node_can_not_speak_in_another_ones_session(
    case: KeyCase, planner: RouterThread
) -> None:
    async with served(case, planner) as log:
        (own, theirs) = log.link.planners[0].end.session or (0, 0)
        with listed(case, planner) as peer:
            # As if it had seen n1's ids: its key is n2's all the same.
            forged = Packet(Kind.DATA, own, theirs, 1, 0, frames=(b"forged",))
            claimed = Packet(Kind.HELLO, own, theirs, frames=(encode_hello(NodeHello("n1")),))
            for _ in range(20):
                peer.send(*encode_packet(forged))
                peer.send(*encode_packet(claimed))
            await log.until(lambda: planner.router.rejected["malformed"] >= 20)
    assert planner.heard("n1") == [4711]


@on_uvloop
async def test_replayed_connection_gets_nothing(case: KeyCase, planner: RouterThread) -> None:
    with tcp_proxy(planner.port) as proxy:
        proxy.recording = bytearray()
        place = f"p0@127.0.0.1:{proxy.port}"
        async with running_link(place, node="n1", keys=case.keys("n1")) as log:
            await log.until(lambda: log.ups)
            log.say(1)
            await log.until(lambda: log.numbers == [1])
            replayed = bytes(proxy.recording)
            assert len(replayed) > 500
            counts = planner.router._connections.authenticator.counts  # type: ignore[union-attr]
            admitted = counts["handshake_succeeded"]
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", planner.port)) as raw:
                    raw.settimeout(10)
                    raw.sendall(replayed)
                    with contextlib.suppress(ConnectionResetError):
                        while await asyncio.to_thread(raw.recv, 4096):
                            pass
            assert counts["handshake_succeeded"] == admitted
            log.say(2)
            await log.until(lambda: log.numbers == [1, 2])
    assert planner.heard("n1") == [1, 2]
    assert planner.ups("n1") == 1


@on_uvloop
async def test_clients_without_curve_and_noise_get_nothing(
    case: KeyCase, planner: RouterThread
) -> None:
    async with served(case, planner) as log:
        with RawPeer(planner.endpoint, None, None) as peer:
            peer.send(*HELLO)
            assert peer.receive(500) is None
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, os.urandom(4_096), b""):
            with socket.create_connection(("127.0.0.1", planner.port)) as raw:
                raw.settimeout(10)
                with contextlib.suppress(OSError):
                    raw.sendall(noise)
                    # It is closed, at the latest when the time for a handshake is over.
                    while await asyncio.to_thread(raw.recv, 4096):
                        pass
        await log.until(lambda: not planner.router.rejected)
    assert {event.node for event in planner.events} == {"n1"}  # type: ignore[union-attr]


@on_uvloop
async def test_strangers_with_keys_of_their_own_are_refused_and_named(
    case: KeyCase, planner: RouterThread
) -> None:
    async with served(case, planner) as log:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(stranger(case, planner)).send(*HELLO)
            counts = planner.router._connections.authenticator.counts  # type: ignore[union-attr]
            await log.until(lambda: counts["refused"] >= 20)
        assert not planner.router.rejected
    assert planner.ups("n2") == 0


@on_uvloop
async def test_flood_of_connections_keeps_nobody_out_and_few_descriptors(
    case: KeyCase, planner: RouterThread
) -> None:
    authenticator = planner.router._connections.authenticator
    assert authenticator is not None
    stop = threading.Event()
    opened = [0]

    def flood() -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", planner.port), timeout=5))
                opened[0] += 1
            if len(held) > 400:
                held.pop(0).close()
        for one in held:
            one.close()

    async with served(case, planner) as log:
        threads = [threading.Thread(target=flood) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            await log.until(lambda: authenticator.counts["closed"] > 100, "flood is met")
            log.say(1)
            await log.until(lambda: log.numbers == [1], "served in the flood")
            # One that was not there before comes in all the same, from the flood's own address.
            place = f"p0@{planner.endpoint}"
            async with running_link(place, node="n2", keys=case.keys("n2")) as late:
                await late.until(lambda: late.ups, "newcomer in the flood")
                late.say(2)
                await late.until(lambda: late.numbers == [2])
            assert authenticator.pending_count <= PENDING_MAX + 1
        finally:
            stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
    assert opened[0] > PENDING_MAX


@on_uvloop
async def test_key_that_connects_again_and_again_is_slowed_down(
    case: KeyCase, planner: RouterThread
) -> None:
    authenticator = planner.router._connections.authenticator
    assert authenticator is not None
    async with served(case, planner) as log:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(listed(case, planner)).send(*HELLO)
            await log.until(lambda: authenticator.counts["slowed"] > 10)


@on_uvloop
async def test_planner_that_sends_noise_is_left_and_the_next_one_followed(case: KeyCase) -> None:
    keys = case.keys("p0")
    context = zmq.Context()
    evil = context.socket(zmq.ROUTER)
    try:
        secure_server(evil, keys.own)
        port = evil.bind_to_random_port("tcp://127.0.0.1")
        async with running_link(f"p0@127.0.0.1:{port}", node="n1", keys=case.keys("n1")) as log:
            await log.until(lambda: evil.poll(0))
            route, *frames = evil.recv_multipart()
            hello = decode_packet(frames)
            leads = encode_hello(PlannerHello("p0", leads=True, term=1))
            answer = Packet(Kind.HELLO, 9, hello.sender, frames=(leads,))
            evil.send_multipart([route, *encode_packet(answer)])
            await log.until(lambda: log.ups)
            broken = Packet(Kind.DATA, 9, hello.sender, 1, 0, frames=(b"no envelope",))
            evil.send_multipart([route, *encode_packet(broken)])
            await log.until(lambda: log.downs)
            for noise in ([b""], [b"x" * 500], [b"MSDL\x01"]):
                evil.send_multipart([route, *noise])
            evil.close(linger=0)
            context.term()  # the library closes sockets later by itself: the port would be taken still
            planner = RouterThread(f"127.0.0.1:{port}", keys, term=2, answer=True)
            try:
                await log.until(lambda: len(log.ups) == 2, "the real planner")
                log.say(1)
                await log.until(lambda: log.numbers == [1])
            finally:
                planner.close()
    finally:
        evil.close(linger=0)
        context.term()
