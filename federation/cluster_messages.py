"""Messages between nodes and the cluster's planner that a single host has no need of.

They travel in the same envelopes as those of federation.messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RanksStarted:
    """Node: the ranks of a job here, all of them; told again whenever that changes.

    Frames: the resolved job and the state that its ranks start from, from a node with a rank that waits.
    """

    name: str
    job_digest: str
    mesh: list[list[Any]]
    stage: str
    """The only pipeline stage whose ranks read (validation); empty for all."""
    ranks: list[int]
    """That joined and did not leave."""
    waiting: list[int]
    """Of those, which wait for the next generation."""
    reading: list[int]
    """Of those, which read the running one."""
    state_digests: list[str]
    """Of each rank that waits."""
    generation: int
    """The last one that this node knows of."""
    horizon_steps: int
    steps_kept: int
    forget_after: int | None = None
    parent: str = ""
    """The job whose pass of validation it is; empty: it is none."""


@dataclass(frozen=True)
class BeginGeneration:
    """Planner: make rings and workers for a generation, and answer NodeReady or NodeRefused.

    Frames: the resolved job and the state, for nodes that have no rank.
    """

    name: str
    job_digest: str
    mesh: list[list[Any]]
    stage: str
    nodes: list[str]
    """The generation's; numbers of nodes are places in this list."""
    rank_nodes: list[int]
    """Node of each rank of the mesh."""
    owners: list[list[int]]
    """Of each source the node of each part."""
    addresses: list[list[str]] = field(default_factory=list)
    """Of each node [endpoint of its exchange, its public key (empty: none)]."""


@dataclass(frozen=True)
class NodeReady:
    """Node: it has all that the generation needs of it."""


@dataclass(frozen=True)
class NodeRefused:
    """Node: it can't, and has told its ranks.

    A generation that was to begin is given up. A running one ends on all nodes where ranks are on this
    one; else the others load what this one loaded.
    """

    error: dict[str, Any]


@dataclass(frozen=True)
class StopJob:
    """Node: an operator ends the job, on all nodes."""

    error: dict[str, Any]


@dataclass(frozen=True)
class StartRefused:
    """Planner: ranks that wait are told so, and wait no more."""

    error: dict[str, Any]


@dataclass(frozen=True)
class AwaitedRanks:
    """Planner: whom the next generation waits for, for people."""

    ranks: list[int]


@dataclass(frozen=True)
class ResumeNode:
    """Node, to a planner that leads since: where it stands in the running generation.

    All chunks that plans did not pass follow, and StepReleased, once JobOpened answers.
    """

    released_step: int


@dataclass(frozen=True)
class OwnersChanged:
    """Planner: other nodes load, for the steps from `from_step` on.

    Where a node is gone, plans of those steps that nodes know follow again, with what has to be given
    by these owners.
    """

    owners: list[list[int]]
    gone: list[int]
    """Nodes that take no part any more."""
    from_step: int
    cursors: list[list[int]] = field(default_factory=list)
    """Before that step, of each source: [block_key, index]."""
    carried: list[list[int]] = field(default_factory=list)
    """Fragments carried before it: [source, block_key, index, offset, length]."""
    reason: str = ""


@dataclass(frozen=True)
class RanksGone:
    """Planner: the ranks of all nodes left; they may come back."""


@dataclass(frozen=True)
class NodeReport:
    """Node, every few seconds: what `msdctl cluster` shows of it."""

    received_bytes: int
    """Of other nodes' samples since its daemon began."""
    sent_bytes: int
    silent_peers: list[str] = field(default_factory=list)
    """Nodes whose exchange does not answer it."""
    verdicts: list[list[str]] = field(default_factory=list)
    """Of its jobs for which somebody waits: [job, side, level, cause, one line for people]."""


@dataclass(frozen=True)
class AskCluster:
    """Node: say how the cluster stands; ClusterAnswer answers."""

    request: int


@dataclass(frozen=True)
class DrainNode:
    """Node: have a node load nothing any more, or load again; ClusterAnswer answers."""

    request: int
    node: str
    is_drained: bool


@dataclass(frozen=True)
class ClusterAnswer:
    """Planner: how the cluster stands. `error` is set where what was asked is refused."""

    request: int
    status: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class JobClosed:
    """Planner: nobody reads the job any more; nodes without ranks let it go."""

    reason: str


CLUSTER_KINDS = (
    RanksStarted,
    BeginGeneration,
    NodeReady,
    NodeRefused,
    StopJob,
    StartRefused,
    AwaitedRanks,
    ResumeNode,
    OwnersChanged,
    RanksGone,
    NodeReport,
    AskCluster,
    DrainNode,
    ClusterAnswer,
    JobClosed,
)
ClusterMessage = (
    RanksStarted
    | BeginGeneration
    | NodeReady
    | NodeRefused
    | StopJob
    | StartRefused
    | AwaitedRanks
    | ResumeNode
    | OwnersChanged
    | RanksGone
    | NodeReport
    | AskCluster
    | DrainNode
    | ClusterAnswer
    | JobClosed
)
