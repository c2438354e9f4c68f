"""The ranks of a job: who joined, who waits to start from which state, who is leaving."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

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
    group: int
    deadlines: dict[str, float]
    started_with: bytes | None = None
    start_request: int = 0


class Membership:
    """Ranks of one job on this node."""

    def __init__(self, job_name: str, rank_count: int) -> None:
        self._job_name = job_name
        self._rank_count = rank_count
        self.members: dict[int, Member] = {}
        """Ranks that joined and did not leave."""
        self.leaving: dict[int, Member] = {}
        """Ranks that said goodbye while views of theirs live."""

    def add(self, member: Member) -> None:
        """Take a rank in.

        Raises:
            MeshMismatchError: It is here already.
        """
        known = self.members.get(member.rank) or self.leaving.get(member.rank)
        if known is not None:
            raise MeshMismatchError(
                f"rank {member.rank} of job {self._job_name!r} already joined (pid {known.pid}): give "
                "every process its own rank (torchrun sets RANK), or stop the other run: msdctl stop "
                f"{self._job_name}",
                rank=member.rank,
                pid=known.pid,
            )
        self.members[member.rank] = member

    def start(self, rank: int, request: int, state: bytes) -> bool:
        """A rank wants to iterate from a state; return True once all ranks of the mesh do.

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
        if len(self.members) < self._rank_count:
            return False
        return all(m.started_with is not None for m in self.members.values())

    def waiting_for(self) -> list[int]:
        """Return ranks that have not joined, or joined and not started while others wait."""
        missing = [r for r in range(self._rank_count) if r not in self.members]
        if missing:
            return missing
        is_waiting = any(m.started_with is not None for m in self.members.values())
        return [r for r, m in self.members.items() if m.started_with is None] if is_waiting else []

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
        for member in self.members.values():
            if member.started_with is not None:
                member.started_with = None
                member.peer.send_control({"id": member.start_request, "error": encode_error(error)})

    def common_state(self) -> bytes:
        """Return the state that all ranks start from.

        Raises:
            StateMismatchError: They differ; the ranks are named.
        """
        members = list(self.members.values())
        digests: dict[str, list[int]] = {}
        for member in members:
            assert member.started_with is not None
            digest = hashlib.sha256(member.started_with).hexdigest()[:16]
            digests.setdefault(digest, []).append(member.rank)
        if len(digests) > 1:
            groups = sorted(digests.items(), key=lambda item: -len(item[1]))
            differing = sorted(rank for _, ranks in groups[1:] for rank in ranks)
            raise StateMismatchError(
                f"ranks {differing[:32]} start job {self._job_name!r} from another state than ranks "
                f"{groups[0][1][:8]}: load the same checkpoint on every rank",
                ranks=",".join(map(str, differing[:32])),
            )
        state = members[0].started_with
        assert state is not None
        return state
