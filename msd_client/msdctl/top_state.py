"""What `msdctl top` shows: which job, which table, from which row on. Pure; keys come in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

Map = dict[str, Any]

VIEWS = {
    "o": "overview",
    "s": "sources",
    "r": "ranks",
    "n": "nodes",
    "w": "workers",
    "y": "why",
}
"""Key to view."""
HELP = "q quit · tab next job · o overview · s sources · r ranks · n nodes · w workers · y why · ↑↓ rows"
KEPT_POINTS = 120


@dataclass
class TopState:
    """Moves with keys and looks."""

    view: str = "overview"
    row: int = 0
    """First row of the table."""
    job: str = ""
    """Identity of the job that is shown; empty: the first."""
    is_over: bool = False
    looks: dict[str, deque[Map]] = field(default_factory=dict)
    """By job: figures of the last looks, oldest first."""

    def press(self, key: str, snapshot: Map) -> None:
        """Take a key: a character, or `up`, `down`, `pageup`, `pagedown`, `tab`, `escape`."""
        if key in ("q", "Q", "\x03"):
            self.is_over = True
        elif key in VIEWS:
            self.view, self.row = VIEWS[key], 0
        elif key == "escape":
            self.view, self.row = "overview", 0
        elif key == "tab":
            self._next_job(snapshot)
        else:
            step = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10}.get(key, 0)
            self.row = max(0, min(self.row + step, self.rows(snapshot) - 1))

    def _next_job(self, snapshot: Map) -> None:
        jobs = [str(job.get("id")) for job in snapshot.get("jobs", [])]
        if jobs:
            here = jobs.index(self.job) if self.job in jobs else 0
            self.job, self.row = jobs[(here + 1) % len(jobs)], 0

    def shown(self, snapshot: Map) -> Map | None:
        """Return the job that is shown, None where no job runs."""
        jobs: list[Map] = snapshot.get("jobs", [])
        found = [job for job in jobs if job.get("id") == self.job]
        return next(iter(found or jobs), None)

    def rows(self, snapshot: Map) -> int:
        """Return how many rows the table of this view has."""
        job = self.shown(snapshot) or {}
        if self.view == "nodes":
            return len((snapshot.get("cluster") or {}).get("nodes", [])) or 1
        key = {"sources": "sources", "ranks": "ranks_now", "workers": "workers_now"}.get(self.view)
        return len(job.get(key) or []) if key else 1

    def look(self, snapshot: Map) -> None:
        """Keep the figures of a look; jobs that are over are forgotten."""
        present = {}
        for job in snapshot.get("jobs", []):
            identity = str(job.get("id"))
            points = self.looks.get(identity)
            if points is None:
                points = deque(job.get("history") or [], maxlen=KEPT_POINTS)
            if job.get("now") and (not points or points[-1].get("at") != job["now"].get("at")):
                points.append(job["now"])
            present[identity] = points
        self.looks = present
