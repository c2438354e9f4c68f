"""Strangers, liars and noise on the exchange's wire: they get nothing and harm nobody."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import psutil
import pytest
import zmq

from federation.exchange_messages import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    REQUEST_BYTES_MAX,
    WIRE_VERSION,
    ParcelData,
    ParcelSize,
    ParcelTable,
    Ping,
    Pong,
    Pull,
    Want,
    decode_message,
    encode_header,
)
from msd_client.contract.errors import ChunkCorruptError
from msd_daemon.core.allocator import Allocator, Piece
from msd_daemon.services.exchange_port import CurveKeys, PeerAddress
from msd_daemon.workers.data_links import HELLO, MAGIC, encode_head
from tests.integration.test_exchange import LARGE, PICKS, fill, key_of, two_nodes
from tests.support.exchange_node import ExchangeNode, exchange_node
from tests.support.parcels import FIELDS, MEDIA

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def dealer(
    endpoint: str, keys: CurveKeys | None = None, server: bytes = b""
) -> Iterator[zmq.Socket]:
    """Return a socket that may say anything to an exchange."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        if keys is not None:
            sock.curve_publickey, sock.curve_secretkey = keys
            sock.curve_serverkey = server
        sock.connect(endpoint)
        yield sock


async def exchange_goes_on(a: ExchangeNode, b: ExchangeNode, step: int) -> None:
    """Assert that one more parcel comes, without a restart of either process."""
    a.port.offer(key_of(step), a.pool.fragments(LARGE))
    b.port.want(key_of(step))
    await b.until(lambda: key_of(step) in b.came)
    assert b.contents(key_of(step)) == a.expected(LARGE)
    assert (a.losses, b.losses) == (0, 0)


def noise(rng: random.Random) -> list[bytes]:
    """Return frames: random ones, or those of a message with a few bytes changed."""
    if rng.random() < 0.4:
        return [rng.randbytes(rng.choice([0, 1, 9, 70, 3000])) for _ in range(rng.randrange(1, 8))]
    message = rng.choice(
        [Want(key_of(0)), Pull(key_of(0), 5, (0, 1, 2)), Ping("b", 1), ParcelData(key_of(0), 5, 0)]
    )
    header = bytearray(encode_header(message))
    for _ in range(rng.randrange(4)):
        header[rng.randrange(len(header))] = rng.randrange(256)
    return [bytes(header), *[b"x"] * rng.choice([0, 0, 1, 5])]


async def test_noise_harms_nobody() -> None:
    async with two_nodes() as (a, b):
        rng = random.Random(1)
        with dealer(a.port.endpoint) as sock:
            for _ in range(3000):
                sock.send_multipart(noise(rng))
            await exchange_goes_on(a, b, 10)
            sock.send(bytes(REQUEST_BYTES_MAX + 1))  # too large: its link is cut
            sock.send_multipart([bytes(1 << 16)] * 50)
        for data in (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), b"\xff" + bytes(8) + b"\x7f"):
            host, port = a.port.endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as plain:
                plain.sendall(data)
        await exchange_goes_on(a, b, 11)
        async with asyncio.timeout(20):
            while a.port.statistics().refused_messages < 1000:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # told once a second, without an event


async def test_a_flood_of_connections_harms_nobody() -> None:
    async with two_nodes() as (a, b):
        host, port = a.port.endpoint.removeprefix("tcp://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(400):  # they connect and say nothing
                stack.enter_context(socket.create_connection((host, int(port))))
            await exchange_goes_on(a, b, 0)


def data_ports(node: ExchangeNode) -> list[int]:
    """Return where an exchange listens beside its endpoint."""
    own = int(node.port.endpoint.rpartition(":")[2])
    sockets = psutil.Process(node.port.pid).net_connections("tcp")
    listening = {it.laddr.port for it in sockets if it.status == psutil.CONN_LISTEN}
    return sorted(listening - {own})


async def test_strangers_at_the_data_port_harm_nobody() -> None:
    async with two_nodes(is_encrypted=True) as (a, b):
        assert data_ports(a) == []
    async with two_nodes() as (a, b):
        rng = random.Random(2)
        (port,) = data_ports(a)
        await exchange_goes_on(a, b, 0)
        with contextlib.ExitStack() as stack:
            for number in range(300):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                hello = HELLO.pack(MAGIC, WIRE_VERSION, rng.randbytes(16))
                with contextlib.suppress(ConnectionError):  # cut by now
                    sock.sendall([b"", hello, hello[:9], rng.randbytes(5000)][number % 4])
            await exchange_goes_on(a, b, 1)
        await exchange_goes_on(a, b, 2)


async def test_a_stranger_gets_nothing_whatever_it_claims() -> None:
    async with two_nodes(is_encrypted=True) as (a, b):
        a.port.offer(key_of(0), a.pool.fragments(PICKS))
        await a.until(lambda: a.peers.get("b") == (True, ""))
        own = CurveKeys(*zmq.curve_keypair())
        with (
            dealer(a.port.endpoint, own, a.public_key) as unlisted,
            dealer(a.port.endpoint) as plain,
        ):
            for sock in (unlisted, plain):
                sock.send(encode_header(Ping("b", 1)))
                sock.send(encode_header(Want(key_of(0))))
            await exchange_goes_on(a, b, 1)
            assert not unlisted.poll(300)
            assert not plain.poll(0)
        assert not a.acked or a.acked == [key_of(1)]


async def test_a_peer_that_speaks_for_another_gets_nothing() -> None:
    c_keys = CurveKeys(*zmq.curve_keypair())
    async with two_nodes(is_encrypted=True) as (a, b):
        c_address = PeerAddress("tcp://127.0.0.1:9", c_keys.public)
        a.port.set_peers({"b": b.address, "c": c_address})
        await a.port.withdraw(key_of(99))  # done once the process has heard of c, too
        a.port.offer(key_of(0), a.pool.fragments(PICKS))
        with dealer(a.port.endpoint, c_keys, a.public_key) as sock:
            sock.send(encode_header(Want(key_of(0))))  # b's parcel
            sock.send(encode_header(Ping("b", 1)))
            sock.send(encode_header(Ping("c", 7)))
            assert await asyncio.to_thread(sock.poll, 20_000)
            answer = decode_message(sock.recv_multipart())
            assert isinstance(answer, Pong)
            assert (answer.node, answer.number) == ("a", 7)
            assert not sock.poll(300)


class FalseProducer:
    """A peer that says what a test wants; a thread of its own answers."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sock = self._context.socket(zmq.ROUTER)
        self._sock.linger = 0
        port = self._sock.bind_to_random_port("tcp://127.0.0.1")
        self.address = PeerAddress(f"tcp://127.0.0.1:{port}", None)
        self.rng = random.Random(3)
        self.answers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._sock.poll(20):
                route, header = self._sock.recv_multipart()
                for frames in self.answer(decode_message([header])):
                    self.answers += 1
                    self._sock.send_multipart([route, *frames])

    def answer(self, message: object) -> list[list[bytes]]:
        raise NotImplementedError

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._sock.close()
        self._context.term()


@contextlib.asynccontextmanager
async def taking_from(producer: FalseProducer) -> AsyncIterator[tuple[ExchangeNode, ExchangeNode]]:
    """Give an honest pair a false third."""
    try:
        async with two_nodes() as (a, b):
            b.port.set_peers({"a": a.address, "x": producer.address})
            yield a, b
    finally:
        producer.close()


def table_frames(size_bytes: int, length: int = 5) -> list[bytes]:
    one = np.ones(1, np.int32)
    parts = np.array([[3, 0, size_bytes, 1]])
    return ParcelTable(parts, one, one, one, one * length).encode()


class NoisyProducer(FalseProducer):
    """Answers everything with noise."""

    def answer(self, message: object) -> list[list[bytes]]:
        rng = self.rng
        key = key_of(rng.randrange(5), producer="x")
        size = ParcelSize(key, rng.choice([64, 1 << 36, 10**6]), FRAME_BYTES_MIN, 5, 1)
        said = [noise(rng) for _ in range(20)]
        said.append([encode_header(size), *table_frames(rng.choice([64, 128]))])
        said.append([encode_header(ParcelData(key, 5, rng.randrange(3))), rng.randbytes(100)])
        said.append([encode_header(Pong("x", 1, rng.randrange(3)))])
        if rng.random() < 0.1:
            said.append([bytes(FRAME_BYTES_MAX + 1)])
        return said


async def test_a_consumer_stands_noise_too() -> None:
    producer = NoisyProducer()
    async with taking_from(producer) as (a, b):
        b.rooms = None  # what it is asked for here is absurd
        for step in range(5):
            b.port.want(key_of(step, producer="x"))
        async with asyncio.timeout(30):
            while producer.answers < 300:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # a thread counts
        for step in range(5):
            await b.port.withdraw(key_of(step, producer="x"))
        fill_rooms(b)
        await exchange_goes_on(a, b, 10)
        assert [key for key in b.came if key.producer == "x"] == []


def fill_rooms(node: ExchangeNode) -> None:
    node.rooms = Allocator(node.segment.nbytes, [Piece(0, node.segment.nbytes // 2)])


class DamagedProducer(FalseProducer):
    """Gives what it promised in size alone."""

    size = ParcelSize(key_of(0, producer="x"), 3 * FRAME_BYTES_MIN, FRAME_BYTES_MIN, 5, 1)

    def answer(self, message: object) -> list[list[bytes]]:
        match message:
            case Want():
                return [[encode_header(self.size), *table_frames(self.size.size_bytes)]]
            case Pull(key, layout, frames):
                return [
                    [encode_header(ParcelData(key, layout, frame)), b"\x77" * FRAME_BYTES_MIN]
                    for frame in frames
                ]
            case Ping(_, number):
                return [[encode_header(Pong("x", number, 1))]]
        return []


async def test_a_damaged_parcel_is_named_after_a_few_tries() -> None:
    producer = DamagedProducer()
    async with taking_from(producer) as (a, b):
        key = key_of(0, producer="x")
        b.port.want(key)
        await b.until(lambda: bool(b.failed))
        ((failed, error),) = b.failed
        assert failed == key
        assert isinstance(error, ChunkCorruptError)
        assert "node x gave a damaged parcel" in error.message
        assert not b.came
        await exchange_goes_on(a, b, 1)


class FalseLink:
    """A producer's data port that takes any token and then says what a test wants."""

    def __init__(self, say: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._say = say
        self.links = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.recv(HELLO.size)
                self.links += 1
                self._say(sock)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class LinkingProducer(FalseProducer):
    """Promises a parcel, and data at a port of its own; over ZeroMQ no data comes."""

    size = ParcelSize(key_of(0, producer="x"), 3 * FRAME_BYTES_MIN, FRAME_BYTES_MIN, 5, 1)

    def __init__(self) -> None:
        self.link = FalseLink(self.say)
        super().__init__()

    def answer(self, message: object) -> list[list[bytes]]:
        match message:
            case Want():
                return [[encode_header(self.size), *table_frames(self.size.size_bytes)]]
            case Ping(_, number):
                token = bytes(16).hex()
                return [[encode_header(Pong("x", number, 1, self.link.port, token))]]
        return []

    def say(self, sock: socket.socket) -> None:
        """Send a frame of another's parcel, a whole one, half of one, and noise."""
        rng = random.Random(self.link.links)
        for key, frame, share in [
            (key_of(0), 0, 1.0),
            (self.size.key, rng.randrange(4), 1.0),
            (self.size.key, 99, 1.0),
            (self.size.key, rng.randrange(3), 0.5),
        ]:
            header = encode_header(ParcelData(key, 5, frame))
            sock.sendall(encode_head(header, FRAME_BYTES_MIN))
            sock.sendall(b"\x77" * int(FRAME_BYTES_MIN * share))
        sock.sendall(rng.randbytes(100))

    def close(self) -> None:
        self.link.close()
        super().close()


async def test_a_producer_that_lies_over_its_link_writes_its_own_room_alone() -> None:
    producer = LinkingProducer()
    async with taking_from(producer) as (a, b):
        key = key_of(0, producer="x")
        b.port.want(key)
        await b.until(lambda: key in b.lent)
        offset, nbytes = b.lent[key]
        async with asyncio.timeout(30):
            while producer.link.links < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # a thread counts
        await b.port.withdraw(key)
        end = offset + nbytes
        assert bytes(b.mapping.view[end : b.segment.nbytes // 2]).count(0x77) == 0
        assert not b.came
        await exchange_goes_on(a, b, 1)


async def test_an_endpoint_that_is_none_is_named() -> None:
    async with exchange_node("b", fields=FIELDS, media=MEDIA, pool_bytes=32 << 20) as b:
        fill(b)
        b.port.set_peers({"x": PeerAddress("tcp://127.0.0.1", None)})
        await b.until(lambda: "x" in b.peers)
        assert b.peers["x"][0] is False
        assert "cannot be used" in b.told[0][2]
