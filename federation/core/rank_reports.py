"""What the nodes of a cluster said of a job's ranks, and when that makes a generation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from federation.cluster_messages import RanksStarted
from federation.core.gathering import RankNeeds, differing_ranks, find_conflicts
from federation.model.job import ResolvedJob, decode_job
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.batch_spec import Stage
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import (
    MeshMismatchError,
    MsdError,
    ProtocolError,
    StateMismatchError,
    UsageError,
)

CONFLICT_WAIT_NS = 6 * 10**9
"""So long ranks that can't be of one run with others that are there wait for those to leave: where a
host died the planner learns of it later than the launcher that starts them anew."""


class Offer(NamedTuple):
    """A job that ranks bring."""

    encoded: bytes
    job: ResolvedJob


@dataclass(frozen=True)
class Awaited:
    """These ranks are waited for; others than before."""

    ranks: list[int]


@dataclass(frozen=True)
class Refused:
    """Ranks that wait are told so, and wait no more."""

    error: MsdError
    node: str = ""
    """Whose ranks; empty: all nodes'."""


@dataclass(frozen=True)
class Complete:
    """All that a generation needs wait with one state."""

    tree: ClientPlaceTree
    first: RanksStarted
    """Of the node that told first; job, mesh and stage are those of all."""
    state: bytes
    """Encoded."""


Outcome = Awaited | Refused | Complete


class RankReports:
    """The reports of all nodes with ranks."""

    def __init__(self) -> None:
        self._reports: dict[str, RanksStarted] = {}
        self._arrivals: dict[str, int] = {}
        """In which order nodes' ranks came."""
        self._count = 0
        self._without: set[str] = set()
        """Nodes that said that they have no ranks: they left, or never came."""
        self._offers: dict[str, Offer] = {}
        """By digest."""
        self._states: dict[str, bytes] = {}
        """States that ranks wait with, by digest."""
        self._conflict_ns: int | None = None
        """Since when ranks wait for others to leave."""
        self.awaited: list[int] = []
        """Ranks that the next generation waits for."""
        self.conflict = ""
        """Why ranks wait for others to leave; empty: they don't."""

    def __bool__(self) -> bool:
        return bool(self._reports)

    def of(self, node: str) -> RanksStarted | None:
        """Return what a node said of its ranks; None where it has none."""
        return self._reports.get(node)

    def all(self) -> Mapping[str, RanksStarted]:
        """Return the reports of nodes with ranks."""
        return self._reports

    def is_without(self, node: str) -> bool:
        """True of a node that said it has no ranks; not of one that is not heard of."""
        return node in self._without

    def is_waiting(self) -> bool:
        """True where some rank waits for a generation."""
        return any(report.waiting for report in self._reports.values())

    def offer(self, digest: str) -> Offer | None:
        """Return a job that ranks brought since the last generation began."""
        return self._offers.get(digest)

    def take(self, node: str, message: RanksStarted, frames: tuple[bytes, ...]) -> None:
        """Take what a node says of its ranks.

        Args:
            node: Its name.
            message: All ranks there.
            frames: The encoded job and state, where a rank waits.

        Raises:
            ProtocolError: Frames are missing, or hold no job.
        """
        if not message.ranks:
            self.left(node)
            return
        if frames:
            if len(frames) != 2:
                raise ProtocolError(f"RanksStarted has {len(frames)} frames, not 2")
            job, state = frames
            if message.job_digest not in self._offers:
                self._offers[message.job_digest] = Offer(job, decode_job(unpack_map(job)))
            for digest in dict.fromkeys(message.state_digests):
                self._states[digest] = state
        self._without.discard(node)
        if node not in self._reports:
            self._count += 1
            self._arrivals[node] = self._count
        self._reports[node] = message

    def left(self, node: str) -> None:
        """A node has no ranks any more."""
        self._reports.pop(node, None)
        self._without.add(node)

    def forget(self, node: str) -> None:
        """A node is none of the job's any more."""
        self._reports.pop(node, None)
        self._without.discard(node)

    def clear(self) -> None:
        """Forget all nodes."""
        self._reports.clear()
        self._without.clear()

    def refuse_waiting(self) -> None:
        """Ranks that wait were told that no generation begins: nodes report them again if they do."""
        for node in [node for node, report in self._reports.items() if report.waiting]:
            del self._reports[node]

    def begun(self) -> None:
        """A generation begins with the ranks that waited: they read."""
        self._offers.clear()
        self._states.clear()
        for node, report in self._reports.items():
            reading = [*report.reading, *report.waiting]
            self._reports[node] = replace(report, waiting=[], state_digests=[], reading=reading)

    def will_not_come(self, gone: frozenset[int]) -> Refused | None:
        """Ranks left the training job: a pass of validation that waits for one does not begin."""
        missing = sorted(gone.intersection(self.awaited))
        if not missing or not self._reports:
            return None
        self.awaited = []
        name = next(iter(self._reports.values())).name
        return Refused(
            UsageError(
                f"ranks {missing[:16]} left the job, so no pass of {name!r} begins: "
                "restart all ranks from the last state",
                rank=missing[0],
            )
        )

    # -- what follows ------------------------------------------------------------------------------

    def settle(self, now_ns: int, is_silent: Callable[[str], bool]) -> list[Outcome]:
        """Return what is to be done by all that was said; ask again while `conflict` says why.

        Args:
            now_ns: The monotonic clock.
            is_silent: True of a node that is not heard now: it will be heard again, or be lost.
        """
        if not self.is_waiting():
            self._no_conflict()
            return []
        found: list[Outcome] = []
        if self._has_conflict(now_ns, is_silent, found) or not self.is_waiting():
            return found
        return [*found, *self._gather()]

    def _no_conflict(self) -> None:
        self._conflict_ns, self.conflict = None, ""

    def _has_conflict(
        self, now_ns: int, is_silent: Callable[[str], bool], found: list[Outcome]
    ) -> bool:
        """True where ranks wait for those of another run to leave; in the end they are refused."""
        nodes = sorted(self._reports, key=self._arrivals.__getitem__)
        conflicts = find_conflicts([(node, self._reports[node]) for node in nodes])
        if not conflicts:
            self._no_conflict()
            return False
        self.conflict = conflicts[0].why
        if self._conflict_ns is None or any(is_silent(it.other) for it in conflicts):
            self._conflict_ns = now_ns
        if now_ns - self._conflict_ns < CONFLICT_WAIT_NS:
            return True
        self._no_conflict()
        for conflict in conflicts:
            del self._reports[conflict.node]
            error = MeshMismatchError(conflict.why, node=conflict.node)
            found.append(Refused(error, conflict.node))
        return False

    def _gather(self) -> list[Outcome]:
        reports = list(self._reports.values())
        first = reports[0]
        tree = ClientPlaceTree.from_mesh(dict(first.mesh))
        needs = RankNeeds.of(tree, cast("Stage | None", first.stage or None))
        awaited = needs.waiting_for(
            [rank for report in reports for rank in report.ranks],
            [rank for report in reports for rank in report.waiting],
            [rank for report in reports for rank in report.reading],
        )
        if awaited:
            is_news = awaited != self.awaited
            self.awaited = awaited
            return [Awaited(awaited)] if is_news else []
        self.awaited = []
        digests = {
            rank: digest
            for report in reports
            for rank, digest in zip(report.waiting, report.state_digests, strict=True)
        }
        same, others = differing_ranks(digests)
        if not others:
            return [Complete(tree, first, self._states[digests[same[0]]])]
        return [
            Refused(
                StateMismatchError(
                    f"ranks {others[:32]} start job {first.name!r} from another state than ranks "
                    f"{same[:8]}: load the same checkpoint on every rank",
                    ranks=",".join(map(str, others[:32])),
                )
            )
        ]
