"""Plans of a job by its real loaders, in this process, for verbs that look at one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, StepPlanner
from federation.planning.step_change import first_state
from federation.planning.strategies import Strategy
from msd_daemon.inline_feed import InlineFeed


def real_plans(job: ResolvedJob, tree: ClientPlaceTree, strategy: Strategy) -> Iterator[StepPlan]:
    """Yield the plans of a job from its first step on; records are read as they are drawn.

    Args:
        job: The resolved job.
        tree: The mesh.
        strategy: The job's own or built-in one.

    Raises:
        DataError: The draw reached a fault that the job does not skip, or a source's end.
        StoreError: A store does not answer.
    """
    planner = StepPlanner(job, tree, first_state(job), strategy)
    with closing(InlineFeed(job)) as feed:
        while not isinstance(planned := feed.next_step(planner), Ended):
            yield planned
