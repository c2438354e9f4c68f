"""Watches the jobs of a daemon: a look a second, the verdict that holds, and what history keeps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.looks import JobLook, PlannerLook
from msd_daemon.core.points import point_of, waited_sources
from msd_daemon.core.verdict import Verdict, VerdictTrack, during_passes
from msd_daemon.core.verdict_rules import judge
from msd_daemon.observe.history import HistoryFiles, HistoryWriter
from msd_daemon.observe.look_taker import LookedAt, LookTaker
from msd_daemon.services.job_session import JobSession

log = logging.getLogger(__name__)

POINT_S = 10.0
"""Between two points of a job's history."""
POINTS_KEPT = 360
"""In memory: an hour."""
HISTORY_DIR = "history"
QUIET = ("none", "trainer_paced")
"""Causes between which a job that is well goes to and fro: no news."""
VERDICTS_TOLD_MAX = 16
SUMMARY_TOLD_MAX = 300
"""To the planner of a cluster."""
AT_SLACK_S = 90.0
"""`why --at` takes what is known from so long before."""


@dataclass
class _Watched:
    """A job that is watched."""

    track: VerdictTrack
    shown: Verdict | None = None
    """The verdict on it, and on its passes of validation."""
    points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=POINTS_KEPT))
    base: tuple[JobLook, int, int] | None = None
    """Look, tokens and released steps at the last point."""
    last: tuple[JobLook, int, int] | None = None
    """Of the last look."""
    now: dict[str, Any] = field(default_factory=dict)
    """Figures between the last two looks."""


class Observer:
    """Of one daemon.

    Args:
        config: The daemon's.
        beside: What is no session's.
    """

    def __init__(self, config: DaemonConfig, beside: LookedAt) -> None:
        self._is_on = config.observe
        self._cpu_ns = 0
        self._beside = beside
        self._takes = LookTaker(config, beside)
        self._watched: dict[str, _Watched] = {}
        self._files = HistoryFiles(Path(config.state_dir) / HISTORY_DIR)
        self._writer: HistoryWriter | None = None
        self.offset_s = time.time() - time.monotonic()
        """Unix time minus the monotonic clock."""

    def tick(self, sessions: Iterable[JobSession], now_ns: int) -> None:
        """Take a look at every job; passes of validation are part of theirs."""
        if not self._is_on:
            return
        begun_ns = time.thread_time_ns()
        self._look_at(sessions, now_ns)
        self._cpu_ns += time.thread_time_ns() - begun_ns

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all looks and of what wrote history."""
        written_ns = 0 if self._writer is None else self._writer.cpu_ns
        return (self._cpu_ns + written_ns) / 1e9

    def _look_at(self, sessions: Iterable[JobSession], now_ns: int) -> None:
        self.offset_s = time.time() - now_ns / 1e9
        planner = self._takes.planner(now_ns)
        passes: dict[str, list[Verdict]] = {}
        seen = set()
        for session in sorted(sessions, key=lambda it: it.parent is None):  # passes first
            seen.add(session.identity)
            self._watch(session, planner, passes, now_ns)
        for identity in [identity for identity in self._watched if identity not in seen]:
            del self._watched[identity]
            self._takes.forget(identity)

    def last_look(self, session: JobSession, now_ns: int) -> None:
        """Look at a job that closes before the next tick: history is to say why it ended."""
        if self._is_on:
            self._watch(session, self._takes.planner(now_ns), {}, now_ns)

    def _watch(
        self,
        session: JobSession,
        planner: PlannerLook,
        passes: dict[str, list[Verdict]],
        now_ns: int,
    ) -> None:
        """Look at one job.

        Args:
            session: The job's.
            planner: A look at it.
            passes: Verdicts on passes of validation by their job's identity; a pass adds its own.
            now_ns: On the monotonic clock.
        """
        look = self._takes.job(session, planner, now_ns)
        watched = self._watched.setdefault(session.identity, _Watched(VerdictTrack(judge)))
        before = watched.shown
        verdict = watched.track.take(look)
        if session.parent is not None:
            if session.generation is not None:
                passes.setdefault(session.parent.identity, []).append(verdict)
            return
        watched.shown = shown = during_passes(verdict, passes.get(session.identity, ()))
        self._count(watched, session, look)
        self._keep(watched, session, shown, before)

    def _count(self, watched: _Watched, session: JobSession, look: JobLook) -> None:
        generation = session.generation
        if generation is None:
            watched.base = watched.last = None
            watched.now = {}
            return
        present = (look, generation.totals.tokens, look.step_released)
        last = watched.last
        if last is not None and last[0].generation == look.generation:
            watched.now = self._point(last, present)
        watched.last = present
        if watched.base is None or watched.base[0].generation != look.generation:
            watched.base = present

    def _point(
        self, old: tuple[JobLook, int, int], new: tuple[JobLook, int, int]
    ) -> dict[str, Any]:
        unix = new[0].at_ns / 1e9 + self.offset_s
        return point_of(old[0], new[0], (old[1], new[1]), (old[2], new[2]), unix)

    def _keep(
        self, watched: _Watched, session: JobSession, verdict: Verdict, before: Verdict | None
    ) -> None:
        """Keep a point every ten seconds, and every verdict that is another."""
        base, last = watched.base, watched.last
        is_new = before is None or (
            before.about != verdict.about
            and (before.level, verdict.level, before.cause in QUIET, verdict.cause in QUIET)
            != ("fine", "fine", True, True)
        )
        is_due = (
            base is not None
            and last is not None
            and (last[0].at_ns - base[0].at_ns) / 1e9 >= POINT_S - 0.5
        )
        if is_new:
            self._log(session, verdict)
        if not is_new and not is_due:
            return
        record: dict[str, Any] = {
            "at": round(time.time(), 1),
            "job": session.job.name,
            "id": session.identity,
            "uid": session.uid,
            "node": self._beside.node,
            "state": session.state,
            "verdict": verdict.plain(self.offset_s),
        }
        if base is not None and last is not None and base is not last:
            record["point"] = self._point(base, last)
            record["sources"] = waited_sources(base[0], last[0])
        if is_due:
            watched.points.append(record.get("point", {}) | {"cause": verdict.cause})
            watched.base = last
        if self._writer is None:
            self._writer = HistoryWriter(self._files)
        self._writer.put(record)

    def _log(self, session: JobSession, verdict: Verdict) -> None:
        level = logging.WARNING if verdict.level == "stalled" else logging.INFO
        log.log(
            level, "job %s: %s (%s, %s)",
            session.job.name, verdict.summary, verdict.side, verdict.level,
            extra={"event": "verdict", "job": session.job.name, "cause": verdict.cause,
                   "source": verdict.source, "rank": verdict.rank, "node": verdict.node},
        )  # fmt: skip

    # -- for those who ask -------------------------------------------------------------------------

    def status(self, session: JobSession) -> dict[str, Any]:
        """Return what a job's status has of it: `verdict` and `now`, none before the first look."""
        watched = self._watched.get(session.identity)
        if watched is None or watched.shown is None:
            return {}
        verdict = watched.shown.plain(self.offset_s)
        return {"verdict": verdict, "now": dict(watched.now)}

    def waits(self, sessions: Iterable[JobSession]) -> list[list[str]]:
        """Return [job, side, level, cause, summary] of the jobs for which somebody waits."""
        found = []
        for session in sessions:
            watched = self._watched.get(session.identity)
            verdict = None if watched is None else watched.shown
            if verdict is not None and verdict.level != "fine":
                summary = verdict.summary[:SUMMARY_TOLD_MAX]
                found.append(
                    [session.job.name, verdict.side, verdict.level, verdict.cause, summary]
                )
        return found[:VERDICTS_TOLD_MAX]

    def look(self, session: JobSession) -> JobLook | None:
        """Return the last look at a job."""
        watched = self._watched.get(session.identity)
        return None if watched is None or not watched.track.looks else watched.track.looks[-1]

    def points(self, session: JobSession) -> list[dict[str, Any]]:
        """Return the points of the last hour, oldest first."""
        watched = self._watched.get(session.identity)
        return [] if watched is None else list(watched.points)

    async def past(
        self, uid: int, *, job: str | None, since: float, until: float
    ) -> list[dict[str, Any]]:
        """Return history records between two Unix times that a user may see, oldest first."""

        def read() -> list[dict[str, Any]]:
            return [
                record
                for record in self._files.read(since, until)
                if uid in (0, record.get("uid")) and job in (None, record["job"], record["id"])
            ]

        return await asyncio.to_thread(read)

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.close()
        self._takes.close()
