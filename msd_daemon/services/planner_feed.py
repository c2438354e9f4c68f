"""What a generation tells its planner: chunks, released steps, ranks' times.

All chunks of one turn of the loop go in one message. A planner that takes over is told of every
chunk that plans did not pass, so the metadata is kept here until then, wherever the chunk is now.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from federation.messages import Message, StepReleased, StepSeconds, encode_chunks
from federation.model.chunk import ChunkMeta
from federation.model.job import ResolvedJob
from federation.model.plan import StepPlan
from federation.planning.kept_chunks import Cursor, KeptChunks

CHUNKS_A_MESSAGE_MAX = 512
"""Each may have a fault text; a message's header has a limit."""
REPORTS_A_TURN_MAX = 4096
"""Reports of one turn of the loop; what comes beyond is dropped: a fit does not need them all."""


class PlannerSender(Protocol):
    """Where messages go."""

    def send_planner(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        """Send to the planner; where none lives it is lost."""


class PlannerFeed:
    """Of one generation.

    Args:
        sender: To the planner.
        job: The job.
        first_step: Of the generation.
        released_every_steps: How many released steps are told at once: words in between would only
            wake the planner.
        kept_steps: Plans whose chunks are still told to a planner that takes over: other nodes may
            lack those.
        call_soon: Has a function called at the end of this turn of the loop.
    """

    def __init__(
        self,
        sender: PlannerSender,
        job: ResolvedJob,
        *,
        first_step: int,
        released_every_steps: int,
        kept_steps: int = 0,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._sender = sender
        self._released_every_steps = released_every_steps
        self._call_soon = call_soon or asyncio.get_running_loop().call_soon
        self._kept = KeptChunks(job.sources)
        self._kept_steps = kept_steps
        self._passed: deque[list[Cursor]] = deque()
        """What the draws of the last plans passed."""
        self._metas: list[ChunkMeta] = []
        """To be told at the end of this turn."""
        self._reports: list[list[int]] = []
        self._told_released = first_step - 1
        self._is_flush_scheduled = False
        self._is_away = False
        self._is_closed = False

    def chunk_came(self, meta: ChunkMeta) -> None:
        """A chunk lies in the pool."""
        self._kept.add(meta)
        self._metas.append(meta)
        self._schedule_flush()

    def plan_came(self, plan: StepPlan) -> None:
        """Plans passed some chunks: no planner asks for them any more."""
        self._passed.append(plan.cursors_after())
        while len(self._passed) > self._kept_steps:
            self._kept.forget(self._passed.popleft())

    def released(self, step: int) -> None:
        """Every rank released all steps up to this one."""
        if step - self._told_released >= self._released_every_steps and not self._is_away:
            self._tell_released(step)

    def step_seconds(self, step: int, rank: int, nanoseconds: int) -> None:
        """A rank took so long for a step."""
        if len(self._reports) < REPORTS_A_TURN_MAX:
            self._reports.append([step, rank, nanoseconds])
        self._schedule_flush()

    def planner_away(self) -> None:
        """Another planner is to replay the journal: it is told of nothing before it has.

        It takes the order in which a source's chunks come for theirs, so one that is read meanwhile
        must not come before those that are here.
        """
        self._is_away = True

    def planner_back(self, released_step: int, cursors: Sequence[Sequence[int]]) -> None:
        """Tell a planner that replayed the journal of all that is read and not passed.

        Args:
            released_step: The last step that every rank here released.
            cursors: Where it stands: of each source [block key, index].
        """
        self._is_away = False
        self._metas = []
        self._tell_of(list(self._kept.chunks_from(cursors)))
        self._tell_released(released_step)

    def close(self) -> None:
        """Say nothing more."""
        self._is_closed = True

    def _schedule_flush(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        reports, self._reports = self._reports, []
        if self._is_away or self._is_closed:
            return  # the next planner is told of all chunks, in order; a fit can do without times
        metas, self._metas = self._metas, []
        self._tell_of(metas)
        if reports:
            self._sender.send_planner(StepSeconds(reports))

    def _tell_of(self, metas: list[ChunkMeta]) -> None:
        for start in range(0, len(metas), CHUNKS_A_MESSAGE_MAX):
            message, frames = encode_chunks(metas[start : start + CHUNKS_A_MESSAGE_MAX])
            self._sender.send_planner(message, frames)

    def _tell_released(self, step: int) -> None:
        self._told_released = step
        self._sender.send_planner(StepReleased(step))
