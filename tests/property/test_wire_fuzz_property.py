"""Hostile bytes on both ends of the control wire: a typed refusal or nothing, never a crash."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import hypothesis.strategies as st
import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings

from federation.cluster_hello import (
    NodeHello,
    PlannerHello,
    decode_node_hello,
    decode_planner_hello,
    encode_hello,
)
from federation.cluster_link import ClusterLink
from federation.cluster_router import ClusterRouter
from federation.core.packet import (
    MESSAGE_BYTES_MAX,
    MESSAGE_FRAMES_MAX,
    MESSAGE_HEADER_BYTES_MAX,
    PACKET_BYTES_MAX,
    PACKET_FRAMES_MAX,
    Flag,
    Kind,
    Packet,
    split_message,
)
from federation.core.reliable import ReliableEnd, Transmit, Up
from federation.messages import Envelope, JobEnded, decode_envelope
from federation.packets import MAGIC, WIRE_VERSION, decode_packet, encode_packet
from msd_client.contract.errors import ProtocolError, VersionMismatchError

settings.register_profile(
    "wire", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
WIRE = settings.get_profile("wire")

numbers = st.one_of(st.integers(0, 5), st.integers(0, (1 << 64) - 1))
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=9)
    | st.binary(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@st.composite
def hellos(draw: st.DrawFn) -> bytes:
    good = [
        encode_hello(NodeHello("n1")),
        encode_hello(NodeHello("n2", {"cores": 4})),
        encode_hello(PlannerHello("p0", leads=True, term=1)),
        encode_hello(PlannerHello("p0", leads=draw(st.booleans()), term=draw(st.integers(0, 9)))),
    ]
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.binary(max_size=40))
    if kind == 1:
        keys = st.sampled_from(["node", "facts", "planner", "leads", "term", "leader", "version"])
        packed = msgpack.packb(draw(st.dictionaries(keys, plain_values, max_size=7)))
        assert isinstance(packed, bytes)
        return packed
    return draw(st.sampled_from(good))


@st.composite
def envelopes(draw: st.DrawFn) -> list[bytes]:
    frames = Envelope("job", 1, draw(st.integers(0, 3)), 0, JobEnded(1, "x"), (b"ab",)).encode()
    kind = draw(st.integers(0, 2))
    if kind == 0:
        at = draw(st.integers(0, len(frames[0]) - 1))
        broken = bytearray(frames[0])
        broken[at] ^= draw(st.integers(1, 255))
        frames[0] = bytes(broken)
    elif kind == 1:
        frames = draw(st.lists(st.binary(max_size=30), max_size=3))
    return frames


@st.composite
def multiparts(
    draw: st.DrawFn, senders: Sequence[int] = (), receivers: Sequence[int] = ()
) -> list[bytes]:
    """Packets that are nearly right, with the ids of a session if there is one, and plain noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.lists(st.binary(max_size=50), max_size=4))
    kind = draw(st.sampled_from(list(Kind)))
    flags = Flag(draw(st.integers(0, 15)))
    frames: list[bytes]
    if kind in (Kind.HELLO, Kind.REFUSED) or flags & Flag.GREETING:
        frames = [draw(hellos())]
    else:
        frames = draw(envelopes()) if kind is Kind.DATA else []
    packet = Packet(
        kind,
        draw(st.sampled_from([*senders, 1, 2]) | numbers),
        draw(st.sampled_from([*receivers, 0, 1]) | numbers),
        draw(numbers),
        draw(numbers),
        flags,
        tuple(frames),
    )
    parts = encode_packet(packet)
    if draw(st.integers(0, 4)) == 0:
        header = bytearray(parts[0])
        header[draw(st.integers(0, len(header) - 1))] ^= draw(st.integers(1, 255))
        parts[0] = bytes(header[: draw(st.integers(0, len(header) + 1))])
    return parts


@given(multiparts())
@settings(WIRE, max_examples=300)
def test_any_multipart_is_a_packet_or_refused(parts: list[bytes]) -> None:
    try:
        packet = decode_packet(parts)
    except ProtocolError:
        return
    assert encode_packet(packet) == parts


@given(st.binary(max_size=80) | hellos())
@settings(WIRE, max_examples=200)
def test_any_greeting_is_one_or_refused(frame: bytes) -> None:
    for decode in (decode_node_hello, decode_planner_hello):
        try:
            decode(frame)
        except ProtocolError:
            continue


@given(envelopes())
@settings(WIRE, max_examples=300)
def test_any_envelope_is_one_or_refused(frames: list[bytes]) -> None:
    try:
        decode_envelope(frames)
    except ProtocolError:
        return


def _session(*, is_initiator: bool) -> tuple[ReliableEnd, int, int]:
    """Return an end with a session, its id and its peer's."""
    ends = [ReliableEnd(1 << 40, b"a", is_initiator=True, now_ns=0),
            ReliableEnd(1 << 50, b"b", is_initiator=False, now_ns=0)]  # fmt: skip
    effects = [(1, one) for one in ends[0].tick(0)]
    while effects:
        side, effect = effects.pop(0)
        if isinstance(effect, Transmit):
            effects += [(1 - side, one) for one in ends[side].handle(effect.packet, 0)]
    end = ends[0 if is_initiator else 1]
    assert end.session is not None
    return end, *end.session


@given(st.booleans(), st.data())
@settings(WIRE, max_examples=200)
def test_an_end_survives_whatever_its_peer_sends(is_initiator: bool, data: st.DataObject) -> None:
    end, own, peer = _session(is_initiator=is_initiator)
    for at in range(data.draw(st.integers(1, 8))):
        parts = data.draw(multiparts([peer], [own]))
        now_ns = at * 10_000_000
        try:
            effects = end.handle(decode_packet(parts), now_ns)
        except ProtocolError:
            effects = end.reset("broke the protocol", now_ns)
        end.tick(now_ns)
        end.send([b"x"], now_ns)
        end.check()
        for effect in effects:
            if isinstance(effect, Up):
                own, peer = end.session or (own, peer)


@given(st.lists(st.tuples(st.integers(0, 2), multiparts()), max_size=12))
@settings(WIRE, max_examples=100)
def test_router_survives_whatever_comes(
    packets: list[tuple[int, list[bytes]]],
) -> None:
    for route, parts in packets:
        _ROUTER[0]._receive(bytes([route]), [zmq.Frame(part) for part in parts] or [zmq.Frame(b"")])
        _ROUTER[0].poll(0)


_ROUTER: list[ClusterRouter] = []


@pytest.fixture(autouse=True, scope="module")
def router() -> object:
    _ROUTER.append(ClusterRouter("tcp://127.0.0.1:0", hello=PlannerHello("p0", leads=True, term=1)))
    yield
    _ROUTER.pop().close()


@given(st.lists(multiparts(), min_size=1, max_size=10), st.data())
@settings(WIRE, max_examples=60)
def test_link_survives_whatever_a_planner_sends(
    packets: list[list[bytes]], data: st.DataObject
) -> None:
    async def run() -> None:
        told = itertools.count()
        link = ClusterLink(
            ["tcp://127.0.0.1:9"],
            "n1",
            lambda _: next(told) and None,
            on_up=lambda _: None,
            on_down=lambda _: None,
        )
        (planner,) = link.planners
        try:
            # The fuzzed planner knows the session's ids, as a real one would.
            own = planner.end._own
            hello = encode_hello(PlannerHello("p0", leads=True, term=1))
            planner._take([memoryview(part) for part in encode_packet(
                Packet(Kind.HELLO, 7, own, frames=(hello,)))])  # fmt: skip
            assert link.leader is not None
            for parts in packets + [data.draw(multiparts([7], [own])) for _ in range(4)]:
                planner._take([memoryview(part) for part in parts])
                planner._mistrusted_until_ns = 0
                planner.carry_out(planner.end.tick(time.monotonic_ns()))
                planner.end.check()
        finally:
            link.close()

    with asyncio.Runner() as runner:
        runner.run(run())


def test_another_version_is_told_apart_from_noise() -> None:
    packet = encode_packet(Packet(Kind.ACK, 1, 1))
    other = [packet[0][:4] + bytes([WIRE_VERSION + 1]) + b"whatever it holds"]
    with pytest.raises(VersionMismatchError, match="install the same msd"):
        decode_packet(other)
    with pytest.raises(ProtocolError, match="not a packet"):
        decode_packet([b"GET / HTTP/1.1"])
    assert packet[0].startswith(MAGIC)


@pytest.mark.parametrize(
    "packet",
    [
        Packet(Kind.DATA, 1, 1, 1, frames=(bytes(PACKET_BYTES_MAX + 1),)),
        Packet(Kind.DATA, 1, 1, 1, frames=(b"",) * (PACKET_FRAMES_MAX + 1)),
        Packet(Kind.HELLO, 1, 1, frames=(bytes(65 << 10),)),
        Packet(Kind.HELLO, 1, 1),
        Packet(Kind.HELLO, 1, 1, 5, frames=(b"x",)),
        Packet(Kind.DATA, 1, 1, 0, frames=(b"x",)),
        Packet(Kind.DATA, 0, 1, 1, frames=(b"x",)),
        Packet(Kind.ACK, 1, 1, frames=(b"x",)),
        Packet(Kind.DATA, 1, 1, 1, flags=Flag.GREETING, frames=(b"x", b"y")),
    ],
)  # fmt: skip
def test_oversized_and_misshapen_packets_are_refused(packet: Packet) -> None:
    with pytest.raises(ProtocolError):
        decode_packet(encode_packet(packet))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [bytes(MESSAGE_HEADER_BYTES_MAX + 1)],
        [b"", bytes(MESSAGE_BYTES_MAX + 1)],
        [b""] * (MESSAGE_FRAMES_MAX + 1),
    ],
)  # fmt: skip
def test_messages_over_the_limits_are_refused_where_they_are_sent(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        list(split_message(frames))


def test_message_that_never_ends_costs_a_bounded_amount_and_then_the_session() -> None:
    end, own, peer = _session(is_initiator=False)
    part = (bytes(PACKET_BYTES_MAX),)
    with pytest.raises(ProtocolError, match="more than"):
        for number in range(1, 200):
            flags = Flag.MORE | (Flag.JOINS if number > 1 else Flag.NONE)
            end.handle(Packet(Kind.DATA, peer, own, number, 0, flags, part), number)
    assert number <= MESSAGE_BYTES_MAX // PACKET_BYTES_MAX + 1


def test_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    end, own, peer = _session(is_initiator=True)
    with pytest.raises(ProtocolError, match="acknowledges packet 9"):
        end.handle(Packet(Kind.ACK, peer, own, ack=9), 1)
