"""A verdict as text: one line in `msdctl status`, at most ten in `msdctl why`."""

from __future__ import annotations

import time
from typing import Any

Map = dict[str, Any]

LINES_MAX = 10


def why_text(answer: Map, now: float) -> str:
    """Return the answer to `why` for people, at most LINES_MAX lines.

    Args:
        answer: The daemon's.
        now: Unix seconds.
    """
    verdict = answer.get("verdict")
    head = f"job {answer.get('job', '?')} on node {answer.get('node', '?')}"
    if answer.get("is_past"):
        head += f", as it was at {clock(answer.get('at'))}"
    if not isinstance(verdict, dict):
        return f"{head}\nnothing is known yet: a look is taken every second"
    lines = [head, f"{_side(verdict)}: {verdict.get('summary', '')}"]
    about = [
        f"{name} {verdict[name]}"
        for name in ("source", "stage", "rank", "node")
        if verdict.get(name) not in (None, "")
    ]
    lines.append(f"  {', '.join(about)}" if about else "")
    seen_at = answer.get("at", now) if answer.get("is_past") else now
    lines.append(f"  since {clock(verdict.get('since'))} ({_span(verdict.get('since'), seen_at)})")
    command = verdict.get("command")
    others = _others(answer.get("others") or [])
    room = LINES_MAX - len(lines) - bool(command) - len(others)
    lines += [f"  - {line}" for line in verdict.get("evidence", [])[:room]]
    lines += others
    if command:
        lines.append(f"next: {command}")
    return "\n".join(line for line in lines if line)


def _others(others: list[Map]) -> list[str]:
    """Return what other nodes say, in at most three lines."""
    worst = sorted(others, key=lambda it: (it.get("level") != "stalled", str(it.get("node"))))
    lines = [f"node {it.get('node')}: {_side(it)}: {it.get('summary')}" for it in worst[:2]]
    return lines + ([f"and {len(others) - 2} nodes more"] if len(others) > 2 else [])


def verdict_line(verdict: Map) -> str:
    """Return a verdict in one line, for a job's status."""
    since = f", since {clock(verdict.get('since'))}" if verdict.get("level") != "fine" else ""
    return f"{_side(verdict)}: {verdict.get('summary', '')}{since}"


def _side(verdict: Map) -> str:
    side, level = verdict.get("side", "?"), verdict.get("level", "fine")
    return side if level == "fine" else f"{side} ({level})"


def clock(unix: object) -> str:
    """Return a Unix time by the local clock, with its date where it is not of today."""
    if not isinstance(unix, (int, float)):
        return "?"
    then, today = time.localtime(unix), time.localtime()
    is_today = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)


def _span(since: object, until: float) -> str:
    if not isinstance(since, (int, float)):
        return "?"
    seconds = max(until - since, 0.0)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
