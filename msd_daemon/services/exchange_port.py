"""The daemon's end of the exchange: what its process is told, what it says, and its restarts.

The process may die at any time. Whatever it was told is kept here and told to the next one, so its
owner hears of a loss but need not act on it: a parcel that came stays here, one on its way is asked
for again and goes into the room that it was given.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from federation.exchange_messages import ParcelKey, ParcelTable
from federation.secure_sockets import CurveKeys
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import (
    ExchangeUnavailableError,
    ForkServerLostError,
    MsdError,
    decode_error,
)
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.link import ChildLink
from msd_daemon.shm.field_layout import FieldRow
from msd_daemon.shm.fragment_columns import FragmentColumns
from msd_daemon.shm.media_layout import MediaRow
from msd_daemon.shm.segment import Segment
from msd_daemon.workers.exchange_orders import (
    ExchangeSetup,
    ExchangeStatistics,
    FromExchange,
    ToExchange,
    decode_order,
    encode_order,
)

__all__ = [
    "CurveKeys",
    "ExchangeEvents",
    "ExchangePort",
    "ExchangeStatistics",
    "FragmentColumns",
    "ParcelKey",
    "ParcelPart",
    "PeerAddress",
]

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
RESTART_S = 0.05
"""Before the first restart; after each that does not last, twice as long."""
RESTART_S_MAX = 5.0
LASTING_S = 30.0
FRAME_BYTES = 4 << 20
"""Of a data frame: the size that costs least, measured by `bench federation`."""
WINDOW_BYTES = 16 << 20


class PeerAddress(NamedTuple):
    """Where another node's exchange is."""

    endpoint: str
    """As ZeroMQ takes it: tcp://host:port."""
    public_key: bytes | None
    """Z85; None where the cluster has no keys."""


@dataclass(frozen=True, eq=False)
class ParcelPart:
    """A chunk of a parcel that came: record n of it is fragment n of these columns."""

    source: int
    offset_bytes: int
    """Where the chunk begins in the pool."""
    used_bytes: int
    block_key: npt.NDArray[np.int64]
    index: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int32]
    """First token of the fragment in its record. Shape (records,), as of all columns."""
    length: npt.NDArray[np.int32]


class ExchangeEvents(Protocol):
    """What the port tells its owner. None of these may block."""

    def parcel_size(self, key: ParcelKey, size_bytes: int) -> None:
        """A wanted parcel is there: give it `room`.

        Told again where its size changed: the room given before is the owner's again.
        """

    def parcel_came(self, key: ParcelKey, parts: list[ParcelPart]) -> None:
        """All of a parcel lies in its room; nothing writes there any more."""

    def parcel_acked(self, key: ParcelKey) -> None:
        """The consumer has an offered parcel: its fragments are not read any more."""

    def parcel_declined(self, key: ParcelKey) -> None:
        """The consumer needs nothing of a parcel that is not offered: it need not be, later.

        Told again where the consumer repeats itself, before or after `parcel_acked`.
        """

    def parcel_failed(self, key: ParcelKey, error: MsdError) -> None:
        """A parcel cannot be given or had; it is forgotten, and its room is the owner's again."""

    def peer_changed(self, peer: str, is_up: bool, reason: str) -> None:
        """A peer answers, or no longer."""

    def exchange_lost(self) -> None:
        """The process ended; another one is on its way and will be told all."""


@dataclass(frozen=True)
class _Pool:
    segment: Segment
    order: bytes


@dataclass
class _Want:
    room: tuple[int, int] | None = None
    ask: int | None = None
    """Number of the question for room that is to be answered."""


@dataclass
class _Known:
    """What a new process is told."""

    pools: dict[str, _Pool] = field(default_factory=dict)
    peers: dict[str, PeerAddress] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    offers: dict[ParcelKey, tuple[bytes, bool]] = field(default_factory=dict)
    """Encoded columns, and whether units go with them."""
    wants: dict[ParcelKey, _Want] = field(default_factory=dict)
    unsettled: set[ParcelKey] = field(default_factory=set)
    """Parcels that came, and whose producers may not know."""

    def forget(self, key: ParcelKey) -> None:
        self.offers.pop(key, None)
        self.wants.pop(key, None)
        self.unsettled.discard(key)

    def parcels(self) -> list[ParcelKey]:
        return [*self.offers, *self.wants, *self.unsettled]


class ExchangePort:
    """Owns the process and the link to it.

    Args:
        forks: The daemon's fork server; its owner hands children's ends to `child_ended`.
        events: The owner.
        node: This node's name in the cluster.
        listen: Endpoint to bind, as ZeroMQ takes it; with port 0 any free one.
        keys: This node's; None: the wire is neither encrypted nor are peers known for sure, which
            the caller allows on loopback alone.
        frame_bytes: Of a data frame, 64 KiB to 16 MiB.
        window_bytes: Data that may be on its way here at once.
    """

    def __init__(
        self,
        forks: ForkClient,
        events: ExchangeEvents,
        *,
        node: str,
        listen: str,
        keys: CurveKeys | None = None,
        frame_bytes: int = FRAME_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._forks = forks
        self._events = events
        self._setup = ExchangeSetup(
            node=node,
            listen=listen,
            public_key=b"" if keys is None else keys.public,
            secret_key=b"" if keys is None else keys.secret,
            frame_bytes=frame_bytes,
            window_bytes=window_bytes,
            io_threads=1 if keys is None else 2,
        )
        self._known = _Known()
        self._tickets: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._link: ChildLink | None = None
        self._ready: asyncio.Future[str] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._restart_s = RESTART_S
        self._started_s = 0.0
        self._endpoint = ""
        self._statistics = ExchangeStatistics()
        self._is_closed = False

    @property
    def endpoint(self) -> str:
        """Bound endpoint with its port; it stays over restarts. Empty before `start`."""
        return self._endpoint

    @property
    def pid(self) -> int | None:
        """Process id, None where none runs."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the process.

        Raises:
            ExchangeUnavailableError: It did not come up.
            ConfigError: It cannot listen there.
            ForkServerLostError: The fork server died.
        """
        child = await self._forks.fork("exchange")
        loop = asyncio.get_running_loop()
        ready = self._ready = loop.create_future()
        self._child = child
        link = self._link = ChildLink(child.sock, self._frame, lambda: None)
        link.send(ToExchange.SETUP, pack(dataclasses.asdict(self._setup)))
        if child.status is not None:
            self.child_ended(child)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._endpoint = await ready
        except TimeoutError as error:
            self._let_go()
            raise ExchangeUnavailableError(
                f"the exchange process did not start within {START_TIMEOUT_S:.0f} s: "
                "see the daemon's log"
            ) from error
        except BaseException:
            self._let_go()
            raise
        # Another process must be found where this one was.
        self._setup = dataclasses.replace(self._setup, listen=self._endpoint)
        self._started_s = loop.time()
        self._tell_all()

    def _tell_all(self) -> None:
        known = self._known
        for pool in known.pools.values():
            self._tell_pool(pool)
        self._tell_peers()
        for job, generation in known.fences.items():
            self._tell(ToExchange.DROP_GENERATION, self._ticket()[0], job, generation)
        for key, offered in known.offers.items():
            self._tell(ToExchange.OFFER, key, *offered)
        for key, want in known.wants.items():
            want.ask = None
            self._tell(ToExchange.WANT, key, *(want.room or ()))
        for key in known.unsettled:
            self._tell(ToExchange.ACKNOWLEDGE, key)
        self._tell(ToExchange.START)

    def _tell(self, kind: ToExchange, *values: Any, fds: tuple[int, ...] = ()) -> None:
        """Tell the process; where none runs, the next one is told all."""
        if self._link is not None:
            self._link.send(kind, encode_order(*values), fds)
        else:
            for fd in fds:
                os.close(fd)

    @property
    def _is_told(self) -> bool:
        return self._link is not None and self._ready is not None and self._ready.done()

    # what the owner says

    def add_pool(
        self,
        job: str,
        segment: Segment,
        fields: Sequence[FieldRow] = (),
        media: Sequence[MediaRow] = (),
    ) -> None:
        """Let the process map a job's pool.

        Args:
            job: Its id.
            segment: Kept open by its owner until `drop_pool`.
            fields: The job's fields, in its order.
            media: The job's media rules, in their order.
        """
        shapes = [[row.per, row.dtype] for row in fields]
        media_shapes = [[row.unit_values, row.unit_dtype] for row in media]
        pool = _Pool(segment, encode_order(job, segment.nbytes, shapes, media_shapes))
        self._known.pools[job] = pool
        if self._is_told:
            self._tell_pool(pool)

    def _tell_pool(self, pool: _Pool) -> None:
        assert self._link is not None
        fd = os.dup(pool.segment.fd_read_write)
        self._link.send(ToExchange.POOL, pool.order, (fd,))

    def drop_pool(self, job: str) -> asyncio.Future[None]:
        """Forget a job and all its parcels; done once the process has unmapped its pool."""
        self._known.pools.pop(job, None)
        self._known.fences.pop(job, None)
        for key in self._known.parcels():
            if key.job == job:
                self._known.forget(key)
        return self._tell_with_ticket(ToExchange.DROP_POOL, job)

    def set_peers(self, peers: Mapping[str, PeerAddress]) -> None:
        """Say which nodes there are, and where: all others are strangers from now on."""
        self._known.peers = dict(peers)
        if self._is_told:
            self._tell_peers()

    def _tell_peers(self) -> None:
        rows = [[node, *address] for node, address in self._known.peers.items()]
        self._tell(ToExchange.PEERS, *rows)

    def offer(self, key: ParcelKey, fragments: FragmentColumns, *, has_units: bool = True) -> None:
        """Give a parcel of these fragments to its consumer, with the units of their media or without.

        They stay where they are until it is acknowledged, or withdrawn and that is done.
        """
        if not self._is_fenced(key):
            offered = self._known.offers[key] = (fragments.encode(), has_units)
            if self._is_told:
                self._tell(ToExchange.OFFER, key, *offered)

    def want(self, key: ParcelKey) -> None:
        """Ask a producer for a parcel."""
        if not self._is_fenced(key) and key not in self._known.wants:
            self._known.wants[key] = _Want()
            if self._is_told:
                self._tell(ToExchange.WANT, key)

    def decline(self, key: ParcelKey) -> None:
        """Tell a producer, until it knows, that all that a parcel would bring is here."""
        if not self._is_fenced(key) and key not in self._known.wants:
            self._known.unsettled.add(key)
            if self._is_told:
                self._tell(ToExchange.ACKNOWLEDGE, key)

    def room(self, key: ParcelKey, offset_bytes: int, size_bytes: int) -> None:
        """Give a wanted parcel a piece of its job's pool, at least as large as `parcel_size` said."""
        want = self._known.wants.get(key)
        if want is not None:
            want.room = (offset_bytes, size_bytes)
            if want.ask is not None and self._is_told:
                self._tell(ToExchange.ROOM, key, offset_bytes, size_bytes, want.ask)

    def withdraw(self, key: ParcelKey) -> asyncio.Future[None]:
        """Forget a parcel; done once nothing of it is read or written any more.

        Its room or its fragments may go then.
        """
        self._known.forget(key)
        return self._tell_with_ticket(ToExchange.WITHDRAW, key)

    def drop_generation(self, job: str, generation: int) -> asyncio.Future[None]:
        """Forget all parcels of a job up to a generation, and refuse late ones; done as `withdraw`."""
        fences = self._known.fences
        fences[job] = max(generation, fences.get(job, generation))
        for key in self._known.parcels():
            if self._is_fenced(key):
                self._known.forget(key)
        return self._tell_with_ticket(ToExchange.DROP_GENERATION, job, generation)

    def _is_fenced(self, key: ParcelKey) -> bool:
        return key.generation <= self._known.fences.get(key.job, -1)

    def _tell_with_ticket(self, kind: ToExchange, *values: Any) -> asyncio.Future[None]:
        number, future = self._ticket()
        if self._is_told:
            self._tell(kind, number, *values)
        else:
            self._punch(number)  # no process that could touch anything
        return future

    def _ticket(self) -> tuple[int, asyncio.Future[None]]:
        number = next(self._numbers)
        future = self._tickets[number] = asyncio.get_running_loop().create_future()
        return number, future

    def _punch(self, number: int) -> None:
        future = self._tickets.pop(number, None)
        if future is not None and not future.done():
            future.set_result(None)

    def statistics(self) -> ExchangeStatistics:
        """Return what the process told last; about a second old."""
        return self._statistics

    # what the process says

    def _frame(self, kind: int, body: bytes) -> None:
        match FromExchange(kind):
            case FromExchange.CAME:
                self._came(*decode_order(body))
            case FromExchange.SIZE:
                key, size_bytes, ask = decode_order(body)
                want = self._known.wants.get(key)
                if want is not None:
                    want.room, want.ask = None, ask
                    self._events.parcel_size(key, size_bytes)
            case FromExchange.TAKEN:
                (key,) = decode_order(body)
                if self._known.offers.pop(key, None) is not None:
                    self._events.parcel_acked(key)
            case FromExchange.DECLINED:
                (key,) = decode_order(body)
                if self._known.offers.pop(key, None) is None:
                    self._events.parcel_declined(key)
                else:  # it was offered meanwhile
                    self._tell_with_ticket(ToExchange.WITHDRAW, key)
                    self._events.parcel_acked(key)
            case FromExchange.SETTLED:
                (key,) = decode_order(body)
                self._known.unsettled.discard(key)
            case FromExchange.FAILED:
                key, code, message = decode_order(body)
                if key in self._known.wants or key in self._known.offers:
                    self._known.wants.pop(key, None)
                    self._events.parcel_failed(key, decode_error(code, message, {}))
            case FromExchange.DONE:
                (number,) = decode_order(body)
                self._punch(number)
            case _:
                self._rare_frame(FromExchange(kind), body)

    def _rare_frame(self, kind: FromExchange, body: bytes) -> None:
        match kind:
            case FromExchange.PEER:
                self._events.peer_changed(*decode_order(body))
            case FromExchange.STATISTICS:
                self._statistics = ExchangeStatistics(**unpack_map(body))
            case FromExchange.READY:
                endpoint, _ = decode_order(body)
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(endpoint)
            case FromExchange.START_FAILED:
                if self._ready is not None and not self._ready.done():
                    self._ready.set_exception(decode_error(**unpack_map(body)))

    def _came(self, key: ParcelKey, offset_bytes: int, frames: list[bytes]) -> None:
        if self._known.wants.pop(key, None) is None:
            return  # it was withdrawn while this was on its way
        self._known.unsettled.add(key)
        table = ParcelTable.of_frames(frames)
        at = 0
        came = []
        for source, begin, used, records in table.parts.tolist():
            rows = slice(at, at + records)
            at += records
            came.append(
                ParcelPart(
                    source, offset_bytes + begin, used, table.block_key[rows], table.index[rows],
                    table.offset[rows], table.length[rows],
                )
            )  # fmt: skip
        self._events.parcel_came(key, came)

    # its death

    def child_ended(self, child: Child) -> bool:
        """Take the end of a child; False where it is not this process."""
        if child is not self._child:
            return False
        if self._link is not None:
            self._link.drain()  # what it said last is as true as before
        ready = self._ready
        self._let_go()
        error = ExchangeUnavailableError(
            f"the exchange process {child.pid} ended with status {child.status}: see the daemon's log"
        )
        if ready is not None and not ready.done():
            ready.set_exception(error)  # its start tells
            return True
        if self._is_closed:
            return True
        log.warning("%s; starting another", error.message)
        self._events.exchange_lost()
        self._restarting = asyncio.get_running_loop().create_task(self._restart())
        return True

    async def _restart(self) -> None:
        """Start another process, however often it takes: nodes stand still without one."""
        if asyncio.get_running_loop().time() - self._started_s > LASTING_S:
            self._restart_s = RESTART_S
        while not self._is_closed:
            await asyncio.sleep(self._restart_s)
            self._restart_s = min(2 * self._restart_s, RESTART_S_MAX)
            try:
                await self.start()
                return
            except ForkServerLostError as error:
                log.error("%s", error.message)  # the daemon's owner acts on that
                return
            except MsdError as error:
                log.warning("%s; trying again", error.message)

    def _let_go(self) -> None:
        """Forget the process; it leaves with its link, and is killed where it does not."""
        if self._link is not None:
            self._link.close()
        if self._child is not None and self._child.status is None:
            self._forks.kill(self._child)
        self._link = self._child = self._ready = None
        for number in list(self._tickets):
            self._punch(number)

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        if self._restarting is not None:
            self._restarting.cancel()
        self._let_go()
