"""Nodes that exchange parcels over a network that loses, repeats and reorders: no sockets, no clock.

The owner of each node keeps what the daemon's port keeps, and tells it to every new process.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from federation.core.parcel_giver import Answer, ParcelGiver, TellDeclined, TellTaken
from federation.core.parcel_taker import (
    CheckParcel,
    FramePlace,
    ParcelTaker,
    Post,
    TakerLimits,
    TellCame,
    TellFailed,
    TellSettled,
    TellSize,
)
from federation.core.parcel_taker import Room as Piece
from federation.exchange_messages import (
    FRAME_BYTES_MIN,
    ExchangeMessage,
    ParcelData,
    ParcelKey,
    ParcelSize,
    ParcelTable,
    Pull,
    Refused,
    Taken,
    TakenNoted,
    Want,
    decode_message,
    encode_header,
)

SECOND_NS = 1_000_000_000
LIMITS = TakerLimits(window_bytes=4 * FRAME_BYTES_MIN)


def table_of(size_bytes: int) -> ParcelTable:
    one = np.ones(1, np.int64)
    return ParcelTable(np.array([[0, 0, size_bytes, 1]]), one, *(one.astype("i4"),) * 3)


@dataclass
class Room:
    """A piece of a pool, and which frame of what was written where in it."""

    key: ParcelKey
    size_bytes: int
    is_lent: bool = True
    frames: dict[int, tuple[ParcelKey, int]] = field(default_factory=dict)


@dataclass
class Incoming:
    """A data frame that comes piece by piece, over a link."""

    peer: str
    data: ParcelData
    size_bytes: int
    place: FramePlace | None
    room: Room | None


class Owner:
    """What outlives a node's process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.offers: dict[ParcelKey, int] = {}
        self.wants: dict[ParcelKey, Room | None] = {}
        self.unsettled: set[ParcelKey] = set()
        self.fence = -1
        self.came: list[ParcelKey] = []
        self.acked: list[ParcelKey] = []
        self.failed: list[ParcelKey] = []
        self.rooms: dict[int, Room] = {}
        self.orders: list[tuple[ParcelKey, Room, int]] = []
        """Rooms on their way to the process."""
        self.incarnation = 0
        self.spoil = 0
        """Parcels that will be found damaged."""
        self.incoming: dict[str, Incoming] = {}
        """By peer."""
        self.begin()

    def begin(self) -> None:
        """Let a process begin; all that is known is told to it."""
        self.incarnation += 1
        self.incoming.clear()
        self.giver, self.taker = ParcelGiver(), ParcelTaker(LIMITS)
        if self.fence >= 0:
            self.giver.drop_generation("j", self.fence)
            self.taker.drop_generation("j", self.fence, self.world.now_ns)
        for key in self.offers:
            self._offer(key)
        self.orders.clear()
        for key, room in self.wants.items():
            self.taker.want(key, self.world.now_ns, None if room is None else self._place(room))
        for key in self.unsettled:
            self.taker.acknowledge(key, self.world.now_ns)
        self.act()

    def offer(self, key: ParcelKey, size_bytes: int) -> None:
        if key.generation > self.fence:
            self.offers[key] = size_bytes
            self._offer(key)
            self.act()

    def _offer(self, key: ParcelKey) -> None:
        size = self.offers[key]
        name = (self.world.numbers[self.name], self.incarnation)
        self.giver.offer(ParcelSize(key, size, FRAME_BYTES_MIN, size * 7, hash(name) & 0xFFFF))

    def want(self, key: ParcelKey) -> None:
        if key.generation > self.fence and key not in self.wants:
            self.wants[key] = None
            self.taker.want(key, self.world.now_ns)
            self.act()

    def withdraw(self, key: ParcelKey) -> None:
        self._forget(key)
        self.taker.withdraw(key, self.world.now_ns)
        self.giver.withdraw(key)
        self.act()

    def drop(self, generation: int) -> None:
        self.fence = max(self.fence, generation)
        for key in {*self.offers, *self.wants, *self.unsettled}:
            if key.generation <= self.fence:
                self._forget(key)
        self.taker.drop_generation("j", generation, self.world.now_ns)
        self.giver.drop_generation("j", generation)
        self.act()

    def _forget(self, key: ParcelKey) -> None:
        self.offers.pop(key, None)
        room = self.wants.pop(key, None)
        if room is not None:
            room.is_lent = False
        self.unsettled.discard(key)

    def _place(self, room: Room) -> Piece:
        (offset,) = [at for at, other in self.rooms.items() if other is room]
        return Piece(offset, room.size_bytes)

    def hear_order(self) -> None:
        """Let the process hear of the next room."""
        if self.orders:
            key, room, ask = self.orders.pop(0)
            self.taker.room(key, self._place(room), ask, self.world.now_ns)
            self.act()

    # what happens

    def receive(self, peer: str, message: ExchangeMessage, size_bytes: int) -> None:
        now = self.world.now_ns
        match message:
            case Want():
                self.giver.want_came(message)
            case Pull():
                self.giver.pull_came(message)
            case Taken():
                self.giver.taken_came(message)
            case ParcelSize():
                self.taker.size_came(message, table_of(message.size_bytes), now)
            case ParcelData():
                self._write(peer, message, size_bytes)
            case TakenNoted():
                self.taker.noted(message)
            case Refused():
                self.taker.refused(message, now)
        self.act()

    def _write(self, peer: str, data: ParcelData, size_bytes: int) -> None:
        place = self.taker.frame_place(data, size_bytes)
        if peer not in self.incoming and self.world.rng.random() < 0.3:
            room = None if place is None else self._room_at(place)
            self.incoming[peer] = Incoming(peer, data, size_bytes, place, room)
            return
        offset = self.taker.data_came(peer, data, size_bytes, self.world.now_ns)
        assert offset == (None if place is None else place.offset_bytes)
        if offset is not None:
            self._written(data, offset, size_bytes)

    def _room_at(self, place: FramePlace) -> Room:
        return self.rooms[max(at for at in self.rooms if at <= place.offset_bytes)]

    def go_on(self) -> None:
        """Let a piece of each frame come that comes over a link, the last one perhaps; or lose the link."""
        for peer, it in list(self.incoming.items()):
            place = self.taker.frame_place(it.data, it.size_bytes)
            if it.place is not None and place == it.place:
                assert self._room_at(it.place) is it.room and it.room.is_lent
            else:
                it.place = None
            chance = self.world.rng.random()
            if chance < 0.5:
                continue
            del self.incoming[peer]
            if chance < 0.6:
                self.taker.link_lost(peer, self.world.now_ns)
            elif it.place is None:
                self.taker.frame_spoiled(peer, it.data, self.world.now_ns)
            else:
                offset = self.taker.data_came(peer, it.data, it.size_bytes, self.world.now_ns)
                assert offset == it.place.offset_bytes
                self._written(it.data, offset, it.size_bytes)
            self.act()

    def _written(self, data: ParcelData, place: int, size_bytes: int) -> None:
        base = max(at for at in self.rooms if at <= place)
        room = self.rooms[base]
        assert room.is_lent, "a frame is written into room that is the owner's again"
        assert room.key == data.key
        assert place + size_bytes <= base + room.size_bytes
        frame = (place - base) // FRAME_BYTES_MIN
        assert frame not in room.frames or self.world.may_rewrite, "a frame was written twice"
        room.frames[frame] = (data.key, data.frame)

    def act(self) -> None:
        while effects := [*self.giver.effects(), *self.taker.effects()]:
            for effect in effects:
                self._carry_out(effect)
        while (frame := self.giver.next_frame(())) is not None:
            begin, end = frame.size.frame_span(frame.frame)
            data = ParcelData(frame.size.key, frame.size.layout, frame.frame)
            self.world.send(self.name, frame.peer, data, end - begin)

    def _carry_out(self, effect: object) -> None:
        match effect:
            case Post(peer, message) | Answer(peer, message):
                self.world.send(self.name, peer, message)
            case TellSize(key, size_bytes, ask):
                old = self.wants[key]
                if old is not None:
                    old.is_lent = False
                room = self.wants[key] = Room(key, size_bytes)
                self.rooms[len(self.rooms) << 40] = room
                self.orders.append((key, room, ask))
            case CheckParcel(key):
                self._check(effect)
            case TellCame(key):
                room = self.wants.pop(key)
                assert room is not None
                self.came.append(key)
                self.unsettled.add(key)
                count = -(-room.size_bytes // FRAME_BYTES_MIN)
                assert room.frames == {frame: (key, frame) for frame in range(count)}
                room.is_lent = False
            case TellSettled(key):
                self.unsettled.discard(key)
            case TellTaken(key):
                assert self.offers.pop(key, None) is not None
                self.acked.append(key)
            case TellDeclined():
                pass  # said again of what was taken
            case TellFailed(key):
                room = self.wants.pop(key)
                if room is not None:
                    room.is_lent = False
                self.failed.append(key)

    def _check(self, effect: CheckParcel) -> None:
        if self.spoil:
            self.spoil -= 1
            self.taker.spoiled(effect.key, "damaged", self.world.now_ns)
        else:
            self.taker.checked(effect.key, self.world.now_ns)


class World:
    """Nodes and what is on its way between them."""

    def __init__(self, names: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.way: list[tuple[str, str, bytes, int]] = []
        self.loss = 0.0
        self.cut: set[tuple[str, str]] = set()
        """(from, to) over which nothing goes."""
        self.may_rewrite = False
        """Where a process begins anew, what its predecessor wrote is written again."""
        self.numbers = {name: number for number, name in enumerate(names)}
        self.nodes: dict[str, Owner] = {}
        for name in names:
            self.nodes[name] = Owner(self, name)

    def send(self, sender: str, target: str, message: ExchangeMessage, size: int = 0) -> None:
        assert len(self.way) < 20_000, "messages pile up"
        self.way.append((sender, target, encode_header(message), size))

    def deliver(self, place: int, *, is_kept: bool = False) -> None:
        """Deliver a message on its way; `is_kept`: it will come a second time."""
        sender, target, header, size = self.way[place] if is_kept else self.way.pop(place)
        if (sender, target) in self.cut:
            return
        frames = [header] + [b""] * {1: 5, 3: 1}.get(header[2] if len(header) > 2 else -1, 0)
        self.nodes[target].receive(sender, decode_message(frames), size)

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)
        for node in self.nodes.values():
            node.taker.tick(self.now_ns)
            node.act()

    def disturb(self) -> None:
        """Let one thing happen to what is on its way, or let time pass."""
        rng = self.rng
        for node in self.nodes.values():
            if rng.random() < 0.3:
                node.hear_order()
            if rng.random() < 0.3:
                node.go_on()
        if not self.way or rng.random() < 0.05:
            self.wait(rng.choice([0.01, 0.5, 3.5]))
            return
        place = rng.choice([0, rng.randrange(len(self.way))])
        chance = rng.random()
        if chance < self.loss:
            self.way.pop(place)
        else:
            self.deliver(place, is_kept=chance > 0.97)

    def settle(self) -> None:
        """Let a network without faults run until nothing is left to say."""
        self.cut.clear()
        for _ in range(200):
            while self.way or any(n.orders or n.incoming for n in self.nodes.values()):
                for node in self.nodes.values():
                    node.hear_order()
                    node.go_on()
                if self.way:
                    self.deliver(0)
            if not any(len(node.taker) for node in self.nodes.values()):
                return
            self.wait(1.0)
        raise AssertionError("parcels are still under way")
