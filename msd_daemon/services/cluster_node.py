"""This daemon as a node of a cluster: the link to the planners, the exchange, and who hears what."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, Protocol

import zmq

from federation.addresses import announced, bind_places, parse_endpoint
from federation.cluster_hello import PlannerHello
from federation.cluster_link import ClusterLink
from federation.cluster_messages import (
    AskCluster,
    BeginGeneration,
    ClusterAnswer,
    DrainNode,
    NodeReport,
)
from federation.keys import KeyDir
from federation.messages import Envelope
from federation.model.job import ResolvedJob, decode_job
from federation.secure_sockets import CurveKeys, check_plain
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import (
    MsdError,
    PlannerUnavailableError,
    ProtocolError,
    decode_error,
)
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.federation_options import FederationOptions
from msd_daemon.services.cluster_session import ClusterSession
from msd_daemon.services.exchange_port import (
    ExchangePort,
    ParcelKey,
    ParcelPart,
    PeerAddress,
)
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.parcels import Parcels

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 8.0
LISTEN_KEY = "federation.listen"


class ClusterOwner(Protocol):
    """What the node asks of the daemon."""

    def cluster_sessions(self) -> list[ClusterSession]:
        """Return the jobs of the cluster that are here."""
        ...

    def cluster_session(self, identity: str) -> ClusterSession | None:
        """Return one of them."""
        ...

    def open_loading_session(
        self, identity: str, job: ResolvedJob, message: BeginGeneration
    ) -> ClusterSession:
        """Make the session of a job that has no rank here.

        Raises:
            MsdError: It does not fit this node.
        """
        ...


class ClusterNode:
    """The node's wires.

    Args:
        options: Of the cluster.
        config: The daemon's.
        forks: Its fork server.
        owner: The daemon.

    Raises:
        ConfigError: Keys are missing, or needed and not named.
    """

    def __init__(
        self,
        options: FederationOptions,
        config: DaemonConfig,
        forks: ForkClient,
        owner: ClusterOwner,
    ) -> None:
        self.options = options
        self._config = config
        self._owner = owner
        self._listen = parse_endpoint(options.listen, LISTEN_KEY, 0)
        self._keys = KeyDir(Path(options.keys_dir), options.node) if options.keys_dir else None
        # The exchange's pair is this process's own: the planner, who knows the node by its key, tells
        # the others of it, so rotating a node's key moves no sample's wire.
        pair = None
        if self._keys is not None and options.is_data_encrypted:
            pair = CurveKeys(*zmq.curve_keypair())
        elif not options.keys_dir:
            check_plain(self._listen, LISTEN_KEY)
        self._exchange_key = "" if pair is None else pair.public.decode()
        self.exchange = ExchangePort(
            forks,
            self,
            node=options.node,
            listen=bind_places(self._listen, LISTEN_KEY)[0].zmq,
            keys=pair,
        )
        self._link: ClusterLink | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._addresses: dict[str, list[str]] = {}
        self._asked: dict[int, asyncio.Future[ClusterAnswer]] = {}
        self._request = 0
        self.peers: dict[str, str] = {}
        """Why a peer's exchange does not answer, by its name; empty: it does."""
        self.planner_silence = "none answers yet"
        """Why no planner leads, or how long the one that does has been silent; empty: one answers."""
        self.planner_away_ns = time.monotonic_ns()
        """Since when no planner answers, on the monotonic clock; 0: one does."""

    @property
    def link(self) -> ClusterLink | None:
        """To the planners, once started."""
        return self._link

    @property
    def waiting_for(self) -> str:
        """The planner, and why none answers; empty: one does."""
        return f"a planner ({self.planner_silence})" if self.planner_silence else ""

    @property
    def planner_place(self) -> str:
        """Where the planner that leads is, or where all are, if none does."""
        leads = None if self._link is None else self._link.leader_place
        return ", ".join(self.options.planners) if leads is None else leads

    def stop_note(self, job: str) -> str:
        """Return what to know of a stop that no planner tells other nodes of now; empty: one does.

        Args:
            job: The job's name.
        """
        if not self.planner_silence:
            return ""
        is_kept = self._link is not None and self._link.leader is not None
        when = "only once that planner is heard again" if is_kept else "nothing of it"
        return (
            f"on this node only: {self.planner_silence}, so other nodes hear {when}; to end it there, "
            f"type msdctl stop {job} on each of them"
        )

    def begin(self) -> None:
        """Start the exchange and the link."""
        self._starting = asyncio.get_running_loop().create_task(self._start())
        self._starting.add_done_callback(_noted)

    async def _start(self) -> None:
        await self.exchange.start()
        facts = {
            "loader_workers": self._config.loader_workers if self.options.loads else 0,
            "exchange": self._announced(),
            "exchange_key": self._exchange_key,
        }
        self._link = ClusterLink(
            self.options.planners,
            self.options.node,
            self._envelope,
            self._keys,
            on_up=self._planner_up,
            on_down=self._planner_down,
            on_silent=self._planner_silent,
            on_heard=self._planner_heard,
            facts=facts,
        )
        self._reading = asyncio.get_running_loop().create_task(self._read(self._link))

    def _announced(self) -> str:
        """Return where other nodes reach the exchange."""
        port = parse_endpoint(self.exchange.endpoint, LISTEN_KEY).port
        if self.options.announce:
            return parse_endpoint(self.options.announce, "federation.announce", port).zmq
        return announced(self._listen, port, LISTEN_KEY)

    async def ready(self) -> ClusterLink:
        """Return the link to the planners.

        Raises:
            MsdError: The exchange can't listen.
        """
        assert self._starting is not None
        await asyncio.shield(self._starting)
        assert self._link is not None
        return self._link

    async def _read(self, link: ClusterLink) -> None:
        try:
            await link.run()
        except* ProtocolError as group:
            log.error("the planners' wire is broken: %s", group.exceptions)
            raise

    # -- the planner ---------------------------------------------------------------------------------

    def _planner_silent(self, for_s: float) -> None:
        """The planner that leads says nothing: stopped, killed or cut off, who can know."""
        assert self._link is not None
        leader = self._link.leader
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - for_s))
        name = "" if leader is None else f" {leader.planner}"
        self.planner_silence = f"planner{name} at {self.planner_place} is silent since {since}"
        self.planner_away_ns = time.monotonic_ns() - int(for_s * 1e9)

    def _planner_heard(self) -> None:
        self.planner_silence, self.planner_away_ns = "", 0

    def _planner_up(self, _hello: PlannerHello) -> None:
        self._planner_heard()
        assert self._link is not None
        for session in self._owner.cluster_sessions():
            session.planner_leads(self._link)

    def _planner_down(self, reason: str) -> None:
        self.planner_silence = reason
        self.planner_away_ns = self.planner_away_ns or time.monotonic_ns()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(PlannerUnavailableError(f"the planner is gone: {reason}"))

    def _envelope(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, ClusterAnswer):
            future = self._asked.get(message.request)
            if future is not None and not future.done():
                future.set_result(message)
            return
        session = self._owner.cluster_session(envelope.job)
        if isinstance(message, BeginGeneration):
            self._take_addresses(message)
            if session is None:
                session = self._open(envelope, message)
        if session is not None:
            session.planner_message(envelope)

    def _open(self, envelope: Envelope, message: BeginGeneration) -> ClusterSession | None:
        try:
            if len(envelope.frames) != 2:
                raise ProtocolError(f"job {envelope.job} begins here, and was not sent")
            job = decode_job(unpack_map(envelope.frames[0]))
            return self._owner.open_loading_session(envelope.job, job, message)
        except MsdError as error:
            log.error("job %s can't be loaded here: %s", envelope.job, error.message)
            assert self._link is not None
            ClusterSession.refuse(self._link, envelope, error)
            return None

    # -- operators -----------------------------------------------------------------------------------

    async def ask(self, drain: tuple[str, bool] | None = None) -> dict[str, Any]:
        """Return how the cluster stands, as its planner says.

        Args:
            drain: A node, and whether it is to load nothing any more; None: look only.

        Raises:
            PlannerUnavailableError: No planner leads, or it does not answer.
            NotFoundError: There is no such node.
        """
        link = await self.ready()
        if link.leader is None:
            raise PlannerUnavailableError(
                f"no planner leads ({self.planner_silence or 'none answers'}): planned steps are "
                f"served; {planner_remedy(self.planner_place)}"
            )
        self._request += 1
        number = self._request
        future: asyncio.Future[ClusterAnswer] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        message = AskCluster(number) if drain is None else DrainNode(number, *drain)
        link.send("", 0, message)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                answer = await future
        except TimeoutError as error:
            late = (
                ""
                if drain is None
                else (
                    "; the order is kept for it and may still take effect once it answers: look with "
                    "msdctl cluster"
                )
            )
            raise PlannerUnavailableError(
                f"planner {link.leader.planner if link.leader else '?'} did not answer within "
                f"{ASK_TIMEOUT_S:g} s{late}; {planner_remedy(self.planner_place)}"
            ) from error
        finally:
            self._asked.pop(number, None)
        if answer.error is not None:
            raise decode_error(**answer.error)
        return answer.status | {
            "node": self.options.node,
            "planners": [
                {"endpoint": str(planner.endpoint), "refusal": planner.refusal}
                for planner in link.planners
            ],
        }

    def report(self, verdicts: list[list[str]]) -> None:
        """Tell the planner what `msdctl cluster` and `msdctl why` of other nodes show of this one.

        Args:
            verdicts: See NodeReport.
        """
        if self._link is None:
            return
        statistics = self.exchange.statistics()
        report = NodeReport(
            statistics.taken_bytes, statistics.given_bytes, sorted(self.peers), verdicts
        )
        self._link.send("", 0, report)

    def _take_addresses(self, message: BeginGeneration) -> None:
        self._addresses |= dict(zip(message.nodes, message.addresses, strict=True))
        self.exchange.set_peers(
            {
                node: PeerAddress(endpoint, key.encode() or None)
                for node, (endpoint, key) in self._addresses.items()
                if node != self.options.node
            }
        )

    # -- ExchangeEvents ------------------------------------------------------------------------------

    def _parcels(self, key: ParcelKey) -> Parcels | None:
        session = self._owner.cluster_session(key.job)
        return None if session is None else session.parcels_of(key)

    def parcel_size(self, key: ParcelKey, size_bytes: int) -> None:
        """See ExchangeEvents."""
        if (parcels := self._parcels(key)) is not None:
            parcels.size(key, size_bytes)

    def parcel_came(self, key: ParcelKey, parts: list[ParcelPart]) -> None:
        """See ExchangeEvents."""
        if (parcels := self._parcels(key)) is not None:
            parcels.came(key, parts)

    def parcel_acked(self, key: ParcelKey) -> None:
        """See ExchangeEvents."""
        if (parcels := self._parcels(key)) is not None:
            parcels.acked(key)

    def parcel_declined(self, key: ParcelKey) -> None:
        """See ExchangeEvents."""
        if (parcels := self._parcels(key)) is not None:
            parcels.declined(key)

    def parcel_failed(self, key: ParcelKey, error: MsdError) -> None:
        """See ExchangeEvents."""
        if (parcels := self._parcels(key)) is not None:
            parcels.failed(key, error)

    def peer_changed(self, peer: str, is_up: bool, reason: str) -> None:
        """See ExchangeEvents."""
        if is_up:
            if self.peers.pop(peer, ""):
                log.info("node %s answers again", peer)
            return
        if peer not in self.peers:
            log.warning("node %s does not answer: %s", peer, reason)
        self.peers[peer] = reason

    def exchange_lost(self) -> None:
        """See ExchangeEvents."""

    def child_ended(self, child: Child) -> bool:
        """Take the end of a child; False where it is not the exchange."""
        return self.exchange.child_ended(child)

    def close(self) -> None:
        """Let go of the wires."""
        for task in (self._starting, self._reading):
            if task is not None:
                task.cancel()
        if self._link is not None:
            self._link.close()
        self.exchange.close()


def planner_remedy(place: str) -> str:
    """Return what to do about a planner that does not answer.

    Args:
        place: Where it is.
    """
    return (
        f"on the host of {place}: systemctl status msd-planner (kill -CONT its pid where it is "
        "stopped, start it where it ended); where it runs, look at the network between"
    )


def _noted(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("this node can't join its cluster: %s", error)
