"""Traces of some steps of a job: begun for who asks, ended by steps or time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any

from msd_client.contract.errors import UsageError
from msd_daemon.core.step_trace import StepTrace, chrome_events
from msd_daemon.services.job_session import JobSession

STEPS_MAX = 1000
WAIT_S_MAX = 300.0
EVENTS_SENT_MAX = 60_000
"""What one control message holds."""


async def trace_steps(
    session: JobSession, steps: int, wait_s: float, planner_pid: int | None
) -> dict[str, Any]:
    """Trace the next steps of a job and return them as events of Chrome's format.

    Args:
        session: The job's.
        steps: How many, 1 to STEPS_MAX.
        wait_s: Give what there is after so long.
        planner_pid: Of the node's planner.

    Returns:
        events; steps: that were given back meanwhile; is_complete: False where the time was up first,
        or the generation ended; dropped: events that were too many; unix_offset_us: Unix time minus the
        clock of the events.

    Raises:
        UsageError: The job does not run, somebody traces it, or the numbers are out of range.
    """
    generation = session.generation
    if not 1 <= steps <= STEPS_MAX or not 0 < wait_s <= WAIT_S_MAX:
        raise UsageError(
            f"trace of {steps} steps within {wait_s:g} s: write 1 to {STEPS_MAX} steps, and at most "
            f"{WAIT_S_MAX:g} s"
        )
    if generation is None:
        raise UsageError(f"job {session.job.name!r} is {session.state}: there is no step to trace")
    if generation.trace is not None:
        raise UsageError(f"job {session.job.name!r} is traced already: wait for that to end")
    begin_ns, first = time.monotonic_ns(), generation.steps.released_step
    names = [source.name for source in session.job.sources]
    over = asyncio.Event()
    trace = StepTrace(names, first + steps, begin_ns, over.set)
    generation.trace = trace
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await over.wait()
    finally:
        generation.trace = None
    pids = {f"{role} {number}": pid for role, number, pid in _workers(session)}
    pids |= {f"rank {member.rank}": member.pid for member in session.members.values()}
    pids["daemon 0"] = os.getpid()
    if planner_pid is not None:
        pids["planner 0"] = planner_pid
    events = chrome_events(trace, _unlike(pids))
    done = generation.steps.released_step - first
    return {
        "job": session.job.name,
        "events": events[:EVENTS_SENT_MAX],
        "steps": min(done, steps),
        "is_complete": done >= steps,
        "dropped": trace.dropped + max(len(events) - EVENTS_SENT_MAX, 0),
        "unix_offset_us": round((time.time() - time.monotonic()) * 1e6),
    }


def _workers(session: JobSession) -> list[tuple[str, int, int]]:
    return [(worker.role, worker.number, worker.child.pid) for worker in session.workers.all()]


def _unlike(pids: dict[str, int]) -> dict[str, int]:
    """Return the lanes whose process is their own: ranks may be threads of one, lanes must differ."""
    counts: dict[int, int] = {}
    for pid in pids.values():
        counts[pid] = counts.get(pid, 0) + 1
    return {lane: pid for lane, pid in pids.items() if pid and counts[pid] == 1}
