"""The user's hook that sets weights by losses: gathers what trainers report, asks it on a cadence.

The hook `fn(step, losses, weights, **options)` runs in a process of its own, of the interpreter that
the job names, as all code of the user does; never on the daemon's loop. What it gives is a mixture
change like any other: journalled, with the step that it holds from, before a plan uses it. That event
is what a resume replays; the hook itself is not asked again for steps that have it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from federation.model.job import LossHookRule
from msd_client.contract.errors import ConfigError, MsdError, TransformError

if TYPE_CHECKING:
    from msd_daemon.transforms.user_process import UserProcess

log = logging.getLogger(__name__)

ChangeMixture = Callable[[dict[str, float]], Awaitable[int]]


class LossHook:
    """One job's hook.

    Args:
        rule: The hook and its cadence.
        source_names: Of the job.
        weights: Returns the weights in force by source.
        change: Journals other weights and returns the step they hold from.
    """

    def __init__(
        self,
        rule: LossHookRule,
        source_names: tuple[str, ...],
        weights: Callable[[], dict[str, float]],
        change: ChangeMixture,
    ) -> None:
        self._rule = rule
        self._names = source_names
        self._weights = weights
        self._change = change
        self._process: UserProcess | None = None
        self._sums: dict[str, tuple[float, int]] = {}
        self._asked_step: int | None = None
        """Step of the last call; the first report begins the first interval."""
        self._task: asyncio.Task[None] | None = None
        self._error: MsdError | None = None
        self._is_closed = False
        self.calls = 0
        """Calls that gave weights, or None for no change."""
        self.changed_step: int | None = None
        """Step that the last change holds from."""

    def report(self, step: int, losses: Mapping[str, float]) -> None:
        """Take what a rank reports; ask the hook where its interval is over.

        Args:
            step: The step that the losses are of.
            losses: Mean loss by source; those that are not finite are left out.

        Raises:
            ConfigError: A source is unknown, or the last call failed: each failure is told once.
        """
        unknown = sorted(set(losses) - set(self._names))
        if unknown:
            raise ConfigError(
                f"report_loss: no source is named {unknown[0]!r}: write losses of "
                f"{', '.join(self._names)}",
                source=unknown[0],
            )
        for name, loss in losses.items():
            if math.isfinite(loss):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + loss, count + 1)
        if self._asked_step is None or step < self._asked_step:
            self._asked_step = step
        elif step - self._asked_step >= self._rule.every_steps and self._sums:
            self._ask(step)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ask no more; the process ends, after a call that it is in."""
        self._is_closed = True
        if self._task is None:
            self._end_process()

    def _ask(self, step: int) -> None:
        if self._task is not None or self._is_closed:
            return  # still at the last one; what is reported counts for the next
        losses = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums, self._asked_step = {}, step
        self._task = asyncio.get_running_loop().create_task(
            self._run(step, losses, self._weights())
        )

    async def _run(self, step: int, losses: dict[str, float], weights: dict[str, float]) -> None:
        call = self._rule.call.call
        try:
            given = await asyncio.to_thread(self._called, step, losses, weights)
            if given is not None and not self._is_closed:
                self.changed_step = await self._change(given)
                log.info(
                    "hook %s at step %d: %s from step %d", call, step, given, self.changed_step
                )
            self.calls += 1
        except (MsdError, TimeoutError) as error:
            log.error("hook %s at step %d: %s", call, step, error)
            told = error.message if isinstance(error, MsdError) else "the planner did not answer"
            self._error = ConfigError(
                f"mixture.hook {call} at step {step}: {told}: the weights stay as they are; mend it",
                hook=call,
                step=step,
            )
        finally:
            self._task = None
            if self._is_closed:
                self._end_process()

    def _called(
        self, step: int, losses: dict[str, float], weights: dict[str, float]
    ) -> dict[str, float] | None:
        if self._process is None:
            # Few jobs have a hook: the daemon starts without the transforms.
            from msd_daemon.transforms.user_process import open_user_call

            call = self._rule.call
            self._process = open_user_call(
                call, memory_bytes_max=call.memory_bytes_max, sample_s_max=call.sample_s_max
            )
        given: Any = self._process.call_values(step, losses, weights)
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise TransformError(f"gave {type(given).__name__}, no map of weights and not None")
        for name, weight in given.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise TransformError(f"gave {weight!r} as the weight of {name}, no number")
        return {name: float(weight) for name, weight in given.items()}

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
