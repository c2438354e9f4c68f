"""A run without a daemon: steps planned in this process and journalled as the planner does it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from federation.journal import Journal, StepRecord
from federation.model.job import ResolvedJob, encode_job
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.calibrator import EVENT_KIND
from federation.planning.planner import Ended, StepPlanner
from federation.planning.step_change import first_state
from msd_client.contract.codec import pack
from msd_daemon.inline_feed import InlineFeed


def no_events(_strategy: Any, label: str = "") -> Any:
    """Decide against every event and snapshot."""
    return False


def planned_run(
    folder: Path,
    job: ResolvedJob,
    mesh: dict[str, int],
    steps: int,
    draw: Any = no_events,
    identity: str = "id",
) -> list[StepPlan]:
    """Plan steps as a planner process does, with a journal in a state folder; return the plans.

    Args:
        folder: The state folder.
        job: The resolved job, of two sources where `draw` makes events.
        mesh: Axes and sizes.
        steps: How many at most.
        draw: Of hypothesis: decides on events and snapshots; by default there are none.
        identity: Name of the job's folder.
    """
    tree = ClientPlaceTree.from_mesh(mesh)
    planner = StepPlanner(job, tree, first_state(job))
    journal = Journal(folder / "jobs" / identity / "journal.db")
    state = planner.state()
    names = [source.name for source in job.sources]
    number = journal.open_generation(
        0,
        state.encode(),
        job_digest=job.digest(),
        job=pack(encode_job(job)),
        mesh=pack({"mesh": [[axis, size] for axis, size in mesh.items()]}),
    )
    plans: list[StepPlan] = []
    with closing(InlineFeed(job)) as feed, closing(journal):
        for step in range(steps):
            if draw(st.booleans(), label=f"calibrated at {step}"):
                weights = draw(st.lists(st.integers(1, 9), min_size=2, max_size=2))
                journal.append_event(number, step, EVENT_KIND, pack({"weights": weights}))
                planner.weigh_cost(weights, step)
            if draw(st.booleans(), label=f"mixed at {step}"):
                shares = draw(st.lists(st.integers(1, 5), min_size=2, max_size=2))
                mix = dict(zip(names, map(float, shares), strict=True))
                planner.change_mixture(mix, step + 1)
                told = planner.state().event_number
                journal.append_event(number, step + 1, "mixture", pack(mix), told)
            plan = feed.next_step(planner)
            if isinstance(plan, Ended):
                break
            plans.append(plan)
            record = StepRecord(plan.step, plan.delta.encode(), plan.stream_digest)
            is_snapshot = draw(st.booleans(), label=f"snapshot behind {step}")
            snapshot = (step + 1, planner.state().encode()) if is_snapshot else None
            journal.append_steps(number, 1, [record], snapshot)
    return plans
