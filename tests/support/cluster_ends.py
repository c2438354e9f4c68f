"""Both ends of the control wire for tests: routers in threads, links on uvloop, and what they said."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from federation.cluster_events import Event, Message, PeerDown, PeerUp
from federation.cluster_hello import PlannerHello
from federation.cluster_link import ClusterLink
from federation.cluster_router import ClusterRouter
from federation.messages import Envelope, JobEnded, decode_envelope
from msd_client.contract.errors import MsdError

WAIT_S = 30.0


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop that daemons run on."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*arguments, **named))

    return run


class RouterThread:
    """A router in a thread of its own, as a planner's; what it hears is kept in order."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:0",
        keys: Any = None,
        *,
        name: str = "p0",
        leads: bool = True,
        term: int = 1,
        answer: bool = False,
    ) -> None:
        self.name = name
        self.events: list[Event] = []
        self._answer = answer
        self._orders: queue.SimpleQueue[Callable[[ClusterRouter], Any]] = queue.SimpleQueue()
        self._endpoint, self._keys = endpoint, keys
        self._hello = PlannerHello(name, leads=leads, term=term)
        self._ready = threading.Event()
        self._is_over = False
        self._is_paused = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"router-{name}")
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.router = ClusterRouter(self._endpoint, self._keys, hello=self._hello)
        except MsdError as error:
            self._error = error
            self._ready.set()
            return
        self.endpoint = self.router.endpoint
        self._ready.set()
        try:
            while not self._is_over:
                for event in self.router.poll(10):
                    self.events.append(event)
                    if self._answer and isinstance(event, Message):
                        envelope = decode_envelope(event.frames)
                        self.router.send(event.node, envelope.encode())
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._orders.get_nowait()(self.router)
        finally:
            self.router.close()

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def do(self, action: Callable[[ClusterRouter], Any]) -> Any:
        """Have the router's thread do something; return what it gave."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put(lambda router: answers.put(action(router)))
        return answers.get(timeout=WAIT_S)

    def tell(self, node: str, number: int, *, term: int = 1, size: int = 0) -> bool:
        """Send a node an envelope that holds a number."""
        envelope = Envelope("job", 1, term, 0, JobEnded(number, "test"), (bytes(size),))
        return bool(self.do(lambda router: router.send(node, envelope.encode())))

    def lead(self, term: int, *, leads: bool = True) -> None:
        self.do(lambda router: router.set_hello(PlannerHello(self.name, leads=leads, term=term)))

    def heard(self, node: str) -> list[int]:
        """Return the numbers that a node sent, in order."""
        return [
            decode_envelope(event.frames).message.next_step  # type: ignore[union-attr]
            for event in list(self.events)
            if isinstance(event, Message) and event.node == node
        ]

    def ups(self, node: str) -> int:
        return sum(isinstance(event, PeerUp) and event.node == node for event in list(self.events))

    def downs(self, node: str) -> list[str]:
        return [
            event.reason
            for event in list(self.events)
            if isinstance(event, PeerDown) and event.node == node
        ]

    def close(self) -> None:
        self._is_over = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class LinkLog:
    """A link, and what its callbacks were told."""

    def __init__(self) -> None:
        self.link: ClusterLink
        self.ups: list[PlannerHello] = []
        self.downs: list[str] = []
        self.silences: list[float] = []
        self.hearings = 0
        self.envelopes: list[Envelope] = []

    def heard_again(self) -> None:
        self.hearings += 1

    @property
    def numbers(self) -> list[int]:
        return [envelope.message.next_step for envelope in self.envelopes]  # type: ignore[union-attr]

    def say(self, number: int, *, size: int = 0) -> None:
        """Send a number to the leader."""
        self.link.send("job", 1, JobEnded(number, "test"), (bytes(size),))

    async def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Wait until a condition holds; the test fails where it does not in time."""
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(
                    f"not in time: {what}; ups {self.ups}, downs {self.downs}, got {self.numbers[-5:]}"
                )
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running_link(
    *planners: str, node: str = "n1", keys: Any = None, **options: Any
) -> AsyncIterator[LinkLog]:
    log = LinkLog()
    log.link = ClusterLink(
        planners,
        node,
        log.envelopes.append,
        keys,
        on_up=log.ups.append,
        on_down=log.downs.append,
        on_silent=log.silences.append,
        on_heard=log.heard_again,
        **options,
    )
    task = asyncio.get_running_loop().create_task(log.link.run())
    try:
        yield log
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        log.link.close()
