"""A node daemon's end of the cluster's control wire: follows the planner that leads.

It holds a session with each planner that it is told of, so that the next leader is known at once,
and obeys the one that says it leads with the highest term. An order of an older term is never
obeyed, whoever sends it. Messages of one leader arrive once and in order; with another leader, or
where the leader was restarted, `on_down` and then `on_up` are called, and the owner tells all anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from federation.cluster_hello import NodeHello, PlannerHello, decode_planner_hello, encode_hello
from federation.core.reliable import Deliver, Down, Effect, Greeted, Heard, Silent, Transmit, Up
from federation.keys import KeyDir
from federation.messages import Envelope, Message, decode_envelope
from federation.planner_socket import PLANNERS_KEY, PlannerSocket, parse_planner
from federation.secure_sockets import check_plain
from msd_client.contract.errors import ConfigError, ProtocolError

log = logging.getLogger(__name__)


def _nothing(*_: object) -> None:
    pass


class ClusterLink:
    """Sends messages to the leading planner and hands its envelopes to a callback, in order."""

    def __init__(
        self,
        planners: Sequence[str],
        node: str,
        on_envelope: Callable[[Envelope], None],
        keys: KeyDir | None = None,
        *,
        on_up: Callable[[PlannerHello], None] = _nothing,
        on_down: Callable[[str], None] = _nothing,
        on_silent: Callable[[float], None] = _nothing,
        on_heard: Callable[[], None] = _nothing,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect; `run` has to be running for anything to happen.

        Args:
            planners: `NAME@HOST:PORT` of each, where NAME is whose key it shows (`planner` where
                left out), or `ipc://PATH`; federation.addresses has the forms of HOST.
            node: This node's name; with keys it has to be its key's.
            on_envelope: Called with each message of the leader that is not of an older term.
            keys: None, on loopback only: nothing is encrypted and nobody is checked.
            on_up: A planner is followed from here on: it is to be told everything.
            on_down: It is followed no longer, for this reason; what it had not taken is dropped.
            on_silent: The followed planner was not heard for so many seconds; nothing is lost yet.
            on_heard: It is back.
            facts: What the planner is told of this node.

        Raises:
            ConfigError: No planner is named, or one on another machine and there are no keys.
        """
        if not planners:
            raise ConfigError("federation.planners: empty; name the endpoint of each planner")
        places = [parse_planner(text) for text in planners]
        for place in places:
            if keys is None:
                check_plain(place.endpoint, PLANNERS_KEY)
        self._on_envelope = on_envelope
        self._on_up = on_up
        self._on_down = on_down
        self._on_silent = on_silent
        self._on_heard = on_heard
        self._wake = asyncio.Event()
        self._armed_ns: int | None = None
        self._hellos: dict[PlannerSocket, PlannerHello] = {}
        self._leader: PlannerSocket | None = None
        self._term = 0
        self._sequence = 0
        self.stale = 0
        """Orders of older terms, not obeyed."""
        hello = encode_hello(NodeHello(node, dict(facts or {})))
        self._planners = [
            PlannerSocket(place, keys, hello, self._handle, self._note_deadline) for place in places
        ]

    @property
    def term(self) -> int:
        """Highest term seen."""
        return self._term

    @property
    def leader(self) -> PlannerHello | None:
        """What the followed planner said of itself; None while none is followed."""
        return None if self._leader is None else self._hellos.get(self._leader)

    @property
    def leader_place(self) -> str | None:
        """Endpoint of the followed planner; None while none is followed."""
        return None if self._leader is None else str(self._leader.endpoint)

    @property
    def has_room(self) -> bool:
        """False where the leader takes what it is sent too slowly: hold back what can wait."""
        return self._leader is None or self._leader.end.has_room

    @property
    def planners(self) -> Sequence[PlannerSocket]:
        """Each planner's socket, for what `msdctl` shows."""
        return self._planners

    def send(
        self, job: str, generation: int, message: Message, frames: tuple[bytes, ...] = ()
    ) -> None:
        """Send a message to the leader; without one it is dropped, as `on_up` has all told anew.

        Raises:
            ProtocolError: It is larger than the contract allows.
        """
        leader = self._leader
        if leader is None:
            return
        envelope = Envelope(job, generation, self._term, self._sequence, message, frames)
        self._sequence += 1
        leader.carry_out(leader.end.send(envelope.encode(), time.monotonic_ns()))

    async def run(self) -> None:
        """Read and keep sessions alive until cancelled."""
        async with asyncio.TaskGroup() as group:
            for planner in self._planners:
                group.create_task(planner.read())
                group.create_task(planner.connect())
            group.create_task(self._keep_time())

    def close(self) -> None:
        """Close the sockets."""
        for planner in self._planners:
            planner.close()

    async def _keep_time(self) -> None:
        while True:
            now_ns = time.monotonic_ns()
            self._armed_ns = None
            for planner in self._planners:
                deadline_ns = planner.end.next_deadline_ns()
                if deadline_ns is not None and now_ns >= deadline_ns:
                    planner.carry_out(planner.end.tick(now_ns))
                elif deadline_ns is not None:
                    self._note_deadline(deadline_ns)
            self._wake.clear()
            await self._sleep(self._armed_ns)

    async def _sleep(self, until_ns: int | None) -> None:
        """Sleep until then or until woken; not by wait_for, which loses cancellations before 3.12."""
        timer = None
        if until_ns is not None:
            delay_s = max(0.001, (until_ns - time.monotonic_ns()) / 1e9)
            timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _note_deadline(self, deadline_ns: int) -> None:
        if self._armed_ns is None or deadline_ns < self._armed_ns:
            self._armed_ns = deadline_ns
            self._wake.set()

    def _handle(self, planner: PlannerSocket, effect: Effect) -> None:
        match effect:
            case Up(_, hello) | Greeted(hello):
                planner.refusal = ""
                self._planner_said(planner, decode_planner_hello(hello))
            case Down(reason):
                self._hellos.pop(planner, None)
                if planner is self._leader:
                    self._lose(reason)
            case Deliver(frames):
                self._deliver(planner, frames)
            case Silent(for_ns):
                log.warning("planner %s is silent for %.1f s", planner.endpoint, for_ns / 1e9)
                if planner is self._leader:
                    self._on_silent(for_ns / 1e9)
            case Heard():
                log.info("planner %s is heard again", planner.endpoint)
                if planner is self._leader:
                    self._on_heard()
            case Transmit():
                raise AssertionError("sockets send packets themselves")

    def _planner_said(self, planner: PlannerSocket, hello: PlannerHello) -> None:
        self._hellos[planner] = hello
        is_followed = planner is self._leader
        if not hello.leads:
            if is_followed:
                self._lose(f"planner {hello.planner} no longer leads")
                self._drop(planner, "it no longer leads")
            return
        if is_followed and hello.term == self._term:
            return
        if hello.term < self._term or (hello.term == self._term and self._leader is not None):
            self.stale += 1
            log.warning(
                "planner %s says that it leads with term %d; term %d is known: not obeyed",
                hello.planner,
                hello.term,
                self._term,
            )
            if is_followed:
                self._lose(f"planner {hello.planner} went back to term {hello.term}")
            return
        former = self._leader
        if former is not None:
            self._lose(f"planner {hello.planner} leads with term {hello.term}")
        self._leader, self._term = planner, hello.term
        self._sequence = 0
        log.info("planner %s leads with term %d", hello.planner, hello.term)
        self._on_up(hello)
        if former is not None and former is not planner:
            self._drop(former, "another planner leads")

    def _drop(self, planner: PlannerSocket, reason: str) -> None:
        """Begin anew with a planner that leads no longer: what it had not taken is dropped."""
        planner.carry_out(planner.end.reset(reason, time.monotonic_ns()))

    def _lose(self, reason: str) -> None:
        self._leader = None
        log.warning("the leading planner is gone: %s", reason)
        self._on_down(reason)

    def _deliver(self, planner: PlannerSocket, frames: tuple[bytes, ...]) -> None:
        if planner is not self._leader:
            self.stale += 1
            return
        envelope = decode_envelope(frames)
        if envelope.term < self._term:
            self.stale += 1
            return  # an order of a leader that lost its term
        if envelope.term > self._term:
            raise ProtocolError(f"order of term {envelope.term}, its planner leads {self._term}")
        self._on_envelope(envelope)
