"""A job's talk with the planner: the order that opens a generation, requests and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from federation.messages import (
    ChangeMixture,
    Envelope,
    JobFailed,
    JobOpened,
    Message,
    MixtureChanged,
    OpenJob,
    RewindStream,
    SkipAccepted,
    SkipSteps,
    StreamRewound,
)
from federation.planner_link import PlannerWire
from msd_client.contract.errors import MsdError, PlannerUnavailableError, decode_error

ANSWER_TIMEOUT_S = 60.0

Answer = MixtureChanged | SkipAccepted | StreamRewound


class PlannerPort:
    """Sends for one job and sorts out what comes for it.

    Args:
        identity: Names the job on the wire.
        link: To the planner that plans it now.
        generation: The last one that was planned under this name: a planner that stood still may
            yet say something of it.
    """

    def __init__(self, identity: str, link: PlannerWire, generation: int = 0) -> None:
        self.generation = generation
        """The one that messages are about; what comes of older ones is dropped."""
        self._identity = identity
        self._link = link
        self._opened: asyncio.Future[JobOpened] | None = None
        self._open_order: OpenJob | None = None
        """What `_opened` answers: a planner that takes over meanwhile is told it again."""
        self._on_opened: Callable[[JobOpened], None] = _nothing
        self._requests: dict[int, asyncio.Future[Answer]] = {}
        self._request_number = 0

    def next_generation(self) -> int:
        """Number a generation; what the one before it asked for is given up."""
        self.generation += 1
        self.fail(PlannerUnavailableError("another generation of the job begins"))
        return self.generation

    def begin(self, generation: int) -> None:
        """A planner that numbers generations itself begins one."""
        self.generation = generation
        self.fail(PlannerUnavailableError("another generation of the job begins"))

    def send(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        """Send a message about the current generation."""
        self._link.send(self._identity, self.generation, message, frames)

    async def open(
        self, order: OpenJob, on_opened: Callable[[JobOpened], None] | None = None
    ) -> JobOpened:
        """Have the current generation planned; return where it begins.

        Args:
            order: What the planner is told.
            on_opened: Called with the answer before anything that the planner said behind it.

        Raises:
            MsdError: The planner's refusal.
            TimeoutError: It did not answer.
        """
        self._open_order = order
        return await self.await_opened(order, on_opened)

    async def await_opened(
        self, message: Message, on_opened: Callable[[JobOpened], None] | None = None
    ) -> JobOpened:
        """Send a message that JobOpened answers; see `open`.

        Raises:
            MsdError: The planner's refusal.
            TimeoutError: It did not answer.
        """
        opened: asyncio.Future[JobOpened] = asyncio.get_running_loop().create_future()
        self._opened = opened
        self._on_opened = on_opened or _nothing
        self.send(message)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await opened

    def expect_opened(
        self, on_opened: Callable[[JobOpened], None], on_refused: Callable[[MsdError], None]
    ) -> None:
        """Have a function called with the next JobOpened, before what the planner says behind it."""

        def refused(opened: asyncio.Future[JobOpened]) -> None:
            error = None if opened.cancelled() else opened.exception()
            if isinstance(error, MsdError) and opened is self._opened:
                on_refused(error)

        self._opened = asyncio.get_running_loop().create_future()
        self._opened.add_done_callback(refused)
        self._on_opened = on_opened

    async def change_mixture(
        self,
        weights: dict[str, float],
        at: int | None = None,
        kind: Literal["mixture", "hook", "substitute"] = "mixture",
    ) -> int:
        """Journal new weights; return the step from which they hold.

        Args:
            weights: By source.
            at: The step; None for the first that is possible.
            kind: What the journal calls the event.

        Raises:
            ConfigError: A source is unknown, a weight is no weight, or the step is planned already.
            PlannerUnavailableError: The planner was replaced meanwhile.
        """
        answer = await self._ask(lambda number: ChangeMixture(number, weights, at, kind))
        return answer.step

    async def skip_steps(self, first: int, end: int) -> SkipAccepted:
        """Journal a skip of plan steps.

        Raises:
            ConfigError: It is none, or begins with a step that is planned already.
            PlannerUnavailableError: The planner was replaced meanwhile.
        """
        answer = await self._ask(lambda number: SkipSteps(number, first, end))
        assert isinstance(answer, SkipAccepted)
        return answer

    async def rewind(
        self, step: int, skip: tuple[int, int] | None, forget_after: int | None
    ) -> StreamRewound:
        """Journal a rewind; nothing is planned in this generation any more.

        Raises:
            ConfigError: The skip is none, or begins before the step.
            NotFoundError: The journal does not hold the step.
            PlannerUnavailableError: The planner was replaced meanwhile.
        """
        skipped = None if skip is None else list(skip)
        answer = await self._ask(lambda number: RewindStream(number, step, skipped, forget_after))
        assert isinstance(answer, StreamRewound)
        return answer

    async def _ask(self, message: Callable[[int], Message]) -> Answer:
        """Send a request under a number of its own; return its answer."""
        self._request_number += 1
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests[self._request_number] = future
        self.send(message(self._request_number))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await future

    def take(self, envelope: Envelope) -> bool:
        """Settle what an envelope answers; True where the generation has to hear it, too."""
        message = envelope.message
        if envelope.generation != self.generation:
            return False
        is_opening = self._opened is not None and not self._opened.done()
        if isinstance(message, JobOpened):
            if self._opened is not None and is_opening:
                self._opened.set_result(message)
                self._on_opened(message)
            return False
        if isinstance(message, JobFailed) and is_opening:
            self.fail(decode_error(**message.error))
            return False
        if isinstance(message, Answer):
            future = self._requests.pop(message.request, None)
            if future is not None and not future.done():
                if message.error is not None:
                    future.set_exception(decode_error(**message.error))
                else:
                    future.set_result(message)
        return True

    def fail(self, error: MsdError) -> None:
        """Give up an opening that waits."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(error)

    def replaced(self, link: PlannerWire) -> bool:
        """Talk to another planner from now on.

        Returns:
            True where it has to be told of the running generation: neither does it plan this job
            already, as of a job that came while its start was told of, nor was it told the open
            order again that waits for an answer.
        """
        if link is self._link:
            return False
        self._link = link
        for future in self._requests.values():
            if not future.done():
                future.set_exception(
                    PlannerUnavailableError("the planner was replaced meanwhile: ask again")
                )
        self._requests.clear()
        if self._opened is None or self._opened.done() or self._open_order is None:
            return True
        self.send(self._open_order)  # the other one died over it
        return False


def _nothing(_opened: JobOpened) -> None:
    """Nobody has to know at once."""
