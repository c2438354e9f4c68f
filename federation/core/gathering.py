"""The ranks of a job over all nodes: who is here, who waits, when a generation may begin.

A generation begins once all ranks have joined and those of the first pipeline stage wait for it:
later stages may come when activations do, or a pipeline would wait for itself. None of those may
still read the generation before, though. Middle stages are asked nothing. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.batch_spec import Stage


@dataclass(frozen=True)
class RankNeeds:
    """Which ranks a generation needs."""

    primary: frozenset[int]
    """Of the first stage; all ranks without a pipeline."""
    needed: frozenset[int]
    """Without which no generation begins, the primary ones among them."""
    optional: frozenset[int]
    """That may read too."""

    @staticmethod
    def of(tree: ClientPlaceTree, stage: Stage | None) -> RankNeeds:
        """Return what a mesh needs.

        Args:
            tree: The mesh.
            stage: The only pipeline stage whose ranks read (validation), None for all.
        """
        primary: set[int] = set()
        needed: set[int] = set()
        optional: set[int] = set()
        for place in tree.rings():
            if stage not in (None, place.stage):
                continue
            if place.stage == "middle" and stage is None:
                optional.update(place.ranks)
                continue
            needed.update(place.ranks)
            if place.stage != "last" or stage is not None:
                primary.update(place.ranks)
        return RankNeeds(frozenset(primary), frozenset(needed), frozenset(optional))

    def waiting_for(
        self, joined: Iterable[int], waiting: Iterable[int], reading: Iterable[int]
    ) -> list[int]:
        """Return the ranks that the next generation waits for: not here, or not ready for it.

        Args:
            joined: Ranks that are here.
            waiting: Those of them that wait for it.
            reading: Those that read the running one.
        """
        here, ready, busy = frozenset(joined), frozenset(waiting), frozenset(reading)
        missing = sorted(self.needed - here)
        return missing or [
            rank for rank in sorted(self.needed - ready) if rank in self.primary or rank in busy
        ]


class RankReport(Protocol):
    """What a node says of its ranks of a job."""

    @property
    def job_digest(self) -> str:
        """Of the job that they brought."""
        ...

    @property
    def mesh(self) -> list[list[Any]]:
        """Axes with sizes."""
        ...

    @property
    def ranks(self) -> list[int]:
        """That are there."""
        ...

    @property
    def waiting(self) -> list[int]:
        """Of those, which wait for the next generation."""
        ...

    @property
    def reading(self) -> list[int]:
        """Of those, which read the running one."""
        ...


class Conflict(NamedTuple):
    """Ranks that wait on a node can't be of one run with those of another."""

    node: str
    other: str
    why: str


def find_conflicts(reports: Sequence[tuple[str, RankReport]]) -> list[Conflict]:
    """Return which nodes' waiting ranks do not go together with ranks that were there before.

    Args:
        reports: Of each node with ranks, in the order in which they came; who reads was there before.
    """
    ordered = sorted(reports, key=lambda it: not it[1].reading)
    accepted: list[tuple[str, RankReport]] = []
    found: list[Conflict] = []
    for node, mine in ordered:
        conflict = None
        if mine.waiting:
            conflict = next(
                (
                    Conflict(node, other, why)
                    for other, theirs in accepted
                    if (why := _difference(node, mine, other, theirs))
                ),
                None,
            )
        if conflict is None:
            accepted.append((node, mine))
        else:
            found.append(conflict)
    return found


def _difference(node: str, mine: RankReport, other: str, theirs: RankReport) -> str:
    """Return why two nodes' ranks are not of one run; empty where they may be."""
    if mine.mesh != theirs.mesh or mine.job_digest != theirs.job_digest:
        what = "mesh" if mine.mesh != theirs.mesh else "job"
        return (
            f"ranks {mine.ranks[:16]} on node {node} bring another {what} than ranks "
            f"{theirs.ranks[:16]} on node {other}: give all ranks the same job file, files and mesh"
        )
    both = sorted(set(mine.ranks).intersection(theirs.ranks))
    if both:
        return (
            f"ranks {both[:16]} on node {node} are on node {other}, too: give every process its own "
            "rank, or stop the other run"
        )
    return ""


def state_digest(state: bytes) -> str:
    """Return what ranks' states are compared by."""
    return hashlib.sha256(state).hexdigest()


def differing_ranks(digests: Mapping[int, str]) -> tuple[list[int], list[int]]:
    """Return the ranks that most agree with, and those that start from another state.

    Args:
        digests: Of the state of each rank.
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(digests):
        groups.setdefault(digests[rank], []).append(rank)
    ranked = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    if not ranked:
        return [], []
    return ranked[0], sorted(rank for ranks in ranked[1:] for rank in ranks)
