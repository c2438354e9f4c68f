"""The verdict on a job: who waits for whom, for which source, at which stage, since when. Pure.

How it is found stands in core/verdict_rules.py; here is what it says, and since when it has held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from msd_daemon.core.looks import JobLook

Side = Literal["loader", "trainer", "neither"]
Level = Literal["fine", "slow", "stalled"]

LOOKS_MAX = 30
"""Looks that a verdict rests on: one a second."""
EVIDENCE_MAX = 5
STEADY_LOOKS = 3
"""A level that is less bad must hold for so many looks: a loader that is too slow is so in bursts."""
CAUSES = (
    "none",
    "trainer_paced",
    "not_running",
    "waiting_for_ranks",
    "starting",
    "stream_ended",
    "job_failed",
    "job_stopped",
    "store_throttled",
    "store_slow",
    "disk_slow",
    "cpu_bound",
    "user_code",
    "worker_stuck",
    "worker_lost",
    "bad_record",
    "mixture_changed",
    "memory_full",
    "planner_gone",
    "journal_stalled",
    "node_slow",
    "constructor_stuck",
    "loader_slow",
    "rank_stopped",
    "rank_behind",
    "ranks_hang",
)
"""All that `Verdict.cause` may be; a closed set, for metrics and alerts."""


@dataclass(frozen=True)
class Verdict:
    """Who waits for whom.

    Attributes:
        side: `loader`: ranks wait for data; `trainer`: data waits for ranks; `neither`: nobody waits
            for long, or the job does not run.
        level: `fine`, `slow` (waits, and goes on) or `stalled` (nothing moved for a while).
        cause: One of CAUSES.
        stage: Where on the way of a byte: join, store, read, transform, worker, record, pool, planner,
            journal, exchange, constructor, ring; empty where none is meant.
        summary: One line for people.
        source, rank, node: What it is about, None where nothing single is.
        since_ns: Since when it has held, on the monotonic clock.
        evidence: What it rests on, at most EVIDENCE_MAX lines.
        command: What to type next.
    """

    side: Side
    level: Level
    cause: str
    stage: str
    summary: str
    source: str | None = None
    rank: int | None = None
    node: str | None = None
    since_ns: int = 0
    evidence: tuple[str, ...] = ()
    command: str = ""

    @property
    def about(self) -> tuple[str, str, str, str | None, int | None]:
        """What two verdicts have in common that are one and the same."""
        rank = None if self.level == "fine" else self.rank  # who is last changes all the time
        return (self.side, self.level, self.cause, self.source, rank)

    def plain(self, unix_offset_s: float) -> dict[str, Any]:
        """Return it for JSON: `since` in Unix seconds instead of `since_ns`.

        Args:
            unix_offset_s: Unix time minus the monotonic clock.
        """
        found = asdict(self)
        found["evidence"] = list(self.evidence)
        found["since"] = round(found.pop("since_ns") / 1e9 + unix_offset_s, 1)
        return found


def during_passes(verdict: Verdict, passes: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a job whose ranks read passes of validation: those are what counts then.

    Args:
        verdict: On the training stream, from which they take nothing meanwhile.
        passes: On the passes that run; none: nothing changes.
    """
    if not passes or verdict.side == "loader":
        return verdict
    worst = max(passes, key=lambda it: _LEVELS[it.level])
    if worst.level == "fine":
        return replace(
            verdict, side="neither", level="fine", cause="none", stage="", rank=None,
            summary="a pass of validation runs, and nobody waits for long", command="",
        )  # fmt: skip
    return replace(worst, summary=f"in a pass of validation: {worst.summary}")


class VerdictTrack:
    """Verdicts on one job, look after look.

    A verdict keeps its `since` while it stays what it is, and one that is less bad replaces another
    only once it has held for STEADY_LOOKS.

    Args:
        judge: Gives the verdict on a run of looks, the newest last.
    """

    def __init__(self, judge: Callable[[Sequence[JobLook]], Verdict]) -> None:
        self._judge = judge
        self._looks: deque[JobLook] = deque(maxlen=LOOKS_MAX)
        self._present: Verdict | None = None
        self._better: deque[Verdict] = deque(maxlen=STEADY_LOOKS)

    @property
    def present(self) -> Verdict | None:
        """The verdict that holds; None before the first look."""
        return self._present

    @property
    def looks(self) -> Sequence[JobLook]:
        """The looks that it rests on."""
        return tuple(self._looks)

    def take(self, look: JobLook) -> Verdict:
        """Take a look in and return the verdict that holds now."""
        if self._looks and self._looks[-1].generation != look.generation:
            self._looks.clear()  # totals begin anew
        self._looks.append(look)
        found = self._judge(tuple(self._looks))
        present = self._present
        if present is not None and _is_better(found, present) and look.state == "running":
            self._better.append(found)
            if len(self._better) < STEADY_LOOKS:
                return present
        self._better.clear()
        if present is not None and present.about == found.about:
            found = replace(found, since_ns=min(present.since_ns, found.since_ns or look.at_ns))
        elif not found.since_ns:
            found = replace(found, since_ns=look.at_ns)
        self._present = found
        return found


_LEVELS = {"fine": 0, "slow": 1, "stalled": 2}


def _is_better(new: Verdict, old: Verdict) -> bool:
    return _LEVELS[new.level] < _LEVELS[old.level]
