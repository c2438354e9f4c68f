"""One answer with all that a page, a full-screen view or metrics need of a node: plain JSON values.

The local request is `snapshot` with `job` (name or identity; default all) and `history_s` (default 0,
at most a day). The answer, every key present unless said otherwise::

    schema       1; grows where a key changes its meaning, new keys come without that
    at           Unix seconds
    node         this node's name
    daemon       as in `msdctl status --json`
    cluster      as in `msdctl cluster --json`, or null: this daemon is of no cluster, or no planner
                 answers (`cluster_error` then says why, else it is empty)
    jobs         a list, each as in `msdctl status --json` (name, id, state, mesh, ranks, rings, pool,
                 sources, workers, tokens, ...) and beside that:
        verdict      side, level, cause, stage, summary, source, rank, node, since (Unix s), evidence
                     (lines), command; see core/verdict.py. Absent before the first look
        now          figures of the last second, see core/points.py: tokens_per_s, steps_per_s, wait_ratio,
                     wait_ratio_max, ready_ratio, pool_used_bytes, workers_cpus; {} before two looks
        ranks_now    a list: rank, dp_group, node, state, batches, waited_s, released_ago_s (null:
                     nothing yet), waiting_s (0: it does not wait), load (its group's part of the
                     heaviest group's attention pairs in the last planned step, 0-1, null without one)
        workers_now  a list: role, number, pid, state, activity, source, shard, activity_s, cpu_s
        sources_now  a list: name, wanted, host, workers, is_waited_for, waited_for_s, shifted_from
        step         of the last planned step, null without one: step, plan_step, rows, valid_tokens,
                     groups (dp_group, rows, tokens, pairs) and flow ([source, dp group, tokens])
        history      points of core/points.py with `cause` of the verdict, ten seconds apart, oldest
                     first, as far back as `history_s` asks
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from federation.model.plan import StepPlan
from msd_client.contract.errors import MsdError
from msd_daemon.core.looks import JobLook
from msd_daemon.observe.history import KEPT_S
from msd_daemon.observe.observer import POINT_S, POINTS_KEPT, Observer
from msd_daemon.observe.past import ASK_S
from msd_daemon.services.job_session import JobSession

SCHEMA = 1
GROUPS_SHOWN_MAX = 1024
"""Groups of a step that are told one by one."""


async def node_snapshot(
    observer: Observer,
    status: dict[str, Any],
    sessions: Mapping[str, JobSession],
    *,
    node: str,
    ask_cluster: Callable[[], Awaitable[dict[str, Any]]] | None,
    history_s: float,
    uid: int,
) -> dict[str, Any]:
    """Return the answer.

    Args:
        observer: The daemon's.
        status: The answer to `status` of the jobs that are wanted.
        sessions: By identity.
        node: This node's name.
        ask_cluster: Asks the cluster's planner; None where there is none.
        history_s: How far back histories are wanted.
        uid: Whose; 0: everybody's.
    """
    jobs = [
        await job_snapshot(observer, sessions[job["id"]], job, history_s, uid)
        for job in status["jobs"]
        if job["id"] in sessions
    ]
    cluster, error = None, ""
    if ask_cluster is not None:
        try:
            async with asyncio.timeout(ASK_S):
                cluster = await ask_cluster()
        except MsdError as failure:
            error = failure.message
        except TimeoutError:
            error = f"the planner did not answer within {ASK_S:g} s"
    return {
        "schema": SCHEMA,
        "at": time.time(),
        "node": node,
        "daemon": status["daemon"],
        "cluster": cluster,
        "cluster_error": error,
        "jobs": jobs,
    }


async def job_snapshot(
    observer: Observer, session: JobSession, status: dict[str, Any], history_s: float, uid: int
) -> dict[str, Any]:
    """Return a job's part.

    Args:
        observer: The daemon's.
        session: The job's.
        status: Its status.
        history_s: How far back its history is wanted.
        uid: Who asks.
    """
    look = observer.look(session)
    generation = session.generation
    step = None
    if generation is not None and generation.last_plan is not None:
        step = step_view(generation.last_plan, [source.name for source in session.job.sources])
    history: list[dict[str, Any]] = []
    history_s = min(max(history_s, 0.0), KEPT_S)
    if history_s:
        history = await _history(observer, session, history_s, uid)
    return (
        {"now": {}}
        | status
        | {
            "ranks_now": [] if look is None else _ranks(session, look, step),
            "workers_now": [] if look is None else _workers(look),
            "sources_now": [] if look is None else _sources(look),
            "step": step,
            "history": history,
        }
    )


async def _history(
    observer: Observer, session: JobSession, history_s: float, uid: int
) -> list[dict[str, Any]]:
    points, since = observer.points(session), time.time() - history_s
    if history_s <= POINTS_KEPT * POINT_S and points and points[0].get("at", 0) <= since + POINT_S:
        return [point for point in points if point.get("at", 0) >= since]
    records = await observer.past(uid, job=session.identity, since=since, until=time.time())
    return [
        record["point"] | {"cause": record["verdict"]["cause"]}
        for record in records
        if record.get("point") and record["point"]["span_s"] >= POINT_S / 2
    ]


def step_view(plan: StepPlan, names: list[str]) -> dict[str, Any]:
    """Return who computes what of a step, and where it comes from.

    Args:
        plan: The step.
        names: Of the job's sources.

    Returns:
        See `step` at the top; `pairs` are token pairs that attend to each other, n (n + 1) / 2 of a
        segment of n tokens.
    """
    groups = min(plan.dp_count, GROUPS_SHOWN_MAX)
    group = plan.row_dp[plan.row]
    lengths = plan.length.astype(np.int64)
    tokens = np.bincount(group, lengths, plan.dp_count)
    pairs = np.bincount(group, lengths * (lengths + 1) // 2, plan.dp_count)
    rows = np.bincount(plan.row_dp, minlength=plan.dp_count)
    flow = np.bincount(plan.source * plan.dp_count + group, lengths, len(names) * plan.dp_count)
    flow = flow.reshape(len(names), plan.dp_count)
    return {
        "step": plan.step,
        "plan_step": plan.plan_step,
        "rows": len(plan.row_dp),
        "row_tokens": plan.row_tokens,
        "valid_tokens": plan.valid_tokens,
        "groups": [
            {
                "dp_group": number,
                "rows": int(rows[number]),
                "tokens": int(tokens[number]),
                "pairs": int(pairs[number]),
            }
            for number in range(groups)
        ],
        "flow": [
            [names[source], int(number), int(flow[source, number])]
            for source, number in np.argwhere(flow[:, :groups]).tolist()
        ],
    }


def _ranks(session: JobSession, look: JobLook, step: dict[str, Any] | None) -> list[dict[str, Any]]:
    loads = {}
    if step is not None:
        heaviest = max((group["pairs"] for group in step["groups"]), default=0)
        loads = {it["dp_group"]: it["pairs"] / max(heaviest, 1) for it in step["groups"]}
    found = []
    for rank in look.ranks:
        group = session.tree.dp_group(rank.rank)
        ago_s = (look.at_ns - rank.released_ns) / 1e9
        waiting_s = (look.at_ns - rank.waiting_since_ns) / 1e9 if rank.waiting_since_ns else 0.0
        found.append(
            {
                "rank": rank.rank,
                "dp_group": group,
                "node": look.node,
                "state": rank.process.state,
                "batches": rank.batches,
                "waited_s": round(rank.waited_ns / 1e9, 3),
                "released_ago_s": round(ago_s, 1) if rank.released_ns else None,
                "waiting_s": round(waiting_s, 1),
                "load": loads.get(group),
            }
        )
    return found


def _workers(look: JobLook) -> list[dict[str, Any]]:
    return [
        {
            "role": worker.role,
            "number": worker.number,
            "pid": worker.process.pid,
            "state": worker.process.state,
            "activity": worker.activity,
            "source": worker.source,
            "shard": worker.shard,
            "activity_s": round((look.at_ns - worker.since_ns) / 1e9, 1) if worker.since_ns else 0,
            "cpu_s": round(worker.process.cpu_ns / 1e9, 2),
        }
        for worker in look.workers
    ]


def _sources(look: JobLook) -> list[dict[str, Any]]:
    return [
        {
            "name": source.name,
            "wanted": source.wanted,
            "host": source.host,
            "workers": list(source.workers),
            "is_waited_for": source.is_starved,
            "waited_for_s": round(source.starved_ns / 1e9, 2),
            "shifted_from": source.shifted_from if source.shifted_ns else None,
        }
        for source in look.sources
    ]
