"""Main of the exchange process: moves samples between this node's pools and those of other nodes.

The one process of a node with both payload and ZeroMQ: its own context, one socket that peers ask
and one for each peer that it asks, pools mapped for reading and writing. What is asked for, sent
again or refused is decided by `federation.core`; here bytes are gathered out of a pool into a frame,
and copied out of a received frame into the room that the daemon gave; where nothing is encrypted they
go over links of their own, without these copies (`data_links`). One thread, one loop.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections import deque
from typing import Any

import zmq

from federation.core.parcel_giver import (
    Answer,
    DataFrame,
    ParcelGiver,
    TellDeclined,
    TellTaken,
)
from federation.core.parcel_taker import (
    CheckParcel,
    FramePlace,
    ParcelTaker,
    Post,
    Room,
    TakerLimits,
    TellCame,
    TellFailed,
    TellSettled,
    TellSize,
)
from federation.core.peer_watch import PeerChanged, PeerForgot, PeerWatch, Reconnect, SendPing
from federation.exchange_messages import (
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
    decode_message,
    encode_header,
)
from federation.secure_sockets import CurveKeys
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import (
    ConfigError,
    InternalError,
    MsdError,
    ProtocolError,
    encode_error,
)
from msd_daemon.shm.fragment_columns import FragmentColumns
from msd_daemon.shm.parcel_layout import ParcelLayout
from msd_daemon.workers.data_links import TOKEN_BYTES, DataLinks, GivingLink
from msd_daemon.workers.exchange_orders import (
    ExchangeSetup,
    ExchangeStatistics,
    FromExchange,
    ToExchange,
    decode_order,
    encode_order,
)
from msd_daemon.workers.exchange_pool import ExchangePool, FieldShape, MediaShape
from msd_daemon.workers.exchange_sockets import (
    PeerSocket,
    answer_zap,
    bind_router,
    bind_zap,
    is_readable,
    zap_key,
)
from msd_daemon.workers.frame_buffers import FrameBuffers
from msd_daemon.workers.frame_link import FrameLink
from msd_daemon.workers.kept_memory import keep_memory

FRAMES_A_TURN = 4
"""Given to links before others are heard."""
MESSAGES_A_TURN = 8
"""Taken from one socket before the others are looked at: a data frame costs up to a millisecond."""
STARVED_MS = 2
"""Until buffers are looked for again where all are under way: nothing tells when one is let go."""
TICK_NS = 100_000_000
IDLE_NS = 1_000_000_000
KEPT_BYTES = 64 << 20
"""Of freed memory: what the frames of a window and their bookkeeping take, with room to spare."""
STATISTICS_NS = 1_000_000_000


def run(sock: socket.socket) -> None:
    """Serve one daemon link until it closes.

    Raises:
        LinkClosed: The daemon is gone or wants this process to leave.
    """
    link = FrameLink(sock)
    kind, body, _ = link.receive()
    assert kind == ToExchange.SETUP
    values = unpack_map(body)
    keep_memory(KEPT_BYTES)
    try:
        exchange = Exchange(link, sock.fileno(), ExchangeSetup(**values))
    except (zmq.ZMQError, OSError) as error:
        refusal = ConfigError(
            f"the exchange cannot listen on {values['listen']}: {error}; "
            "free the address or give another to federation.listen"
        )
        link.send(FromExchange.START_FAILED, pack(encode_error(refusal)))
        return
    exchange.serve()


class Exchange:
    """One process; borrows the pools of all jobs of the node."""

    def __init__(self, link: FrameLink, link_fd: int, setup: ExchangeSetup) -> None:
        self._link = link
        self._link_fd = link_fd
        self._node = setup.node
        self._keys = CurveKeys(setup.public_key, setup.secret_key) if setup.secret_key else None
        self._incarnation = int.from_bytes(os.urandom(8), "little") >> 1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(setup.io_threads)
        self._zap = bind_zap(self._context)
        self._router = bind_router(self._context, setup.listen, self._keys)
        self._peers: dict[str, PeerSocket] = {}
        self._asked: dict[Any, str] = {}
        """Peers by the sockets that ask them."""
        self._names: dict[bytes, str] = {}
        """Peers by their keys."""
        self._routes: dict[str, bytes] = {}
        """Where each peer's questions came from last."""
        self._fds: deque[int] = deque()
        self._pools: dict[str, ExchangePool] = {}
        self._layouts: dict[ParcelKey, ParcelLayout] = {}
        self._giver = ParcelGiver()
        self._taker = ParcelTaker(TakerLimits(window_bytes=setup.window_bytes))
        self._watch = PeerWatch()
        self._buffers = FrameBuffers(setup.frame_bytes)
        self._given_bytes = self._linked_bytes = 0
        self._is_starved = False
        """Frames wait for buffers."""
        self._refused_messages = 0
        self._told = ExchangeStatistics()
        self._told_ns = 0
        self._tick_ns = 0
        self._is_started = False
        self._poller = zmq.Poller()
        self._poller.register(link_fd, zmq.POLLIN)
        self._poller.register(self._zap, zmq.POLLIN)
        last = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        endpoint = last.rstrip(b"\0").decode("ascii")
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._data: DataLinks | None = None
        """None: data is encrypted, or goes over no TCP."""
        if self._keys is None and endpoint.startswith("tcp://"):
            self._data = DataLinks(self._poller, host, self)
        link.send(FromExchange.READY, encode_order(endpoint, os.getpid()))

    def serve(self) -> None:
        """Serve until the daemon's end closes."""
        while True:
            for ready, _ in self._poller.poll(self._timeout_ms()):
                if ready == self._link_fd:
                    self._hear_daemon()
                elif ready is self._router:
                    self._hear_consumers()
                elif ready is self._zap:
                    self._answer_zap()
                elif isinstance(ready, int):
                    assert self._data is not None
                    self._data.ready(ready)
                else:
                    name = self._asked.get(ready)
                    if name is not None:  # the daemon may just have removed it
                        self._hear_producer(name, self._peers[name])
            if time.monotonic_ns() >= self._tick_ns:
                self._tick()
            if self._giver.has_frames:
                self._give()
            self._act()

    def _timeout_ms(self) -> int:
        if self._is_starved:
            return STARVED_MS
        if self._giver.has_frames and not self._giver.all_busy(self._busy()):
            return 0
        return max(0, -(-(self._tick_ns - time.monotonic_ns()) // 1_000_000))

    def _hear_daemon(self) -> None:
        while self._link.pending():
            kind, body, fds = self._link.receive()
            # A descriptor may come with the frame before its own.
            self._fds.extend(fds)
            self._order(ToExchange(kind), body)

    # orders

    def _order(self, kind: ToExchange, body: bytes) -> None:
        values = decode_order(body)
        now = time.monotonic_ns()
        match kind:
            case ToExchange.WANT:
                self._want(*values)
            case ToExchange.OFFER:
                self._offer(*values)
            case ToExchange.ROOM:
                self._room(*values)
            case ToExchange.ACKNOWLEDGE:
                self._taker.acknowledge(values[0], now)
            case ToExchange.WITHDRAW:
                ticket, key = values
                self._taker.withdraw(key, now)
                self._giver.withdraw(key)
                self._forget_layout(key)
                self._link.send(FromExchange.DONE, encode_order(ticket))
            case ToExchange.DROP_GENERATION:
                self._drop_generation(*values)
            case _:
                self._rare_order(kind, values)
        self._act()

    def _rare_order(self, kind: ToExchange, values: list[Any]) -> None:
        match kind:
            case ToExchange.POOL:
                job, nbytes, fields, media = values
                shapes = [FieldShape(*row) for row in fields], [MediaShape(*row) for row in media]
                known = self._pools.get(job)
                self._let_go(job)
                self._pools[job] = ExchangePool(self._fds.popleft(), nbytes, *shapes)
                if known is not None:
                    known.close()
            case ToExchange.DROP_POOL:
                ticket, job = values
                self._drop_job(job)
                self._link.send(FromExchange.DONE, encode_order(ticket))
            case ToExchange.PEERS:
                self._set_peers(values)
            case ToExchange.START:
                self._is_started = True
                self._poller.register(self._router, zmq.POLLIN)
                if self._data is not None:
                    self._data.start()

    def _offer(self, key: ParcelKey, columns: bytes, has_units: bool) -> None:
        pool = self._pools.get(key.job)
        try:
            if pool is None:
                raise ConfigError(f"no pool of job {key.job!r} is known to the exchange")
            layout = pool.lay_out(FragmentColumns.decode(columns), has_units=has_units)
        except (MsdError, ValueError) as error:
            self._failed(key, error)
            self._giver.offer(Refused(key, code_of(error), f"node {self._node}: {error}"[:2000]))
            return
        self._forget_layout(key)
        self._layouts[key] = layout
        frame_bytes, incarnation = self._buffers.frame_bytes, self._incarnation
        self._giver.offer(
            ParcelSize(key, layout.size_bytes, frame_bytes, layout.digest, incarnation)
        )

    def _failed(self, key: ParcelKey, error: Exception) -> None:
        self._link.send(FromExchange.FAILED, encode_order(key, code_of(error), str(error)[:2000]))

    def _want(self, key: ParcelKey, *room: int) -> None:
        self._taker.want(key, time.monotonic_ns(), Room(*room) if room else None)

    def _room(self, key: ParcelKey, offset_bytes: int, size_bytes: int, ask: int) -> None:
        now = time.monotonic_ns()
        pool = self._pools.get(key.job)
        if pool is None or not pool.holds(offset_bytes, size_bytes):
            self._taker.withdraw(key, now)
            self._failed(
                key, InternalError(f"room at byte {offset_bytes} of job {key.job!r} is in no pool")
            )
            return
        self._taker.room(key, Room(offset_bytes, size_bytes), ask, now)

    def _drop_generation(self, ticket: int, job: str, generation: int) -> None:
        self._taker.drop_generation(job, generation, time.monotonic_ns())
        self._giver.drop_generation(job, generation)
        for key in list(self._layouts):
            if key.job == job and key.generation <= generation:
                self._forget_layout(key)
        self._link.send(FromExchange.DONE, encode_order(ticket))

    def _drop_job(self, job: str) -> None:
        for key in [*self._layouts, *self._taker.keys()]:
            if key.job == job:
                self._taker.withdraw(key, time.monotonic_ns())
                self._giver.withdraw(key)
                self._forget_layout(key)
        self._let_go(job)
        pool = self._pools.pop(job, None)
        if pool is not None:
            pool.close()

    def _forget_layout(self, key: ParcelKey) -> None:
        """Read nothing of a parcel's fragments any more."""
        if self._layouts.pop(key, None) is not None and self._data is not None:
            self._data.let_go(lambda it: it == key)

    def _let_go(self, job: str) -> None:
        """Read nothing of a pool any more."""
        if self._data is not None:
            self._data.let_go(lambda it: it.job == job)

    def _set_peers(self, rows: list[list[Any]]) -> None:
        wanted = {node: (endpoint, key) for node, endpoint, key in rows if node != self._node}
        for name, peer in list(self._peers.items()):
            if wanted.get(name) != (peer.endpoint, peer.public_key):
                self._watch.remove(name)
                self._disconnect(name)
        for name, (endpoint, key) in wanted.items():
            if name not in self._peers:
                self._connect(name, endpoint, key)
                self._watch.add(name, time.monotonic_ns())
        self._names = {key: name for name, (_, key) in wanted.items() if key}
        self._routes = {name: at for name, at in self._routes.items() if name in wanted}
        self._giver.keep_peers(wanted)
        if self._data is not None:
            self._data.keep_peers(wanted)
        self._tick_ns = 0
        self._buffers.allow_peers(len(wanted))

    def _connect(self, name: str, endpoint: str, key: bytes | None) -> None:
        try:
            peer = PeerSocket(self._context, endpoint, key, self._keys)
        except zmq.ZMQError as error:
            reason = f"its endpoint {endpoint!r} cannot be used: {error}"
            self._link.send(FromExchange.PEER, encode_order(name, False, reason))
            return
        self._peers[name] = peer
        self._asked[peer.sock] = name
        self._poller.register(peer.sock, zmq.POLLIN)

    def _disconnect(self, name: str) -> None:
        peer = self._peers.pop(name)
        del self._asked[peer.sock]
        self._poller.unregister(peer.sock)
        peer.close()

    # what peers say

    def _answer_zap(self) -> None:
        frames = self._zap.recv_multipart()
        key = zap_key(frames)
        self._zap.send_multipart(answer_zap(frames, key in self._names))

    def _hear_consumers(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            if not is_readable(self._router):
                return
            route, *frames = self._router.recv_multipart(copy=False)
            try:
                message = decode_message([frame.buffer for frame in frames])
                self._heard_consumer(self._name_of(frames[0], message), route.bytes, message)
            except MsdError:
                self._refused_messages += 1

    def _name_of(self, frame: zmq.Frame, message: ExchangeMessage) -> str:
        """Return which peer sent a question: the owner of the key that the link was made with.

        Raises:
            ProtocolError: Nobody that is known, or it speaks for another.
        """
        claimed = message.node if isinstance(message, (Ping, Pong)) else message.key.consumer
        name: str | None = claimed
        if self._keys is not None:
            name = self._names.get(str(frame["User-Id"]).encode())
        if name != claimed or name not in self._peers:
            raise ProtocolError(f"{name!r} speaks for {claimed!r}")
        return name

    def _heard_consumer(self, name: str, route: bytes, message: ExchangeMessage) -> None:
        self._routes[name] = route
        if isinstance(message, Ping):
            self._answer(name, self._pong(name, message.number))
            return
        if not isinstance(message, Want | Pull | Taken) or message.key.producer != self._node:
            raise ProtocolError(f"{name!r} sent a {type(message).__name__} to {self._node!r}")
        match message:
            case Want():
                self._giver.want_came(message)
            case Pull():
                self._giver.pull_came(message)
            case Taken():
                self._giver.taken_came(message)

    def _pong(self, name: str, number: int) -> Pong:
        if self._data is None:
            return Pong(self._node, number, self._incarnation)
        token = self._data.token_of(name).hex()
        return Pong(self._node, number, self._incarnation, self._data.port, token)

    def _hear_producer(self, name: str, peer: PeerSocket) -> None:
        now = time.monotonic_ns()
        for _ in range(MESSAGES_A_TURN):
            if not is_readable(peer.sock):
                return
            frames = peer.sock.recv_multipart(copy=False)
            try:
                message = decode_message([frame.buffer for frame in frames])
                self._heard_producer(name, message, frames, now)
            except MsdError:
                self._refused_messages += 1

    def _heard_producer(
        self, name: str, message: ExchangeMessage, frames: list[zmq.Frame], now: int
    ) -> None:
        if isinstance(message, Pong):
            if message.node != name:
                raise ProtocolError(f"{name!r} says that it is {message.node!r}")
            self._watch.pong(name, message.giver, now)
            if self._data is not None and message.data_port:
                self._link_to(name, message, frames[0])
            return
        if isinstance(message, Ping) or message.key[3:] != (name, self._node):
            raise ProtocolError(f"{name!r} sent a {type(message).__name__} that is not its own")
        self._watch.heard(name, now)
        match message:
            case ParcelData():
                data = frames[1].buffer
                place = self._taker.data_came(name, message, len(data), now)
                if place is not None:
                    self._pools[message.key.job].write(place, data)
            case ParcelSize():
                rest = [frame.buffer for frame in frames[1:]]
                table = ParcelTable.decode(rest, message.size_bytes)
                self._taker.size_came(message, table, now)
            case TakenNoted():
                self._taker.noted(message)
            case Refused():
                self._taker.refused(message, now)
            case _:
                raise ProtocolError(f"{name!r} sent a {type(message).__name__} as an answer")
        self._act()

    def _link_to(self, name: str, pong: Pong, frame: zmq.Frame) -> None:
        assert self._data is not None
        try:
            host = str(frame["Peer-Address"])
        except zmq.ZMQError:  # it came over no TCP
            return
        try:
            token = bytes.fromhex(pong.data_token)
        except ValueError:
            token = b""
        if len(token) != TOKEN_BYTES or pong.data_port >= 1 << 16:
            raise ProtocolError(f"{name!r} offers data at port {pong.data_port} in a wrong way")
        self._data.connect(name, host, pong.data_port, token)

    # what links bring (DataOwner)

    def frame_place(self, peer: str, data: ParcelData, size_bytes: int) -> FramePlace | None:
        """See DataOwner."""
        if data.key[3:] != (peer, self._node) or data.key.job not in self._pools:
            return None
        return self._taker.frame_place(data, size_bytes)

    def frame_room(self, data: ParcelData, place: FramePlace, size_bytes: int) -> memoryview:
        """See DataOwner."""
        return self._pools[data.key.job].room(place.offset_bytes, size_bytes)

    def frame_came(self, peer: str, data: ParcelData, size_bytes: int, *, is_whole: bool) -> None:
        """See DataOwner."""
        now = time.monotonic_ns()
        self._watch.heard(peer, now)
        if is_whole:
            self._taker.data_came(peer, data, size_bytes, now)
        else:
            self._taker.frame_spoiled(peer, data, now)
        self._act()

    def link_lost(self, peer: str) -> None:
        """See DataOwner."""
        self._taker.link_lost(peer, time.monotonic_ns())

    # what is done

    def _tick(self) -> None:
        """See to all that is waited for; nothing is waited for less than a second."""
        now = time.monotonic_ns()
        for name, peer in list(self._peers.items()):
            for event in peer.events():
                if event.is_up:
                    self._watch.linked(name, now)
                else:
                    self._watch.unlinked(name, event.reason)
        self._taker.tick(now)
        self._watch.tick(now)
        if self._data is not None:
            self._data.tick(now)
        self._tick_ns = now + (TICK_NS if self._peers else IDLE_NS)
        if now - self._told_ns >= STATISTICS_NS:
            self._told_ns = now
            statistics = self._statistics()
            if statistics != self._told:
                self._told = statistics
                self._link.send(FromExchange.STATISTICS, pack(dataclasses.asdict(statistics)))

    def _give(self) -> None:
        """Send data frames while links and buffers are free."""
        self._is_starved = False
        linked, busy = 0, self._busy()
        while linked < FRAMES_A_TURN and (frame := self._giver.next_frame(busy)) is not None:
            link = None if self._data is None else self._data.giving(frame.peer)
            if link is not None:
                linked += 1
                self._send_linked(frame, link)
                if link.is_busy:
                    busy.add(frame.peer)
                continue
            buffer = self._buffers.take()
            if buffer is None:
                self._giver.put_back(frame)
                self._is_starved = True
                return
            self._send_frame(frame, buffer)
            busy |= self._buffers.busy()
        self._is_starved = self._giver.has_frames and bool(self._buffers.busy())

    def _busy(self) -> set[str]:
        """Return the consumers that take no frame now."""
        busy = self._buffers.busy()
        return busy if self._data is None else busy | self._data.busy()

    def _send_linked(self, frame: DataFrame, link: GivingLink) -> None:
        assert self._data is not None
        size = frame.size
        begin, end = size.frame_span(frame.frame)
        source = self._pools[size.key.job].frame(self._layouts[size.key], begin, end)
        if self._data.give(link, ParcelData(size.key, size.layout, frame.frame), source):
            self._given_bytes += end - begin
            self._linked_bytes += end - begin

    def _send_frame(self, frame: DataFrame, buffer: memoryview) -> None:
        size = frame.size
        begin, end = size.frame_span(frame.frame)
        out = buffer[: end - begin]
        pool = self._pools[size.key.job]
        pool.gather(self._layouts[size.key], begin, out)
        header = encode_header(ParcelData(size.key, size.layout, frame.frame))
        route = self._routes.get(frame.peer)
        try:
            if route is None:
                raise zmq.Again
            self._router.send_multipart([route, header], zmq.NOBLOCK | zmq.SNDMORE)
            tracker = self._router.send(out, copy=False, track=True)
        except zmq.ZMQError:  # it is gone, or does not read: it asks again
            self._buffers.give_back(buffer)
            return
        self._given_bytes += len(out)
        self._buffers.sent(frame.peer, buffer, tracker)

    def _act(self) -> None:
        """Carry out what the state machines decided, until nothing is left."""
        while True:
            effects = [*self._watch.effects(), *self._giver.effects(), *self._taker.effects()]
            if not effects:
                return
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: object) -> None:
        match effect:
            case Post(peer, message):
                self._post(peer, message)
            case Answer(peer, message):
                self._answer(peer, message)
            case CheckParcel():
                self._check(effect)
            case SendPing(peer, number):
                self._post(peer, Ping(self._node, number))
            case PeerForgot(peer):
                self._taker.peer_restarted(peer, time.monotonic_ns())
            case Reconnect(peer):
                known = self._peers[peer]
                if self._data is not None:
                    self._data.disconnect(peer)
                self._disconnect(peer)
                self._connect(peer, known.endpoint, known.public_key)
            case _:
                self._tell_owner(effect)

    def _tell_owner(self, effect: object) -> None:
        match effect:
            case TellSize(key, size_bytes, ask):
                self._link.send(FromExchange.SIZE, encode_order(key, size_bytes, ask))
            case TellCame(key, offset_bytes, table):
                body = encode_order(key, offset_bytes, table.encode())
                self._link.send(FromExchange.CAME, body)
            case TellSettled(key):
                self._link.send(FromExchange.SETTLED, encode_order(key))
            case TellTaken(key):
                self._forget_layout(key)
                self._link.send(FromExchange.TAKEN, encode_order(key))
            case TellDeclined(key):
                self._link.send(FromExchange.DECLINED, encode_order(key))
            case TellFailed(key, code, reason):
                self._link.send(FromExchange.FAILED, encode_order(key, code, reason))
            case PeerChanged(peer, is_up, reason):
                self._link.send(FromExchange.PEER, encode_order(peer, is_up, reason))
            case _:
                raise InternalError(f"an effect that nobody carries out: {effect!r}")

    def _check(self, effect: CheckParcel) -> None:
        now = time.monotonic_ns()
        key = effect.key
        try:
            self._pools[key.job].check(effect.offset_bytes, effect.size.size_bytes, effect.table)
        except (MsdError, ValueError) as error:
            self._taker.spoiled(key, f"node {key.producer} gave a damaged parcel: {error}", now)
            return
        self._taker.checked(key, now)

    def _post(self, name: str, message: ExchangeMessage) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            try:
                peer.sock.send(encode_header(message), zmq.NOBLOCK)
            except zmq.ZMQError:  # no link stands: it is said again once one does
                return

    def _answer(self, name: str, message: ExchangeMessage) -> None:
        route = self._routes.get(name)
        if route is None:
            return
        frames: list[Any] = [route, encode_header(message)]
        if isinstance(message, ParcelSize):
            layout = self._layouts.get(message.key)
            if layout is None:
                return
            frames += layout.table.encode()
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            self._routes.pop(name, None)

    def _statistics(self) -> ExchangeStatistics:
        taken, given = self._taker.counts, self._giver.counts
        return ExchangeStatistics(
            given_bytes=self._given_bytes,
            linked_bytes=self._linked_bytes,
            given_parcels=given.taken_parcels,
            taken_bytes=taken.taken_bytes,
            taken_parcels=taken.taken_parcels,
            offered_count=len(self._giver),
            wanted_count=len(self._taker),
            lost_frames=taken.lost_frames,
            late_frames=taken.late_frames,
            spoiled_parcels=taken.spoiled_parcels,
            refused_messages=self._refused_messages,
            up_count=len(self._watch.up()),
        )


def code_of(error: Exception) -> str:
    """Return the code that an error crosses the wire with."""
    return error.code if isinstance(error, MsdError) else InternalError.code
