"""Two reliable ends over a network that loses, repeats, reorders and stops; ends that restart.

Whatever happens, what one end delivers of a session is a prefix of what the other one sent in it;
once the network is whole, all of it arrives.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from federation.core.packet import PACKET_BYTES_MAX, Packet
from federation.core.reliable import (
    Deliver,
    Down,
    Effect,
    Greeted,
    Heard,
    ReliableEnd,
    Silent,
    Transmit,
    Up,
)
from federation.packets import decode_packet, encode_packet

Session = tuple[int, int]
INITIATOR, LISTENER = 0, 1


class TwoEnds:
    """The shell of both ends, and what lies between them."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.incarnations = itertools.count(1 << 40, 1 << 20)
        self.wire: list[tuple[int, Packet]] = []
        """Receiving side, packet."""
        self.sent: dict[tuple[int, Session], list[tuple[bytes, ...]]] = defaultdict(list)
        self.got: dict[tuple[int, Session], list[tuple[bytes, ...]]] = defaultdict(list)
        self.is_silent = [False, False]
        self.hellos = [b"hello0", b"hello1"]
        self.heard_hello: list[bytes | None] = [None, None]
        self.ends = [self.new_end(INITIATOR), self.new_end(LISTENER)]
        self.texts = itertools.count()

    def new_end(self, side: int) -> ReliableEnd:
        return ReliableEnd(
            next(self.incarnations),
            self.hellos[side],
            is_initiator=side == INITIATOR,
            now_ns=self.now_ns,
        )

    def restart(self, side: int) -> None:
        self.ends[side] = self.new_end(side)
        self.heard_hello[side] = None
        self.is_silent[side] = False

    def carry_out(self, side: int, effects: list[Effect]) -> None:
        end = self.ends[side]
        for effect in effects:
            match effect:
                case Transmit(packet):
                    assert decode_packet(encode_packet(packet)) == packet
                    self.wire.append((1 - side, packet))
                case Deliver(frames):
                    assert self.heard_hello[side] is not None
                    assert end.session is not None
                    self.got[side, end.session].append(frames)
                case Up(_, hello):
                    assert self.heard_hello[side] is None
                    self.heard_hello[side] = hello
                    self.is_silent[side] = False
                case Greeted(hello):
                    assert self.heard_hello[side] is not None
                    self.heard_hello[side] = hello
                case Down():
                    assert self.heard_hello[side] is not None
                    self.heard_hello[side] = None
                case Silent():
                    assert not self.is_silent[side]
                    self.is_silent[side] = True
                case Heard():
                    assert self.is_silent[side]
                    self.is_silent[side] = False

    def send(self, side: int, frames: tuple[bytes, ...]) -> None:
        end = self.ends[side]
        if end.session is not None:
            self.sent[side, end.session].append(frames)
        self.carry_out(side, end.send(frames, self.now_ns))

    def take(self, at: int) -> None:
        side, packet = self.wire.pop(at)
        self.carry_out(side, self.ends[side].handle(packet, self.now_ns))

    def advance(self, by_ns: int) -> None:
        self.now_ns += by_ns
        for side, end in enumerate(self.ends):
            deadline = end.next_deadline_ns()
            if deadline is not None and deadline <= self.now_ns:
                self.carry_out(side, end.tick(self.now_ns))

    def check(self) -> None:
        for end in self.ends:
            end.check()
        for (side, (own, peer)), got in self.got.items():
            assert got == self.sent[1 - side, (peer, own)][: len(got)]

    def heal(self) -> None:
        """Let the network work, in order and with 20 ms a way, until nothing is under way."""
        for _ in range(600):
            for _ in range(len(self.wire)):
                self.take(0)
            self.advance(20_000_000)
        self.check()
        (own, peer), other = self.ends[0].session or (0, 0), self.ends[1].session
        assert other == (peer, own)
        for side, session in ((0, (own, peer)), (1, (peer, own))):
            opposite = (session[1], session[0])
            assert self.got[1 - side, opposite] == self.sent[side, session]
            assert self.heard_hello[1 - side] == self.hellos[side]
            assert self.ends[side].statistics().queued_bytes == 0
            assert self.ends[side].is_up(self.now_ns)


class ReliableMachine(RuleBasedStateMachine):
    @initialize(is_up=st.booleans())
    def start(self, is_up: bool) -> None:
        self.net = TwoEnds()
        if is_up:
            self.net.heal()

    @rule(side=st.integers(0, 1), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def send(self, side: int, sizes: list[int]) -> None:
        text = b"%d" % next(self.net.texts)
        self.net.send(side, (text, *(b"x" * size for size in sizes)))

    @rule(side=st.integers(0, 1), extra=st.integers(-3, 3))
    def send_large(self, side: int, extra: int) -> None:
        text = b"%d" % next(self.net.texts)
        large = text.rjust(10) * (PACKET_BYTES_MAX // 10)
        self.net.send(side, (text, large + b"y" * extra if extra > 0 else large[:extra], b"end"))

    @rule(count=st.integers(1, 8))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.net.wire))):
            self.net.take(0)

    @rule(at=st.integers(0, 30))
    def deliver_out_of_order(self, at: int) -> None:
        if self.net.wire:
            self.net.take(at % len(self.net.wire))

    @rule(at=st.integers(0, 30), is_first=st.booleans())
    def repeat(self, at: int, is_first: bool) -> None:
        if self.net.wire:
            copy = self.net.wire[at % len(self.net.wire)]
            self.net.wire.insert(0 if is_first else len(self.net.wire), copy)

    @rule(count=st.integers(1, 10))
    def lose(self, count: int) -> None:
        del self.net.wire[:count]

    @rule(by_ms=st.sampled_from([1, 20, 25, 300, 501, 1001, 5001]))
    def advance(self, by_ms: int) -> None:
        self.net.advance(by_ms * 1_000_000)

    @rule(side=st.integers(0, 1))
    def restart(self, side: int) -> None:
        self.net.restart(side)

    @rule(side=st.integers(0, 1))
    def reset(self, side: int) -> None:
        end = self.net.ends[side]
        self.net.carry_out(side, end.reset("asked", self.net.now_ns))

    @rule(side=st.integers(0, 1))
    def greet_anew(self, side: int) -> None:
        hello = b"hello%d" % next(self.net.texts)
        self.net.hellos[side] = hello
        self.net.carry_out(side, self.net.ends[side].set_hello(hello, self.net.now_ns))

    @invariant()
    def prefix(self) -> None:
        if hasattr(self, "net"):
            self.net.check()

    def teardown(self) -> None:
        if hasattr(self, "net"):
            self.net.heal()


ReliableMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestReliable = ReliableMachine.TestCase


def test_lost_run_of_packets_is_sent_again_on_the_gap_without_a_time_out() -> None:
    net = TwoEnds()
    net.heal()
    for number in range(10):
        net.send(0, (b"%d" % number,))
    del net.wire[2:8]
    before_ns = net.now_ns
    for _ in range(4):
        for _ in range(len(net.wire)):
            net.take(0)
    assert net.now_ns == before_ns
    side, session = 1, net.ends[1].session
    assert session is not None
    assert len(net.got[side, session]) == 10
    assert net.ends[1].statistics().gaps


@pytest.mark.parametrize("side", [0, 1])
def test_messages_of_a_cut_of_ten_seconds_arrive_soon_after_it(side: int) -> None:
    net = TwoEnds()
    net.heal()
    session = net.ends[side].session
    for number in range(50):
        net.send(side, (b"%d" % number,))
        net.advance(200_000_000)
        net.wire.clear()
    assert all(net.is_silent)
    for _ in range(60):
        for _ in range(len(net.wire)):
            net.take(0)
        net.advance(20_000_000)
    assert net.ends[side].session == session
    assert session is not None
    assert len(net.got[1 - side, (session[1], session[0])]) == 50
    assert net.is_silent == [False, False]


def test_late_packets_of_an_earlier_session_change_nothing() -> None:
    net = TwoEnds()
    net.heal()
    net.send(0, (b"old",))
    late = list(net.wire)
    net.restart(0)
    net.wire.clear()
    net.advance(600_000_000)
    late += net.wire
    net.heal()
    sessions = [end.session for end in net.ends]
    for side, packet in late * 3:
        net.wire.append((side, packet))
        net.heal()
    assert [end.session for end in net.ends] == sessions


def test_no_more_than_a_window_is_in_flight() -> None:
    net = TwoEnds()
    net.heal()
    net.send(0, (b"head", bytes(40 * PACKET_BYTES_MAX)))
    assert len([1 for _, packet in net.wire if packet.number]) == 4
    assert not net.ends[0].has_room
    net.heal()
    assert net.ends[0].has_room


def test_peer_that_takes_nothing_costs_bounded_memory_and_then_its_session() -> None:
    net = TwoEnds()
    net.heal()
    for _ in range(5):
        net.send(0, (b"head", bytes(63 * PACKET_BYTES_MAX)))
        net.wire.clear()
    assert net.heard_hello[0] is None
    assert net.ends[0].statistics().queued_bytes == 0


def test_what_an_end_says_of_itself_during_the_handshake_is_not_lost() -> None:
    net = TwoEnds()
    net.advance(1)
    net.take(0)
    for side, hello in ((1, b"leads now"), (0, b"more cores")):
        net.hellos[side] = hello
        net.carry_out(side, net.ends[side].set_hello(hello, net.now_ns))
    net.heal()
    assert net.heard_hello == [b"leads now", b"more cores"]
