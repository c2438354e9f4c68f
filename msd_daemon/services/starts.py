"""Ranks' wishes to iterate: gathered until a generation can begin, answered once one did.

Ranks of the first pipeline stage begin a generation together; those of later stages may come to one
that runs. A rank that came back alone is told that nobody begins with it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from federation.model.job import ResolvedJob
from msd_client.contract.errors import (
    InvalidTransitionError,
    MsdError,
    StateMismatchError,
    UsageError,
    WorkerLostError,
    encode_error,
)
from msd_daemon.services.generation import Generation
from msd_daemon.services.membership import Member, Membership

RETURN_GRACE_S = 10.0
"""How long a rank that came back alone waits for the others to load a state as well."""


class StartsOwner(Protocol):
    """The session that generations belong to."""

    job: ResolvedJob
    state: str
    generation: Generation | None

    async def begin_generation(self, state: bytes) -> None:
        """Make a generation that begins with a state."""


class Starts:
    """Starts of one job's ranks.

    Args:
        owner: The session.
        membership: Its ranks.
    """

    def __init__(self, owner: StartsOwner, membership: Membership) -> None:
        self._owner = owner
        self._membership = membership
        self._begin_task: asyncio.Task[None] | None = None

    def start(self, rank: int, request: int, state: bytes, held: tuple[int, ...] = ()) -> None:
        """A rank wants to iterate from a state; begins a generation once all ranks do.

        Args:
            rank: The rank.
            request: Its request, which is answered then.
            state: Where it begins.
            held: Earlier generations of which it holds batches still.

        Raises:
            UsageError: The rank did not join, or waits already.
            StateMismatchError: A middle stage comes late, with another state.
        """
        owner, member = self._owner, self._membership.members.get(rank)
        generation = owner.generation
        if (
            member is not None
            and generation is not None
            and owner.state == "running"
            and generation.awaits(rank, member.ring)
        ):
            member.start_request = request
            self._begin_late(member, generation, state)
            return
        self._membership.start(rank, request, state)
        self._membership.members[rank].held = held
        if generation is None and owner.state != "beginning":
            owner.state = "starting"
        elif generation is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(RETURN_GRACE_S, self._refuse_newcomer, rank, request)
        self.begin_if_possible()

    def _refuse_newcomer(self, rank: int, request: int) -> None:
        """Tell a rank that came back alone that nobody is going to begin with it."""
        membership = self._membership
        member, generation = membership.members.get(rank), self._owner.generation
        if member is None or generation is None or member.start_request != request:
            return
        reading = membership.reading()
        is_alone = [other.rank for other in membership.waiting()] == [rank]
        if not is_alone or not reading or member.joined_after != generation.number:
            return
        membership.refuse_start(
            UsageError(
                f"rank {rank} came to job {self._owner.job.name!r} while ranks {reading[:16]} train "
                f"on without it (step {generation.next_plan_step} is planned next): restart all "
                "ranks from the last state, or have the others load it, too",
                rank=rank,
            )
        )

    def will_not_come(self, rank: int) -> None:
        """A rank left the training session of this pass of validation: those that wait are told."""
        if rank in self._membership.members or not self._membership.needs(rank):
            return
        self._membership.refuse_start(
            UsageError(
                f"rank {rank} left the job, so no pass of {self._owner.job.name!r} begins: restart "
                "all ranks from the last state",
                rank=rank,
            )
        )

    def done_reading(self, rank: int) -> None:
        """A rank reads no more of the running generation: it loaded a state, or came to the end."""
        member = self._membership.members.get(rank)
        if member is not None:
            member.generation = 0
            self.begin_if_possible()

    def begin_if_possible(self) -> None:
        """Begin a generation where all that it needs wait for it."""
        membership, owner = self._membership, self._owner
        if membership.waiting() and membership.can_begin and owner.state != "beginning":
            owner.state = "beginning"
            self._begin_task = asyncio.get_running_loop().create_task(self._begin())

    async def _begin(self) -> None:
        try:
            await self._owner.begin_generation(self._membership.common_state())
        except MsdError as error:
            self._membership.refuse_start(error)
            self._owner.state = "failed"
        except (TimeoutError, OSError) as error:
            name = self._owner.job.name
            lost = WorkerLostError(f"job {name!r} could not start: {error!r}")
            self._membership.refuse_start(lost)
            self._owner.state = "failed"

    def answer_all(self, generation: Generation) -> None:
        """Let every rank that waits into a generation that was made."""
        for member in self._membership.waiting():
            state, member.started_with = member.started_with, None
            assert state is not None
            try:
                self._begin_late(member, generation, state)
            except MsdError as error:  # it came while the generation was being made
                member.peer.send_control({"id": member.start_request, "error": encode_error(error)})

    def _begin_late(self, member: Member, generation: Generation, state: bytes) -> None:
        """Let a rank into the generation that runs, be it of a later pipeline stage.

        Raises:
            StateMismatchError: It comes with another state.
            UsageError: It is of a middle stage, and what it would begin with is gone.
        """
        name = self._owner.job.name
        if state != generation.state_bytes:
            raise StateMismatchError(
                f"rank {member.rank} starts job {name!r} from another state than the first pipeline "
                f"stage, which began at step {generation.opened.step}: load the same checkpoint on "
                "every rank",
                rank=member.rank,
            )
        try:
            owed = generation.reader_begins(member.rank, member.ring)
        except InvalidTransitionError as error:
            raise UsageError(
                f"rank {member.rank} (a middle pipeline stage) begins to read job {name!r} too late "
                f"({error.message}): iterate from the first step on, or not at all",
                rank=member.rank,
            ) from error
        _welcome(member, generation)
        generation.catch_up(member.rank, owed)

    def close(self) -> None:
        """Give up a generation that is being made."""
        if self._begin_task is not None and not self._begin_task.done():
            self._begin_task.cancel()


def _welcome(member: Member, generation: Generation) -> None:
    """Answer a rank's start with its ring."""
    member.generation = generation.number
    ring = generation.rings[member.ring]
    body = {
        "layout": ring.layout.encode(),
        "spec": ring.plan.spec.encode(),
        "generation": generation.number,
        "step": generation.opened.step,
    }
    member.peer.send_control({"id": member.start_request, "ok": body}, (ring.segment.fd_read_only,))
