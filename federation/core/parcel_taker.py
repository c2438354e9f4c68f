"""The consumer's half of the exchange: asks peers for parcels and says where their bytes go.

wanted -> sized (its owner is told) -> filling (room was given) -> whole -> taken (peer is told) ->
settled. The peers lose, repeat and reorder messages, and forget everything when they restart: each
request is repeated until its answer is here, each answer is accepted once. Bytes on the way are
bounded by a window over all peers; the lowest step is asked for first. Pure: times are arguments.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from federation.exchange_messages import (
    PULLED_FRAMES_MAX,
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
)
from msd_client.contract.errors import ChunkCorruptError, InternalError

SPOILED_MAX = 3
"""Times that a parcel may come damaged before its owner hears of it."""


@dataclass(frozen=True)
class TakerLimits:
    """Times are nanoseconds."""

    window_bytes: int = 16 << 20
    """Data frames that were asked for and are not here, of all peers together."""
    again_ns: int = 1_000_000_000
    """A request is repeated after this, then after twice as long, and so on."""
    again_ns_max: int = 8_000_000_000
    silence_ns: int = 3_000_000_000
    """Frames count as lost where their peer sent no frame for so long."""


class Post(NamedTuple):
    """Effect: send a message to a peer."""

    peer: str
    message: ExchangeMessage


class TellSize(NamedTuple):
    """Effect: the owner is to give room."""

    key: ParcelKey
    size_bytes: int
    ask: int
    """Number of this question; the room names it."""


class CheckParcel(NamedTuple):
    """Effect: all bytes are in their room; answer with `checked` or `spoiled`."""

    key: ParcelKey
    offset_bytes: int
    size: ParcelSize
    table: ParcelTable


class TellCame(NamedTuple):
    """Effect: the owner has the parcel."""

    key: ParcelKey
    offset_bytes: int
    table: ParcelTable


class TellSettled(NamedTuple):
    """Effect: the producer knows that it came; nothing is left to do."""

    key: ParcelKey


class TellFailed(NamedTuple):
    """Effect: the parcel cannot be had."""

    key: ParcelKey
    code: str
    reason: str


class Room(NamedTuple):
    """A piece of the job's pool."""

    offset_bytes: int
    size_bytes: int


class FramePlace(NamedTuple):
    """Where a data frame belongs. Equal only while one and the same wish has one and the same room."""

    offset_bytes: int
    """In the job's pool."""
    wish: int
    ask: int


TakerEffect = Post | TellSize | CheckParcel | TellCame | TellSettled | TellFailed


class Phase(Enum):
    """Where a parcel stands."""

    WANTED = 1
    SIZED = 2
    FILLING = 3
    WHOLE = 4
    TAKEN = 5


@dataclass(eq=False)
class _Taking:
    key: ParcelKey
    phase: Phase = Phase.WANTED
    wish: int = 0
    """Its number: a parcel may be wanted again after it was withdrawn."""
    due_ns: int = 0
    """When its request is repeated; of WANTED and TAKEN."""
    wait_ns: int = 0
    size: ParcelSize | None = None
    table: ParcelTable | None = None
    room: Room | None = None
    ask: int = -1
    """Number of the question for room that was put last."""
    is_here: bytearray = field(default_factory=bytearray)
    left: int = 0
    """Frames that are not here."""
    next_frame: int = 0
    """First that was never asked for."""
    again: deque[int] = field(default_factory=deque)
    """Frames to be asked for again."""
    spoiled: int = 0

    @property
    def has_unasked(self) -> bool:
        return self.phase is Phase.FILLING and (
            bool(self.again) or self.next_frame < len(self.is_here)
        )


_Frame = tuple[ParcelKey, int, int]
"""(key, layout, frame)."""


@dataclass(eq=False)
class _Peer:
    on_the_way: OrderedDict[_Frame, int] = field(default_factory=OrderedDict)
    """Frames that were asked for, in that order, and their bytes."""
    heard_ns: int = 0
    """When a frame came last, or the first of these was asked for."""
    wait_ns: int = 0


@dataclass
class TakerCounts:
    """Totals since the process began."""

    taken_bytes: int = 0
    taken_parcels: int = 0
    late_frames: int = 0
    """Came twice, or for a parcel that nobody wants any more."""
    lost_frames: int = 0
    """Were asked for again."""
    spoiled_parcels: int = 0


class ParcelTaker:
    """All parcels that this node takes. Feed it, then drain `effects()`.

    Args:
        limits: Window and times.
    """

    def __init__(self, limits: TakerLimits | None = None) -> None:
        self._limits = limits or TakerLimits()
        self._takings: dict[ParcelKey, _Taking] = {}
        self._filling: list[tuple[int, ParcelKey]] = []
        """(step, key) of those with frames to ask for, ascending."""
        self._peers: dict[str, _Peer] = {}
        self._window_bytes = 0
        self._fences: dict[str, int] = {}
        self._asks = self._wishes = 0
        self._effects: list[TakerEffect] = []
        self.counts = TakerCounts()

    def __len__(self) -> int:
        return len(self._takings)

    @property
    def on_the_way_bytes(self) -> int:
        """Data that was asked for and is not here."""
        return self._window_bytes

    def keys(self) -> list[ParcelKey]:
        """Return all parcels that are asked for or not settled."""
        return list(self._takings)

    def effects(self) -> list[TakerEffect]:
        """Return what is to be done since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    # what the owner says

    def want(self, key: ParcelKey, now_ns: int, room: Room | None = None) -> None:
        """Begin to ask for a parcel; one that is known, or of a dropped generation, is passed over.

        Args:
            key: Of the parcel.
            now_ns: The time.
            room: What an earlier process was given for it.
        """
        if key in self._takings or self._is_fenced(key):
            return
        self._wishes += 1
        taking = self._takings[key] = _Taking(key, wish=self._wishes, room=room)
        self._ask(taking, now_ns)

    def room(self, key: ParcelKey, room: Room, ask: int, now_ns: int) -> None:
        """Take the room that the owner gives a parcel, in answer to the question `ask`.

        An answer to an older question is passed over: that room is the owner's again.
        """
        taking = self._takings.get(key)
        if taking is None or taking.phase is not Phase.SIZED or taking.ask != ask:
            return
        assert taking.size is not None
        if room.size_bytes < taking.size.size_bytes:
            self._forget(key)
            reason = f"room of {room.size_bytes} bytes for {taking.size.size_bytes}"
            self._effects.append(TellFailed(key, InternalError.code, reason))
            return
        taking.room = room
        self._begin_filling(taking)
        self._pull(now_ns)

    def acknowledge(self, key: ParcelKey, now_ns: int) -> None:
        """Say that a parcel came, until its producer knows: an earlier process took it."""
        if key not in self._takings and not self._is_fenced(key):
            taking = self._takings[key] = _Taking(key, Phase.TAKEN)
            self._ask(taking, now_ns)

    def withdraw(self, key: ParcelKey, now_ns: int) -> None:
        """Forget a parcel: nothing is written into its room any more."""
        if key in self._takings:
            self._forget(key)
            self._pull(now_ns)

    def drop_generation(self, job: str, generation: int, now_ns: int) -> None:
        """Forget all parcels of a job up to a generation, and refuse late ones."""
        self._fences[job] = max(generation, self._fences.get(job, generation))
        for key in [key for key in self._takings if self._is_fenced(key)]:
            self._forget(key)
        self._pull(now_ns)

    def _is_fenced(self, key: ParcelKey) -> bool:
        return key.generation <= self._fences.get(key.job, -1)

    # what a peer says; the caller has checked that it is the key's producer

    def size_came(self, size: ParcelSize, table: ParcelTable, now_ns: int) -> None:
        """Take a parcel's size and table."""
        taking = self._takings.get(size.key)
        if taking is None or taking.phase in (Phase.WHOLE, Phase.TAKEN):
            return
        known = taking.size
        if known is not None and known.layout == size.layout:
            if known.giver != size.giver:  # another process: it has forgotten what it was asked for
                taking.size = size
                self._lose_key(taking)
                self._pull(now_ns)
            return
        self._leave_filling(taking)
        taking.phase = Phase.SIZED
        self._lose_key(taking)
        taking.size, taking.table = size, table
        if taking.room is not None and taking.room.size_bytes >= size.size_bytes:
            self._begin_filling(taking)
            self._pull(now_ns)
            return
        taking.room = None
        self._asks += 1
        taking.ask = self._asks
        self._effects.append(TellSize(size.key, size.size_bytes, taking.ask))

    def data_came(self, peer: str, data: ParcelData, size_bytes: int, now_ns: int) -> int | None:
        """Take a data frame of `size_bytes` bytes; return where in the pool it belongs, or None.

        The caller copies it there before it drains the effects. None: it is late or no part of what
        was asked for, and must not be written anywhere.
        """
        frame = (data.key, data.layout, data.frame)
        self._arrived(peer, frame, now_ns)
        taking = self._takings.get(data.key)
        place = None if taking is None else self._place(taking, data, size_bytes)
        if taking is None or place is None:
            self.counts.late_frames += 1
        else:
            taking.is_here[data.frame] = 1
            taking.left -= 1
            self.counts.taken_bytes += size_bytes
            if not taking.left:
                assert taking.size is not None and taking.table is not None and taking.room
                self._leave_filling(taking)
                taking.phase = Phase.WHOLE
                self._effects.append(
                    CheckParcel(taking.key, taking.room.offset_bytes, taking.size, taking.table)
                )
        self._pull(now_ns)
        return place

    def frame_place(self, data: ParcelData, size_bytes: int) -> FramePlace | None:
        """Return where a data frame belongs that is on its way in; None: it is not wanted.

        Who receives it piece by piece asks before each: what was written under another place than the
        last is nothing, and the frame is `frame_spoiled`.
        """
        taking = self._takings.get(data.key)
        place = None if taking is None else self._place(taking, data, size_bytes)
        if taking is None or place is None:
            return None
        return FramePlace(place, taking.wish, taking.ask)

    def frame_spoiled(self, peer: str, data: ParcelData, now_ns: int) -> None:
        """A data frame came to its end, and not all of it was written where it belongs (now)."""
        frame = (data.key, data.layout, data.frame)
        was_asked = peer in self._peers and frame in self._peers[peer].on_the_way
        self._arrived(peer, frame, now_ns)
        self.counts.late_frames += 1
        if was_asked:
            self._lose(frame)
        self._pull(now_ns)

    def link_lost(self, peer: str, now_ns: int) -> None:
        """What a peer was asked for and has not sent may not come: ask for it again."""
        self._lose_peer(peer)
        self._pull(now_ns)

    def _place(self, taking: _Taking, data: ParcelData, size_bytes: int) -> int | None:
        size, room = taking.size, taking.room
        if size is None or room is None:
            return None
        if data.layout != size.layout or data.frame >= len(taking.is_here):
            return None
        begin, end = size.frame_span(data.frame)
        if end - begin != size_bytes or taking.is_here[data.frame]:
            return None
        return room.offset_bytes + begin

    def checked(self, key: ParcelKey, now_ns: int) -> None:
        """The bytes of a parcel are sound: it is the owner's, and the producer may forget it."""
        taking = self._takings.get(key)
        if taking is None or taking.phase is not Phase.WHOLE:
            return
        assert taking.table is not None and taking.room is not None
        self.counts.taken_parcels += 1
        self._effects.append(TellCame(key, taking.room.offset_bytes, taking.table))
        taking.phase, taking.table, taking.size = Phase.TAKEN, None, None
        taking.is_here = bytearray()
        self._ask(taking, now_ns)

    def spoiled(self, key: ParcelKey, reason: str, now_ns: int) -> None:
        """The bytes are no parcel: ask anew, a few times."""
        taking = self._takings.get(key)
        if taking is None or taking.phase is not Phase.WHOLE:
            return
        self.counts.spoiled_parcels += 1
        taking.spoiled += 1
        if taking.spoiled >= SPOILED_MAX:
            self._forget(key)
            self._effects.append(TellFailed(key, ChunkCorruptError.code, reason))
            return
        taking.phase, taking.size, taking.table = Phase.WANTED, None, None
        self._ask(taking, now_ns)

    def noted(self, message: TakenNoted) -> None:
        """The producer knows that a parcel came."""
        taking = self._takings.get(message.key)
        if taking is not None and taking.phase is Phase.TAKEN:
            del self._takings[message.key]
            self._effects.append(TellSettled(message.key))

    def refused(self, message: Refused, now_ns: int) -> None:
        """The producer cannot give a parcel."""
        taking = self._takings.get(message.key)
        if taking is not None and taking.phase not in (Phase.WHOLE, Phase.TAKEN):
            self._forget(message.key)
            self._effects.append(TellFailed(message.key, message.code, message.reason))
            self._pull(now_ns)

    def peer_restarted(self, peer: str, now_ns: int) -> None:
        """Ask a peer again for everything: it knows nothing of what it was asked for."""
        self._lose_peer(peer)
        for taking in self._takings.values():
            if taking.key.producer == peer and taking.phase in (Phase.WANTED, Phase.TAKEN):
                taking.wait_ns = 0
                self._ask(taking, now_ns)
        self._pull(now_ns)

    # time

    def tick(self, now_ns: int) -> None:
        """Repeat what has had no answer for too long."""
        for taking in self._takings.values():
            if taking.phase in (Phase.WANTED, Phase.TAKEN) and now_ns >= taking.due_ns:
                self._ask(taking, now_ns)
        for name, peer in self._peers.items():
            if peer.on_the_way and now_ns >= peer.heard_ns + peer.wait_ns:
                self._lose_peer(name)
                peer.heard_ns = now_ns
                peer.wait_ns = min(2 * peer.wait_ns, self._limits.again_ns_max)
        self._pull(now_ns)

    def due_ns(self) -> int | None:
        """Return when `tick` has something to do; None where nothing is waited for."""
        dues = [
            taking.due_ns
            for taking in self._takings.values()
            if taking.phase in (Phase.WANTED, Phase.TAKEN)
        ]
        dues += [peer.heard_ns + peer.wait_ns for peer in self._peers.values() if peer.on_the_way]
        return min(dues, default=None)

    def _ask(self, taking: _Taking, now_ns: int) -> None:
        taking.wait_ns = min(2 * taking.wait_ns, self._limits.again_ns_max) or self._limits.again_ns
        taking.due_ns = now_ns + taking.wait_ns
        kind = Taken if taking.phase is Phase.TAKEN else Want
        self._effects.append(Post(taking.key.producer, kind(taking.key)))

    # frames on their way

    def _begin_filling(self, taking: _Taking) -> None:
        assert taking.size is not None
        taking.phase = Phase.FILLING
        taking.left = taking.size.frames_count
        taking.is_here = bytearray(taking.left)
        taking.next_frame = 0
        taking.again.clear()
        bisect.insort(self._filling, (taking.key.step, taking.key))

    def _leave_filling(self, taking: _Taking) -> None:
        place = bisect.bisect_left(self._filling, (taking.key.step, taking.key))
        if place < len(self._filling) and self._filling[place][1] == taking.key:
            del self._filling[place]

    def _pull(self, now_ns: int) -> None:
        """Ask for frames while the window has room, half a window at a time, lowest step first."""
        room = self._limits.window_bytes - self._window_bytes
        if room <= 0 or (self._window_bytes and room < self._limits.window_bytes // 2):
            return
        while room > 0 and self._filling:
            taking = self._takings[self._filling[0][1]]
            assert taking.size is not None
            frames: list[int] = []
            while room > 0 and taking.has_unasked and len(frames) < PULLED_FRAMES_MAX:
                frame = taking.again.popleft() if taking.again else taking.next_frame
                if frame == taking.next_frame:
                    taking.next_frame += 1
                if taking.is_here[frame]:
                    continue
                frames.append(frame)
                room -= self._sent_for(taking.size, frame, now_ns)
            if not taking.has_unasked:
                del self._filling[0]
            if frames:
                message = Pull(taking.key, taking.size.layout, tuple(frames))
                self._effects.append(Post(taking.key.producer, message))

    def _sent_for(self, size: ParcelSize, frame: int, now_ns: int) -> int:
        begin, end = size.frame_span(frame)
        peer = self._peers.setdefault(size.key.producer, _Peer())
        if not peer.on_the_way:
            peer.heard_ns = now_ns
            peer.wait_ns = peer.wait_ns or self._limits.silence_ns
        asked = (size.key, size.layout, frame)
        assert asked not in peer.on_the_way, "a frame is asked for twice at once"
        self._window_bytes += end - begin
        peer.on_the_way[asked] = end - begin
        return end - begin

    def _arrived(self, name: str, frame: _Frame, now_ns: int) -> None:
        """Take a frame off the way, and those that were asked for before it: they were lost."""
        peer = self._peers.get(name)
        if peer is None:
            return
        peer.heard_ns, peer.wait_ns = now_ns, self._limits.silence_ns
        if frame not in peer.on_the_way:
            return
        while True:
            other, size_bytes = peer.on_the_way.popitem(last=False)
            self._window_bytes -= size_bytes
            if other == frame:
                return
            self._lose(other)

    def _lose(self, frame: _Frame) -> None:
        key, layout, number = frame
        taking = self._takings.get(key)
        if taking is None or taking.phase is not Phase.FILLING:
            return
        if taking.size is None or taking.size.layout != layout or taking.is_here[number]:
            return
        self.counts.lost_frames += 1
        if not taking.has_unasked:
            bisect.insort(self._filling, (key.step, key))
        taking.again.append(number)

    def _lose_peer(self, name: str) -> None:
        peer = self._peers.get(name)
        while peer is not None and peer.on_the_way:
            frame, size_bytes = peer.on_the_way.popitem(last=False)
            self._window_bytes -= size_bytes
            self._lose(frame)

    def _lose_key(self, taking: _Taking) -> None:
        peer = self._peers.get(taking.key.producer)
        if peer is None:
            return
        for frame in [frame for frame in peer.on_the_way if frame[0] == taking.key]:
            self._window_bytes -= peer.on_the_way.pop(frame)
            self._lose(frame)

    def _forget(self, key: ParcelKey) -> None:
        """Forget a parcel; its frames stay on their way until they are here or lost."""
        self._leave_filling(self._takings.pop(key))
