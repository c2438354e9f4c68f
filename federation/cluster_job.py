"""One job of a cluster in the planner's process: its nodes, one generation after the other.

Nodes tell of their ranks; once all that a generation needs wait with one state, every node makes its
part ready, and the steps are planned as on a single host (federation.job_planning): chunks come from
whoever loads, each node is told its part of every plan, a step is released once it is on all nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from federation.cluster_generation import ClusterGeneration
from federation.cluster_messages import (
    AwaitedRanks,
    BeginGeneration,
    JobClosed,
    NodeRefused,
    OwnersChanged,
    RanksGone,
    RanksStarted,
    ResumeNode,
    StartRefused,
    StopJob,
)
from federation.core.rank_reports import Awaited, Complete, RankReports, Refused
from federation.job_planning import JobPlanning
from federation.journal_files import may_pass
from federation.journal_place import JournalPlace
from federation.messages import (
    CloseJob,
    JobFailed,
    JobOpened,
    Message,
    MixtureChanged,
    OpenJob,
    PlansMade,
    SkipAccepted,
    SourcesStarved,
    StepReleased,
    StreamRewound,
    pack_delta,
)
from federation.model.by_step import ByStep
from federation.model.exports import encode_exports
from federation.model.job import ResolvedJob
from federation.model.owners import Owners
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import DELTA_FRAME, StepPlan
from federation.planning.assignment import able_nodes, assign
from federation.planning.node_parts import NodePart, split_plan
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import (
    JournalUnavailableError,
    LeadershipLostError,
    MsdError,
    NodeLostError,
    PlannerUnavailableError,
    decode_error,
    encode_error,
)

log = logging.getLogger(__name__)

PPM = 1_000_000
OPEN_WAIT_NS = 45 * 10**9
"""So long a generation that begins waits for room on its journal's disk."""
RESUME_WAIT_NS = 10 * 10**9
"""So long a planner that takes over waits for a node before it goes on without it."""
ANSWERS = (MixtureChanged, SkipAccepted, StreamRewound)
"""They go to the node that asked; the others hear of it, too."""


class ClusterHost(Protocol):
    """What a job asks of the planner's service."""

    @property
    def term(self) -> int:
        """Of this planner."""
        ...

    def now_ns(self) -> int:
        """Return the monotonic clock."""
        ...

    def capacities(self) -> Mapping[str, int]:
        """Return the loader workers of each node that may load, by name; 0 of one that is drained."""
        ...

    def send(
        self, node: str, job: str, generation: int, message: Message, frames: tuple[bytes, ...] = ()
    ) -> None:
        """Send to a node; where it is gone it is lost."""

    def journal(self, job: str) -> JournalPlace:
        """Return where a job's journal lies."""
        ...

    def address(self, node: str) -> tuple[str, str]:
        """Return the endpoint of a node's exchange, and its public key (empty: none)."""
        ...

    def is_silent(self, node: str) -> bool:
        """True of a node that is not heard now: it will be heard again, or be lost."""
        ...

    def keep(self, job: str, record: bytes) -> None:
        """Keep what a planner that takes over has to know of the running generation; empty: nothing."""


@dataclass
class _Node:
    """A node with what it said of this job."""

    name: str
    is_ready: bool = False
    released_step: int = -1


@dataclass
class _Resumption:
    """A planner that takes over waits for nodes."""

    wait_until_ns: int
    is_told: bool = False


class ClusterJob:
    """One job. Every method is called in the planner's one thread."""

    def __init__(self, identity: str, host: ClusterHost) -> None:
        self.identity = identity
        self._host = host
        self._nodes: dict[str, _Node] = {}
        self._job: ResolvedJob | None = None
        self._job_bytes = b""
        self._job_digest = ""
        self._ranks = RankReports()
        self._number = 0
        self._generation: ClusterGeneration | None = None
        """The last one that was begun, running or not."""
        self._planning: JobPlanning | None = None
        self._asking = ""
        """Node whose request is being answered."""
        self._failing = ""
        """Node that told its own ranks why the job fails."""
        self._is_running = False
        """False until every node has its part of the generation."""
        self._unsaid: list[tuple[Message, tuple[bytes, ...]]] = []
        """What planning said before."""
        self._plans: dict[int, StepPlan] = {}
        """Of steps that are not released everywhere."""
        self._stalled_begin = False
        """A generation may begin once its journal can be written."""
        self._give_up_ns = 0
        self._resuming: _Resumption | None = None
        """A planner that takes over waits for the nodes of a generation."""
        self._record = b""

    # -- what the service looks at -----------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """True where no node has anything to do with the job any more."""
        return not self._nodes and self._planning is None and self._resuming is None

    @property
    def is_waiting(self) -> bool:
        """True where something is to be tried again soon: a journal, nodes that have not come back."""
        stalled = self._planning is not None and bool(self._planning.stalled)
        is_gathering = self._stalled_begin or bool(self._ranks.conflict)
        return stalled or is_gathering or self._resuming is not None

    @property
    def generation(self) -> int:
        """Number of the generation that was begun last."""
        return self._number

    def status(self) -> dict[str, Any]:
        """Return what `msdctl cluster` shows of the job."""
        generation = self._generation
        return {
            "job": self.identity,
            "name": "" if self._job is None else self._job.name,
            "generation": self._number,
            "state": "planning" if self._planning is not None else "waiting",
            "awaited_ranks": self._ranks.awaited[:32],
            "nodes": [
                {
                    "node": node.name,
                    "ranks": [] if (report := self._ranks.of(node.name)) is None else report.ranks,
                    "released_step": node.released_step,
                }
                for node in self._nodes.values()
            ],
            "owners": {}
            if generation is None or self._job is None
            else {
                source.name: [generation.begin.nodes[node] for node in nodes]
                for source, nodes in zip(
                    self._job.sources, generation.owners.now.nodes, strict=True
                )
            },
        }

    # -- ranks gather ------------------------------------------------------------------------------

    def ranks_started(self, node: str, message: RanksStarted, frames: tuple[bytes, ...]) -> None:
        """Take what a node says of its ranks; a generation begins where all wait for it.

        Raises:
            ProtocolError: Frames are missing.
        """
        self._nodes.setdefault(node, _Node(node))
        self._ranks.take(node, message, frames)
        if not message.ranks and not self._may_have_readers():
            self._all_left()
            return
        self._number = max(self._number, message.generation)
        self._settle_gathering()

    def _may_have_readers(self) -> bool:
        """False where no rank is left; one of a node that a new planner waits for may be."""
        if self._ranks:
            return True
        current = self._generation
        if current is None or not (self._is_running or self._resuming):
            return False
        nodes = [current.begin.nodes[place] for place in self._rank_places()]
        return any(not self._ranks.is_without(node) for node in nodes)

    def _rank_places(self) -> set[int]:
        """Return the nodes of the generation that were placed ranks and are not gone."""
        current = self._generation
        return set() if current is None else set(current.begin.rank_nodes) - current.gone

    def _all_left(self) -> None:
        """The ranks of all nodes left: nothing is planned until they come back."""
        self._end_planning()
        for name in self._nodes:
            self._tell(name, RanksGone())

    def ranks_gone(self) -> frozenset[int]:
        """Return the ranks of the running generation that left; of silent nodes nothing is known."""
        current = self._generation
        if current is None or not self._is_running:
            return frozenset()
        found = set()
        for rank, place in enumerate(current.begin.rank_nodes):
            node = current.begin.nodes[place]
            report = self._ranks.of(node)
            has_left = self._ranks.is_without(node) or (
                report is not None and rank not in report.ranks
            )
            if place in current.gone or has_left:
                found.add(rank)
        return frozenset(found)

    def awaits_ranks_of(self) -> str:
        """Return the training job of a pass of validation whose ranks are waited for, or nothing."""
        if not self._ranks.awaited:
            return ""
        return next((report.parent for report in self._ranks.all().values()), "")

    def will_not_come(self, gone: frozenset[int]) -> None:
        """Ranks left the training job: a pass that waits for one of them does not begin."""
        refused = self._ranks.will_not_come(gone)
        if refused is not None:
            self._refuse(refused.error)

    def _settle_gathering(self) -> None:
        before = self._ranks.conflict
        for outcome in self._ranks.settle(self._host.now_ns(), self._host.is_silent):
            match outcome:
                case Awaited(ranks):
                    for node in self._nodes:
                        self._tell(node, AwaitedRanks(ranks[:64]))
                case Refused(error, node) if node:
                    self._tell(node, StartRefused(encode_error(error)))
                case Refused(error):
                    self._refuse(error)
                case Complete(tree, first, state):
                    self._begin(tree, first, state)
        if self._ranks.conflict and not before:
            log.info("job %s: %s", self.identity, self._ranks.conflict)

    def _refuse(self, error: MsdError) -> None:
        """Tell all ranks that wait that no generation begins."""
        self._ranks.refuse_waiting()
        for node in self._nodes:
            self._tell(node, StartRefused(encode_error(error)))

    # -- a generation begins -----------------------------------------------------------------------

    def _begin(self, tree: ClientPlaceTree, first: RanksStarted, state: bytes) -> None:
        offer = self._ranks.offer(first.job_digest)
        if offer is not None:
            self._job_bytes, self._job = offer
            self._job_digest = first.job_digest
        job = self._job
        assert job is not None and self._job_digest == first.job_digest
        self._end_planning()
        self._number += 1
        reports = self._ranks.all()
        with_ranks = list(reports)
        capacities = self._host.capacities()
        nodes = [*with_ranks, *(name for name in capacities if name not in with_ranks)]
        place = {name: number for number, name in enumerate(nodes)}
        rank_nodes = [0] * tree.rank_count
        for name, report in reports.items():
            for rank in report.ranks:
                rank_nodes[rank] = place[name]
        order = OpenJob(
            unpack_map(self._job_bytes),
            first.mesh,
            state,
            min(report.horizon_steps for report in reports.values()),
            "",
            None,
            max(report.steps_kept for report in reports.values()),
            next((r.forget_after for r in reports.values() if r.forget_after is not None), None),
            rank_nodes,
        )
        planning = self._open(order)
        if planning is None:
            self._number -= 1
            return
        owners = self._assign(job, planning.shares(), nodes, capacities)
        begin = BeginGeneration(
            first.name,
            first.job_digest,
            first.mesh,
            first.stage,
            nodes,
            rank_nodes,
            owners.encode(),
            [list(self._host.address(name)) for name in nodes],
        )
        placed = ClientPlaceTree.from_mesh(dict(first.mesh), rank_nodes)
        self._generation = ClusterGeneration(self._number, begin, ByStep(owners), placed, order)
        self._planning = planning
        planning.tell_plans = self._tell_plans
        self._ranks.begun()
        for name in nodes:
            node = self._nodes.setdefault(name, _Node(name))
            node.is_ready = False
            node.released_step = -1
            self._tell(name, begin, () if name in with_ranks else (self._job_bytes, state))

    def _open(self, order: OpenJob) -> JobPlanning | None:
        """Return the planning of a generation; None where it is refused, or has to wait."""
        try:
            planning = JobPlanning.begin(
                order, self._host.term, self._hear, self._host.journal(self.identity)
            )
        except JournalUnavailableError as error:
            now_ns = self._host.now_ns()
            if not self._stalled_begin:
                self._give_up_ns = now_ns + OPEN_WAIT_NS
                log.warning("job %s waits: %s", self.identity, error.message)
            self._stalled_begin = may_pass(error) and now_ns < self._give_up_ns
            if not self._stalled_begin:
                self._refuse(error)
            return None
        except LeadershipLostError:
            raise  # whoever leads next begins it
        except MsdError as error:
            self._stalled_begin = False
            self._refuse(error)
            return None
        self._stalled_begin = False
        return planning

    def _assign(
        self,
        job: ResolvedJob,
        shares: Sequence[float],
        nodes: list[str],
        capacities: Mapping[str, int],
    ) -> Owners:
        former: dict[int, tuple[int, ...]] = {}
        last = self._generation
        if last is not None and len(last.owners.now.nodes) == len(job.sources):
            for source, owners in enumerate(last.owners.now.nodes):
                names = [last.begin.nodes[node] for node in owners]
                former[source] = tuple(nodes.index(name) for name in names if name in nodes)
        able = able_nodes(enumerate(nodes), capacities)
        return assign(
            [int(share * PPM) for share in shares],
            [source.lane_count for source in job.sources],
            [source.order_class == "streaming" for source in job.sources],
            able,
            former,
        )

    def node_ready(self, node: str, generation: int) -> None:
        """A node has its part; with the last one steps are planned."""
        current = self._generation
        if current is None or generation != current.number or self._is_running:
            return
        self._nodes[node].is_ready = True
        if all(self._nodes[name].is_ready for name in current.begin.nodes):
            self._is_running = True
            self._keep()
            self._pass_on_unsaid()

    def node_refused(self, node: str, generation: int, message: NodeRefused) -> None:
        """A node can't do its part: nobody begins, or goes on; without a node that only loads, one may."""
        current = self._generation
        if current is None or generation != current.number or self._is_echo(message.error):
            return
        error = decode_error(**message.error)
        error.message = f"node {node}: {error.message}"
        if not self._is_running:
            self._give_up(error)
        elif self._ranks.of(node) is None:
            self._tell(node, JobClosed(error.message))
            self._take_out(node, error.message, error.message)
        else:
            self._fail_elsewhere(node, error)

    def stopped(self, node: str, message: StopJob) -> None:
        """An operator ended the job on a node: it ends on all."""
        if self._is_echo(message.error):
            return
        error = decode_error(**message.error)
        if self._is_running:
            self._fail_elsewhere(node, error)
            return
        self._give_up(error)
        if not self._may_have_readers():
            self.close(error.message)

    def _is_echo(self, error: dict[str, Any]) -> bool:
        """True where all nodes were told to end, or at some step for this very reason."""
        failure = None if self._planning is None else self._planning.failure
        return failure is not None and (failure.next_step == 0 or failure.error == error)

    def _fail_elsewhere(self, node: str, error: MsdError) -> None:
        if self._planning is not None:
            self._failing = node
            self._planning.fail(error, is_at_once=True)
            self._failing = ""

    def _give_up(self, error: MsdError) -> None:
        """Take back a generation that was to begin."""
        current = self._generation
        self._end_planning()
        if current is not None:
            for name in current.begin.nodes:
                if name in self._nodes and self._ranks.of(name) is None:
                    self._tell(name, JobClosed(error.message))
                    self._forget(name)
        self._refuse(error)

    def _end_planning(self) -> None:
        """Plan no more in the present generation."""
        if self._planning is not None:
            self._planning.close()
            self._planning = None
        self._is_running = False
        self._resuming = None
        self._unsaid = []
        self._plans = {}
        self._keep()

    def abandon(self) -> None:
        """Another planner leads: keep nothing open, say nothing."""
        if self._planning is not None:
            self._planning.close()
            self._planning = None

    def close(self, reason: str) -> None:
        """Nobody reads the job any more."""
        self._end_planning()
        for name in self._nodes:
            self._tell(name, JobClosed(reason))
        self._nodes.clear()
        self._ranks.clear()

    def _forget(self, node: str) -> None:
        self._nodes.pop(node, None)
        self._ranks.forget(node)

    def _keep(self) -> None:
        """Have what a successor must know kept, once it changes."""
        current = self._generation
        record = b""
        if current is not None and self._is_running:
            record = current.encode(self._job_bytes)
        if record != self._record:
            self._record = record
            self._host.keep(self.identity, record)

    # -- a generation runs -------------------------------------------------------------------------

    def message(
        self, node: str, generation: int, message: Message, frames: tuple[bytes, ...]
    ) -> None:
        """Take what a node says of the running generation.

        Raises:
            ProtocolError: It is no message of a node.
        """
        if isinstance(message, CloseJob):
            self._node_left(node, generation)
            return
        planning, current = self._planning, self._generation
        if planning is None or not self._is_running or generation != self._number:
            return
        if current is None or node not in current.living_names():
            return  # its sources are others' now
        self._asking = node
        if isinstance(message, StepReleased):
            self._released(node, message.step)
        else:
            planning.take(message, frames)

    def advance(self) -> None:
        """Plan on, as far as may be; try again what has to wait."""
        if self._ranks.conflict:
            self._settle_gathering()
        if self._resuming is not None:
            self._try_to_resume()
        elif self._stalled_begin:
            self._settle_gathering()
        elif self._planning is not None and self._is_running:
            self._planning.advance()

    def fail(self, error: MsdError) -> bool:
        """Say that the job can't go on; False where nothing runs."""
        if self._planning is None:
            return False
        self._planning.fail(error)
        return True

    def _released(self, node: str, step: int) -> None:
        """A node is done with all steps up to this one."""
        own = self._nodes[node]
        own.released_step = max(own.released_step, step)
        self._settle_released()

    def _settle_released(self) -> None:
        current, planning = self._generation, self._planning
        if current is None or planning is None:
            return
        names = current.living_names()
        if not names:
            return
        everywhere = min(self._nodes[name].released_step for name in names)
        for done in [step for step in self._plans if step <= everywhere]:
            del self._plans[done]
        planning.step_released(everywhere)

    def _hear(self, message: Message, frames: tuple[bytes, ...]) -> None:
        """Take what planning says; before all nodes are ready it waits."""
        if self._is_running:
            self._pass_on(message, frames)
        else:
            self._unsaid.append((message, frames))

    def _pass_on_unsaid(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for message, frames in unsaid:
            self._pass_on(message, frames)

    def _pass_on(self, message: Message, frames: tuple[bytes, ...]) -> None:
        current = self._generation
        assert current is not None
        if isinstance(message, ANSWERS):
            is_refused = message.error is not None
            for name in current.living_names():
                if name == self._asking or not is_refused:
                    self._tell(name, message, frames)
            return
        if isinstance(message, SourcesStarved):
            for node in current.living():
                own = [
                    source for source in message.sources if node in current.owners.now.nodes[source]
                ]
                if own:
                    self._tell(current.begin.nodes[node], SourcesStarved(own))
            return
        if isinstance(message, JobOpened) and self._resuming is None:
            for name in current.living_names():
                own_node = self._nodes[name]
                own_node.released_step = max(own_node.released_step, message.step - 1)
        for name in current.living_names():
            if name != self._failing:
                self._tell(name, message, frames)

    def _tell_plans(self, plans: list[StepPlan], states: list[list[Any]]) -> None:
        """Tell every node its part of these plans."""
        self._plans.update((plan.step, plan) for plan in plans)
        self._tell_parts(plans, states)

    def _tell_parts(self, plans: Sequence[StepPlan], states: list[list[Any]]) -> None:
        current = self._generation
        assert current is not None
        count = len(current.begin.nodes)
        split = [
            split_plan(plan, current.tree, current.owners.at(plan.step), count) for plan in plans
        ]
        deltas = [pack_delta(parts[0].plan.delta_bytes) for parts in split]
        for node in current.living():
            self._tell_node(node, [parts[node] for parts in split], deltas, states)

    def _tell_node(
        self, node: int, parts: list[NodePart], deltas: list[bytes], states: list[list[Any]]
    ) -> None:
        headers: list[dict[str, Any]] = []
        counts: list[int] = []
        frames: list[bytes] = []
        exports: list[list[list[int]]] = []
        current = self._generation
        assert current is not None
        for part, delta in zip(parts, deltas, strict=True):
            header, own = part.plan.encode()
            own[DELTA_FRAME] = delta
            heads, columns = encode_exports(
                [it for it in part.exports if it.consumer not in current.gone]
            )
            headers.append(header)
            counts.append(len(own) + 1)
            frames += [*own, columns]
            exports.append(heads)
        message = PlansMade(headers, counts, states, exports)
        self._tell(current.begin.nodes[node], message, tuple(frames))

    def _tell(self, node: str, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        self._host.send(node, self.identity, self._number, message, frames)

    # -- nodes leave -------------------------------------------------------------------------------

    def _node_left(self, node: str, generation: int) -> None:
        """A node has no rank of the job any more, and let it go."""
        if generation and generation != self._number:
            return
        self._take_out(node, "all ranks left", "its ranks left")

    def node_lost(self, node: str, reason: str) -> None:
        """A node is gone for good, with its ranks and all that it had read."""
        if node in self._nodes:
            self._take_out(node, f"node {node} is lost: {reason}", reason)

    def _take_out(self, node: str, close_reason: str, reason: str) -> None:
        self._ranks.left(node)
        has_readers = self._may_have_readers()
        self._forget(node)
        if not has_readers:
            self.close(close_reason)
            return
        self._drop_node(node, reason)
        self._settle_gathering()

    def _drop_node(self, node: str, reason: str) -> None:
        current = self._generation
        if current is None or node not in current.begin.nodes:
            return
        place = current.begin.nodes.index(node)
        if place in current.gone:
            return
        if self._planning is None:
            return
        if not self._is_running:
            self._give_up(NodeLostError(f"node {node} is lost: {reason}", node=node))
            return
        current.gone.add(place)
        self.reassign(f"node {node}: {reason}", is_gone=True)

    def reassign(self, reason: str, *, is_gone: bool = False) -> None:
        """Deal the sources to the nodes that take part and may load; the stream stays the same.

        Args:
            reason: For people.
            is_gone: A node takes part no more: the others are told, whoever loads.
        """
        current, planning, job = self._generation, self._planning, self._job
        if current is None or planning is None or job is None or not self._is_running:
            return
        living = current.living()
        names = [current.begin.nodes[node] for node in living]
        capacities = self._host.capacities()
        able = able_nodes(zip(living, names, strict=True), capacities)
        loading = {it.node for it in able if it.workers}
        before = dict(enumerate(current.owners.now.nodes))
        staying = {source: nodes for source, nodes in before.items() if loading.issuperset(nodes)}
        is_lost = any(current.gone.intersection(nodes) for nodes in before.values())
        owners = assign(
            [int(share * PPM) for share in planning.shares()],
            current.owners.now.lanes,
            [source.order_class == "streaming" for source in job.sources],
            able,
            before,
            # What a node has read ahead stays good, unless another one came to share the load.
            staying if len(staying) < len(before) else None,
        )
        if owners == current.owners.now and not is_gone:
            return
        if is_lost:  # what it had read is gone: others read it again
            from_step = min(self._nodes[name].released_step for name in names) + 1
            state = planning.state_behind(from_step - 1)
        else:
            from_step, state = planning.next_step, planning.planned_state()
        log.warning("job %s: other nodes load from step %d on: %s", job.name, from_step, reason)
        current.owners.change(owners, from_step)
        changed = OwnersChanged(
            owners.encode(),
            sorted(current.gone),
            from_step,
            state.cursor_places(),
            state.carried[:5].T.tolist(),
            reason,
        )
        for name in names:
            self._tell(name, changed)
        if is_lost:
            again = [plan for step, plan in sorted(self._plans.items()) if step >= from_step]
            if again:
                self._tell_parts(again, [])
        planning.loaders_changed()
        self._keep()
        self._settle_released()

    # -- a planner takes over ----------------------------------------------------------------------

    def restore(self, record: bytes, now_ns: int) -> None:
        """Take up a generation that another planner planned: its nodes will say where they stand.

        Raises:
            ProtocolError: The record is not one.
        """
        current, self._job_bytes, self._job = ClusterGeneration.decode(record)
        self._generation, self._number = current, current.number
        self._job_digest = current.begin.job_digest
        self._record = record
        self._resuming = _Resumption(now_ns + RESUME_WAIT_NS)

    def node_resumes(self, node: str, generation: int, message: ResumeNode) -> None:
        """A node says where it stands in a generation that this planner takes over."""
        current, resuming = self._generation, self._resuming
        is_of_it = current is not None and generation == current.number
        if current is None or resuming is None or not is_of_it or node not in current.begin.nodes:
            lost = PlannerUnavailableError(
                f"the planner knows nothing of generation {generation}: connect again with the last "
                "state"
            )
            self._host.send(node, self.identity, generation, JobFailed(encode_error(lost)))
            return
        known = self._nodes.setdefault(node, _Node(node))
        known.is_ready = True
        known.released_step = message.released_step
        self._try_to_resume()

    def _try_to_resume(self) -> None:
        current, resuming = self._generation, self._resuming
        assert current is not None and resuming is not None
        names = current.living_names()
        here = [name for name in names if name in self._nodes and self._nodes[name].is_ready]
        missing = [name for name in names if name not in here]
        if missing and self._host.now_ns() < resuming.wait_until_ns:
            return
        if not here:
            self._resuming = None
            self._generation = None
            self._keep()
            return
        # Nodes have what they were told of the steps behind it, and compare.
        released = min(self._nodes[name].released_step for name in here)
        order = replace(current.order, resume_step=released + 1)
        try:
            planning = JobPlanning.take_over(
                order, self._host.term, self._hear, self._host.journal(self.identity)
            )
        except JournalUnavailableError as error:
            if not resuming.is_told:
                resuming.is_told = True
                log.warning("job %s waits: %s", self.identity, error.message)
            return
        self._planning = planning
        planning.tell_plans = self._tell_plans
        self._is_running = True
        self._pass_on_unsaid()
        self._resuming = None
        log.info("job %s goes on behind step %d", self.identity, released)
        planning.step_released(released)
        for name in missing:
            self._forget(name)
            current.gone.add(current.begin.nodes.index(name))
        if missing and not self._may_have_readers():
            self.close(f"nodes {', '.join(missing)} did not come back")
        elif missing:
            self.reassign(f"nodes {', '.join(missing)} did not come back", is_gone=True)
