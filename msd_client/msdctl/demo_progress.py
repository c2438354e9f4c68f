"""What the demo has seen so far, and the figures of its report. Pure: fed with messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msd_client.msdctl.demo_images import blind_loss

WARM_UP_STEPS = 20
"""Steps left out of times: first touches of memory, torch's own warm-up, an empty ring."""
PHASES = ("wait_s", "compute_s", "tp_s", "dp_s", "optimizer_s")


@dataclass
class StepView:
    """One step as all ranks saw it."""

    number: int
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds of the step, mean over ranks."""
        return _mean(message["step_s"] for message in self.ranks.values())

    @property
    def wait_s(self) -> float:
        """Seconds that a rank waited for data, mean over ranks."""
        return _mean(message["wait_s"] for message in self.ranks.values())

    @property
    def wait_s_max(self) -> float:
        """Seconds of the rank that waited longest: what the step lost at most."""
        return max(float(message["wait_s"]) for message in self.ranks.values())

    @property
    def head(self) -> dict[str, Any]:
        """The message of rank 0, which tells the step's global numbers."""
        return self.ranks[0]


class Progress:
    """Collects messages of ranks and answers of the daemon.

    Args:
        sources: Names in the order of the job.
        steps: Steps of the job.
        ranks: How many ranks speak.
    """

    def __init__(self, sources: Iterable[str], steps: int, ranks: int) -> None:
        self.sources = tuple(sources)
        self.steps = steps
        self.ranks = ranks
        self.views: list[StepView] = []
        """Complete steps, in order."""
        self.joined: dict[int, dict[str, Any]] = {}
        self.ended: set[int] = set()
        self.status: dict[str, Any] = {}
        self.change_step: int | None = None
        """First step drawn with the new weights."""
        self.memory_bytes_max = 0
        self._open: dict[int, StepView] = {}

    def take(self, message: Mapping[str, Any]) -> bool:
        """Take a rank's message; True where it completed a step."""
        kind, rank = message["kind"], int(message["rank"])
        if kind == "joined":
            self.joined[rank] = dict(message)
        elif kind == "ended":
            self.ended.add(rank)
        elif kind == "step":
            number = int(message["step"])
            view = self._open.setdefault(number, StepView(number))
            view.ranks[rank] = dict(message)
            if len(view.ranks) == self.ranks:
                self.views.append(self._open.pop(number))
                return True
        return False

    def take_status(self, status: dict[str, Any]) -> None:
        """Take the daemon's answer to `status`."""
        self.status = status
        self.memory_bytes_max = max(self.memory_bytes_max, sum(self.memory()))

    @property
    def last(self) -> StepView | None:
        """The newest complete step."""
        return self.views[-1] if self.views else None

    @property
    def job(self) -> dict[str, Any]:
        """The job's part of the newest status; empty before it runs."""
        for job in self.status.get("jobs", []):
            found: dict[str, Any] = job
            return found
        return {}

    def memory(self) -> tuple[int, int]:
        """Return anonymous and shared bytes of all loader-side processes, by their shares."""
        daemon = self.status.get("daemon", {})
        memories = [daemon.get("memory") or {}]
        memories += [process.get("memory") or {} for process in daemon.get("processes", [])]
        memories += [worker.get("memory") or {} for worker in self.job.get("workers", [])]
        return (
            sum(memory.get("pss_anon", 0) for memory in memories),
            sum(memory.get("pss_shmem", 0) for memory in memories),
        )

    def cpu_s(self) -> float:
        """Return CPU seconds of all loader-side processes."""
        daemon = self.status.get("daemon", {})
        processes = [daemon, *daemon.get("processes", []), *self.job.get("workers", [])]
        return float(sum(process.get("cpu_s") or 0.0 for process in processes))

    def ring_ready(self) -> list[tuple[int, int]]:
        """Return (ready, all) slots of each ring."""
        return [(ring.get("ready", 0), ring.get("slots", 0)) for ring in self.job.get("rings", [])]

    def shares(self, first: int, end: int | None = None) -> dict[str, Any] | None:
        """Return wanted and realised shares by drawn tokens over steps [first, end); None for no step."""
        views = [v for v in self.views if v.number >= first and (end is None or v.number < end)]
        if not views:
            return None
        drawn = [
            sum(column) for column in zip(*(v.head["drawn_tokens"] for v in views), strict=True)
        ]
        total = max(sum(drawn), 1)
        return {
            "first_step": views[0].number,
            "last_step": views[-1].number,
            "wanted": dict(zip(self.sources, views[-1].head["wanted_shares"], strict=True)),
            "realised": {s: tokens / total for s, tokens in zip(self.sources, drawn, strict=True)},
            "drawn_tokens": dict(zip(self.sources, drawn, strict=True)),
        }

    def warm(self) -> list[StepView]:
        """Return the steps that times are taken from."""
        skipped = min(WARM_UP_STEPS, len(self.views) // 4)
        return self.views[skipped:]

    def rate(self, last: int | None = None) -> float:
        """Return trained tokens a second over the warm steps, or the last so many."""
        views = self.warm() if last is None else self.views[-last:]
        seconds = sum(view.step_s for view in views)
        return sum(view.head["valid_tokens"] for view in views) / seconds if seconds else 0.0

    def wait_ratio(self, last: int | None = None) -> float:
        """Return data wait over step time, mean over ranks, over the warm steps or the last so many."""
        return self._ratio(self.warm() if last is None else self.views[-last:], "wait_s")

    def loss(self, *, at_end: bool) -> float | None:
        """Return the mean loss of the first steps, or of the last tenth."""
        count = max(1, len(self.views) // 10)
        views = self.views[-count:] if at_end else self.views[: min(count, 5)]
        return _mean(view.head["loss"] for view in views) if views else None

    @property
    def has_pictures(self) -> bool:
        """True where the ranks told of captions."""
        return bool(self.views) and "pictures" in self.views[0].head

    def caption_loss(self, *, at_end: bool) -> float | None:
        """Return the mean loss of a caption's token in the first steps, or the last tenth; None for no caption."""
        count = max(1, len(self.views) // 10)
        views = self.views[-count:] if at_end else self.views[: min(count, 5)]
        tokens = sum(view.head["caption_tokens"] for view in views)
        return sum(view.head["caption_loss_sum"] for view in views) / tokens if tokens else None

    def picture_figures(self) -> dict[str, Any]:
        """Return what the report says of pictures, nothing where the job has none."""
        if not self.has_pictures:
            return {}
        pictures = sum(view.head["pictures"] for view in self.views)
        tokens = sum(view.head["caption_tokens"] for view in self.views)
        return {
            "pictures": round(pictures),
            "caption_tokens": round(tokens),
            "caption_loss_blind": blind_loss(tokens / pictures) if tokens else None,
            "caption_loss_start": self.caption_loss(at_end=False),
            "caption_loss_end": self.caption_loss(at_end=True),
        }

    def figures(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        warm = self.warm()
        change = self.change_step
        anonymous, shared = self.memory()
        return {
            "steps": len(self.views),
            "ranks": self.ranks,
            "parameters": next((m["parameters"] for m in self.joined.values()), 0),
            "loss_start": self.loss(at_end=False),
            "loss_end": self.loss(at_end=True),
            "tokens": sum(view.head["valid_tokens"] for view in self.views),
            "tokens_per_s": self.rate(),
            "step_ms": 1e3 * _mean(view.step_s for view in warm),
            "warm_up_steps": len(self.views) - len(warm),
            "wait_pct": 100 * self._ratio(warm, "wait_s"),
            "wait_pct_slowest_rank": 100 * self._slowest_wait(warm),
            "wait_us_median": 1e6 * _median([view.wait_s for view in warm]),
            "wait_ms_max": 1e3 * max((view.wait_s_max for view in warm), default=0.0),
            "time_pct": {phase[:-2]: 100 * self._ratio(warm, phase) for phase in PHASES},
            "fill_pct": 100 * _mean(view.head["fill"] for view in self.views),
            "imbalance": _mean(view.head["imbalance"] for view in self.views),
            "mixture_changed_at": change,
            "mixture_before": self.shares(0, change),
            "mixture_after": self.shares(change) if change is not None else None,
            "memory_anonymous_bytes": anonymous,
            "memory_shared_bytes": shared,
            "memory_bytes_max": self.memory_bytes_max,
            "loader_cpu_s": self.cpu_s(),
            "loader_processes": 1
            + len(self.status.get("daemon", {}).get("processes", []))
            + len(self.job.get("workers", [])),
            **self.picture_figures(),
        }

    def _ratio(self, views: list[StepView], phase: str) -> float:
        messages = [message for view in views for message in view.ranks.values()]
        seconds = sum(message["step_s"] for message in messages)
        return sum(message[phase] for message in messages) / seconds if seconds else 0.0

    def _slowest_wait(self, views: list[StepView]) -> float:
        seconds = sum(view.step_s for view in views)
        return sum(view.wait_s_max for view in views) / seconds if seconds else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
