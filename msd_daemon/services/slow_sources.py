"""Has others take over a part of a slow source's share, where the job says so (`slow_sources`).

Looks once a second at which sources ranks wait for; what federation.planning.substitution makes of it
is journalled as a mixture change of the kind `substitute`. How much of its share each source has is
kept in the job's folder, so that a source gets it back after a restart too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from federation.model.job import ResolvedJob, SlowSourcesRule
from federation.planning.substitution import Substitution
from msd_client.contract.errors import MsdError
from msd_daemon.services.generation import Generation
from msd_daemon.sources.index import write_durably

log = logging.getLogger(__name__)

FILE = "slow_sources.json"
FILE_BYTES_MAX = 1 << 20

ChangeMixture = Callable[[dict[str, float]], Awaitable[int]]


class SlowSources:
    """Of one job.

    Args:
        job: The job.
        rule: Its own.
        folder: The job's.
        change: Journals weights and returns the step they hold from.
    """

    def __init__(
        self, job: ResolvedJob, rule: SlowSourcesRule, folder: Path, change: ChangeMixture
    ) -> None:
        self._names = [source.name for source in job.sources]
        self._job_name = job.name
        self._file = folder / FILE
        self._change = change
        self._substitution = Substitution(rule, len(self._names), *self._kept())
        self._task: asyncio.Task[None] | None = None
        self._from_step = 0
        """Step that the last change holds from."""
        self.changes = 0

    def look(self, generation: Generation, now_ns: int) -> None:
        """Decide, and have it journalled in the background."""
        if self._task is not None or not generation.totals.wanted:
            return
        if generation.next_plan_step <= self._from_step:
            return  # what was asked for is not in force yet
        slow = generation.starved_sources if generation.is_hungry else ()
        weights = self._substitution.look(now_ns, slow, generation.totals.wanted)
        if weights is not None:
            named = dict(zip(self._names, weights, strict=True))
            self._task = asyncio.get_running_loop().create_task(self._run(named))

    async def _run(self, weights: dict[str, float]) -> None:
        try:
            self._from_step = await self._change(weights)
            self.changes += 1
            log.warning(
                "job %s: from step %d on others take over of slow sources: %s", self._job_name,
                self._from_step, self.status()["has"] or "nothing, they keep up again",
            )  # fmt: skip
            await asyncio.to_thread(self._keep)
        except (MsdError, TimeoutError) as error:
            log.warning("job %s: shares of slow sources stay: %s", self._job_name, error)
        finally:
            self._task = None

    def _keep(self) -> None:
        factors, expected = self._substitution.asked
        kept = {"sources": self._names, "factors": factors, "expected": expected}
        try:
            write_durably(self._file, json.dumps(kept).encode())
        except OSError as error:
            log.warning("job %s: %s can't be written: %s", self._job_name, self._file, error)

    def _kept(self) -> tuple[list[float], list[float]]:
        """Return factors and shares as they were kept, of the same sources; else none."""
        try:
            with self._file.open("rb") as file:
                kept = json.loads(file.read(FILE_BYTES_MAX))
            factors = [float(value) for value in kept["factors"]]
            expected = [float(value) for value in kept["expected"]]
            is_sound = kept["sources"] == self._names and all(0 < value <= 1 for value in factors)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return [], []
        if not is_sound or len(factors) != len(self._names) or len(expected) != len(factors):
            return [], []
        return factors, expected

    def status(self) -> dict[str, Any]:
        """Return how much of its own share each slow source has, for msdctl."""
        factors = self._substitution.factors
        has = {name: round(f, 4) for name, f in zip(self._names, factors, strict=True) if f < 1}
        return {"has": has, "changes": self.changes, "changed_step": self._from_step}

    def close(self) -> None:
        """Decide no more."""
        if self._task is not None:
            self._task.cancel()
