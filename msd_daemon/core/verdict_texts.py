"""How verdicts say numbers, and the window of looks that they speak of. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msd_daemon.core.looks import JobLook, PlannerLook

WINDOW_LOOKS = 11
"""Looks that rates are taken over: ten seconds."""


def window_of(looks: Sequence[JobLook]) -> tuple[JobLook, int]:
    """Return the first look of the window behind the newest, and its length in nanoseconds."""
    first = looks[-min(len(looks), WINDOW_LOOKS)]
    return first, looks[-1].at_ns - first.at_ns


def seconds(nanoseconds: int) -> str:
    """Return a duration for people."""
    value = nanoseconds / 1e9
    if value >= 600:
        return f"{value / 60:.0f} min"
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


PLANNER_HELP = "a planner that is stopped goes on after kill -CONT, one that ended is to be started; nodes find it"


def planner_named(planner: PlannerLook) -> str:
    """Return a planner that is not there, and why."""
    return f"a planner: {planner.silence or 'none is there'}"


def planner_command(planner: PlannerLook) -> str:
    """Return what to type about a planner that is not there."""
    if not planner.place:
        return "msdctl cluster" if planner.process is None else "msdctl doctor"
    return f"systemctl status msd-planner   (on the host of {planner.place})"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
