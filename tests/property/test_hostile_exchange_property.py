"""An exchange process and peers that may say anything: well-formed, but false, late or absurd."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.exchange_messages import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    ExchangeMessage,
    ParcelData,
    ParcelKey,
    ParcelSize,
    ParcelTable,
    Ping,
    Pong,
    Pull,
    Refused,
    Taken,
    TakenNoted,
    Want,
)
from msd_client.contract.errors import MsdError
from msd_daemon.shm.mapping import Mapping, map_read_write
from msd_daemon.workers.exchange_main import Exchange
from msd_daemon.workers.exchange_orders import (
    ExchangeSetup,
    FromExchange,
    ToExchange,
    decode_order,
    encode_order,
)
from tests.support.parcels import FilledPool, Source

POOL_BYTES = 1 << 20
ROOM = (POOL_BYTES // 2, 3 * FRAME_BYTES_MIN)
OFFERED = ParcelKey("j", 1, 0, "me", "p")
WANTED = [ParcelKey("j", 1, step, "p", "me") for step in range(3)]

small = st.sampled_from([0, 1, 2, 3, 255, 1 << 20, 1 << 40, (1 << 63) - 1])
numbers = small | st.integers(0, (1 << 63) - 1)
keys = st.sampled_from([OFFERED, *WANTED]) | st.builds(
    ParcelKey,
    st.sampled_from(["j", "k", ""]),
    small,
    small,
    st.sampled_from(["me", "p", "q"]),
    st.sampled_from(["me", "p", "q"]),
)
layouts = st.sampled_from([7, 8]) | numbers
requests = st.one_of(
    st.builds(Want, keys),
    st.builds(Pull, keys, layouts, st.lists(numbers, min_size=1, max_size=20).map(tuple)),
    st.builds(Taken, keys),
    st.builds(Ping, st.sampled_from(["me", "p", "q"]), numbers),
)
answers = st.one_of(
    st.builds(
        ParcelSize,
        keys,
        st.sampled_from([64, 2 * FRAME_BYTES_MIN, ROOM[1], ROOM[1] + 64, 1 << 36]),
        st.sampled_from([FRAME_BYTES_MIN, FRAME_BYTES_MAX]),
        layouts,
        small,
    ),
    st.builds(ParcelData, keys, layouts, st.sampled_from([0, 1, 2]) | numbers),
    st.builds(TakenNoted, keys),
    st.builds(Refused, keys, st.sampled_from(["data", "no such code", ""]), st.text(max_size=9)),
    st.builds(Pong, st.sampled_from(["me", "p", "q"]), numbers, small),
    st.builds(
        Pong,
        st.just("p"),
        numbers,
        small,
        st.sampled_from([0, 9, 1 << 16]) | numbers,
        st.sampled_from(["", "00" * 16, "zz"]) | st.text(max_size=40),
    ),
)
anything = st.tuples(st.just("consumer"), requests | answers) | st.tuples(
    st.just("producer"), answers | requests
)
payloads = st.sampled_from([0, 1, 64, FRAME_BYTES_MIN, FRAME_BYTES_MIN + 1, FRAME_BYTES_MAX])


class Link:
    """A daemon that gives the room it is asked for, where that is not absurd."""

    def __init__(self) -> None:
        self.asked: list[tuple[ParcelKey, int, int]] = []
        self.came: list[ParcelKey] = []

    def send(self, kind: int, body: bytes = b"") -> None:
        if kind == FromExchange.SIZE:
            self.asked.append(tuple(decode_order(body)))
        if kind == FromExchange.CAME:
            self.came.append(decode_order(body)[0])


class Case:
    """An exchange with one pool, one offer and three wishes, without a loop."""

    def __init__(self) -> None:
        fd = os.memfd_create("msd-test")
        os.ftruncate(fd, POOL_BYTES)
        self.mapping: Mapping = map_read_write(fd, POOL_BYTES)
        self.link = Link()
        setup = ExchangeSetup("me", "tcp://127.0.0.1:0", b"", b"", FRAME_BYTES_MIN, 1 << 20, 1)
        self.exchange = Exchange(self.link, os.open("/dev/null", os.O_RDONLY), setup)
        pool = FilledPool(self.mapping.view)
        pool.put(Source(0, [50_000, 3]))
        self.exchange._fds.append(fd)
        self.tell(ToExchange.POOL, "j", POOL_BYTES, [], [])
        self.tell(ToExchange.PEERS, ["p", "tcp://127.0.0.1:9", None])
        self.tell(ToExchange.OFFER, OFFERED, pool.fragments([(0, 0, 0, 50_000)]).encode(), True)
        for key in WANTED:
            self.tell(ToExchange.WANT, key)
        self.before = bytes(self.mapping.view)

    def tell(self, kind: ToExchange, *values: object) -> None:
        self.exchange._order(kind, encode_order(*values))

    def hear(self, side: str, message: ExchangeMessage, payload: bytes) -> None:
        frames = [b"", payload]
        if isinstance(message, ParcelSize):
            whole = np.array([[0, 0, message.size_bytes, 1]])
            one = np.ones(1, np.int32)
            frames[1:] = ParcelTable(whole, one, one, one, one).encode()
        held = [zmq.Frame(frame) for frame in frames]
        with contextlib.suppress(MsdError):
            if side == "consumer":
                name = self.exchange._name_of(held[0], message)
                self.exchange._heard_consumer(name, b"route", message)
            else:
                self.exchange._heard_producer("p", message, held, time.monotonic_ns())
        while self.link.asked:  # the first wish that asks for room that fits gets it
            key, size_bytes, ask = self.link.asked.pop()
            if key == WANTED[0] and size_bytes <= ROOM[1]:
                self.tell(ToExchange.ROOM, key, *ROOM, ask)
        self.exchange._give()
        self.exchange._tick_ns = 0
        self.exchange._tick()
        self.exchange._act()

    def close(self) -> None:
        exchange = self.exchange
        for name in list(exchange._peers):
            exchange._disconnect(name)
        assert exchange._data is not None
        exchange._data.close()
        exchange._router.close(0)
        exchange._zap.close(0)
        exchange._context.term()
        os.close(exchange._link_fd)
        for pool in exchange._pools.values():
            pool.close()
        self.mapping.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(anything, payloads), max_size=60))
def test_whatever_peers_say_nothing_but_given_room_is_written(
    said: list[tuple[tuple[str, ExchangeMessage], int]],
) -> None:
    case = Case()
    try:
        for (side, message), size in said:
            case.hear(side, message, b"\xee" * size)
        after = bytes(case.mapping.view)
        begin, end = ROOM[0], ROOM[0] + ROOM[1]
        assert after[:begin] == case.before[:begin]
        assert after[end:] == case.before[end:]
        assert not case.link.came  # bytes of 0xee are no chunk
        taker, giver = case.exchange._taker, case.exchange._giver
        assert len(taker) <= len(WANTED)
        assert len(giver) <= 1
        assert sum(map(len, giver._early.values())) <= len(said)
    finally:
        case.close()
