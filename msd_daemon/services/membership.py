"""The ranks of a job: who joined, who waits to start from which state, who is leaving."""

from __future__ import annotations

from dataclasses import dataclass

from federation.core.gathering import RankNeeds, differing_ranks, state_digest
from msd_client.contract.errors import (
    DeadlineError,
    MeshMismatchError,
    MsdError,
    StateMismatchError,
    UsageError,
    encode_error,
)
from msd_daemon.services.link import PacketPeer


@dataclass
class Member:
    """A rank that joined."""

    rank: int
    pid: int
    peer: PacketPeer
    ring: int
    deadlines: dict[str, float]
    started_with: bytes | None = None
    start_request: int = 0
    joined_after: int = 0
    """The generation that ran when it joined: it is no part of that one."""
    generation: int = 0
    """The one that it reads; 0 before its first and once it is done with one."""
    held: tuple[int, ...] = ()
    """Earlier ones of which its views hold batches still, as it said at its last start."""


class Membership:
    """Ranks of one job on this node.

    When a generation may begin stands in federation.core.gathering, for one node as for many.

    Args:
        job_name: For people.
        needs: Which ranks a generation needs.
    """

    def __init__(self, job_name: str, needs: RankNeeds) -> None:
        self._job_name = job_name
        self._needs = needs
        self.members: dict[int, Member] = {}
        """Ranks that joined and did not leave."""
        self.leaving: dict[int, Member] = {}
        """Ranks that said goodbye while views of theirs live."""

    def is_optional(self, rank: int) -> bool:
        """True for a rank of a middle stage, which reads if and when it likes."""
        return rank in self._needs.optional

    def add(self, member: Member) -> None:
        """Take a rank in.

        Raises:
            MeshMismatchError: It is here already.
            UsageError: It left and its batches live on.
        """
        left = self.leaving.get(member.rank)
        if left is not None:
            raise UsageError(
                f"rank {member.rank} of job {self._job_name!r} (pid {left.pid}) left, and views of its "
                "batches are alive still: drop them (del batch) before it connects again",
                rank=member.rank,
                pid=left.pid,
            )
        known = self.members.get(member.rank)
        if known is not None:
            raise MeshMismatchError(
                f"rank {member.rank} of job {self._job_name!r} already joined (pid {known.pid}): give "
                "every process its own rank (torchrun sets RANK), or stop the other run: msdctl stop "
                f"{self._job_name}",
                rank=member.rank,
                pid=known.pid,
            )
        self.members[member.rank] = member

    def start(self, rank: int, request: int, state: bytes) -> None:
        """A rank wants to iterate from a state.

        Raises:
            UsageError: The rank did not join, or waits already.
        """
        member = self.members.get(rank)
        if member is None:
            raise UsageError(f"rank {rank} starts before it joined")
        if member.started_with is not None:
            raise UsageError(f"rank {rank} already waits for its start")
        member.started_with = state
        member.start_request = request

    @property
    def can_begin(self) -> bool:
        """True where the next generation may begin."""
        return not self.waiting_for()

    def waiting_for(self) -> list[int]:
        """Return the ranks that the next generation waits for: not here, or not ready for it."""
        return self._needs.waiting_for(
            self.members, [member.rank for member in self.waiting()], self.reading()
        )

    def reading(self) -> list[int]:
        """Return the ranks that read the running generation."""
        return sorted(rank for rank, member in self.members.items() if member.generation)

    def needs(self, rank: int) -> bool:
        """True where no generation begins without this rank."""
        return rank in self._needs.needed

    def waiting(self) -> list[Member]:
        """Return the ranks that wait for their start."""
        return [member for member in self.members.values() if member.started_with is not None]

    def start_timed_out(self, rank: int) -> MsdError | None:
        """Return the error of a rank whose start waited too long, or None where it no longer waits."""
        member = self.members.get(rank)
        if member is None or member.started_with is None:
            return None
        ranks = ", ".join(map(str, self.waiting_for()[:16]))
        member.started_with = None
        return DeadlineError(
            f"rank {rank} waited {member.deadlines['join_s']:g} s for ranks {ranks} of job "
            f"{self._job_name!r} to join and start: are they running, with the same job and mesh?",
            ranks=ranks,
        )

    def refuse_start(self, error: MsdError) -> None:
        """Answer every rank that waits for its start with an error."""
        for member in self.waiting():
            member.started_with = None
            member.peer.send_control({"id": member.start_request, "error": encode_error(error)})

    def state_digests(self) -> dict[int, str]:
        """Return the digest of the state of each rank that waits."""
        states = {member.rank: member.started_with or b"" for member in self.waiting()}
        known = {state: state_digest(state) for state in set(states.values())}
        return {rank: known[state] for rank, state in states.items()}

    def common_state(self) -> bytes:
        """Return the state that all ranks start from.

        Raises:
            StateMismatchError: They differ; the ranks are named.
        """
        members = self.waiting()
        same, differing = differing_ranks(self.state_digests())
        if differing:
            raise StateMismatchError(
                f"ranks {differing[:32]} start job {self._job_name!r} from another state than ranks "
                f"{same[:8]}: load the same checkpoint on every rank",
                ranks=",".join(map(str, differing[:32])),
            )
        state = members[0].started_with
        assert state is not None
        return state
