"""What was, and what is elsewhere: the verdict of a time of the last day, those of other nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msd_client.contract.errors import MsdError, NotFoundError
from msd_daemon.observe.history import KEPT_S
from msd_daemon.observe.observer import AT_SLACK_S, Observer

ASK_S = 2.0
"""Whoever asks why wants this node's answer, also where the planner hangs."""


async def why_then(
    observer: Observer, name: str | None, at: float | None, node: str, uid: int
) -> dict[str, Any]:
    """Return what history says of a job at a time.

    Args:
        observer: The daemon's.
        name: Name or identity of the job; None: the only one.
        at: Unix seconds; None: what it says last.
        node: This node's name.
        uid: Whose history may be seen; 0: everybody's.

    Returns:
        job, id, node, at (of the record), is_past, verdict, now (figures), sources.

    Raises:
        NotFoundError: It says nothing, or of several jobs.
    """
    until = time.time() + 1.0 if at is None else at  # times of records are rounded
    since = until - (KEPT_S if at is None else AT_SLACK_S)
    records = await observer.past(uid, job=name, since=since, until=until)
    found = sorted({record["job"] for record in records})
    if len(found) != 1:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until))
        if found:
            raise NotFoundError(
                f"several jobs ran at {when} on node {node}: name one of {', '.join(found)}"
            )
        what = "no job" if name is None else f"job {name!r}"
        raise NotFoundError(
            f"nothing is known of {what} at {when} on node {node}: its history goes back 24 h; "
            "msdctl jobs lists those that run"
        )
    ran = [record for record in records if record["verdict"]["cause"] != "not_running"]
    record = ran[-1] if at is None and ran else records[-1]  # how it went, not that it is over
    return {
        "job": record["job"],
        "id": record["id"],
        "node": record["node"],
        "at": record["at"],
        "is_past": True,
        "verdict": record["verdict"],
        "now": record.get("point", {}),
        "sources": record.get("sources", []),
    }


async def waits_of_others(
    ask_cluster: Callable[[], Awaitable[dict[str, Any]]] | None, job: str, node: str
) -> list[dict[str, str]]:
    """Return who waits for a job on the cluster's other nodes: node, side, level, cause, summary.

    Args:
        ask_cluster: Asks the cluster's planner; None where there is none.
        job: The job's name.
        node: This node.
    """
    if ask_cluster is None:
        return []
    try:
        async with asyncio.timeout(ASK_S):
            status = await ask_cluster()
    except (MsdError, TimeoutError):
        return []  # no planner answers: this node's own verdict says so where it matters
    return [
        {"node": row["node"], "side": side, "level": level, "cause": cause, "summary": summary}
        for row in status["nodes"]
        if row["node"] != node
        for name, side, level, cause, summary in row.get("verdicts", [])
        if name == job
    ]
