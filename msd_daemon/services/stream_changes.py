"""Changes of a running job's stream: its mixture, steps left out, a rewind, and the job's hook."""

from __future__ import annotations

from typing import Any, Protocol

from federation.messages import StreamRewound
from federation.model.job import ResolvedJob
from msd_client.contract.errors import MsdError, StreamRewoundError, UsageError
from msd_daemon.services.generation import Generation
from msd_daemon.services.job_folder import JobFolder
from msd_daemon.services.loss_hook import LossHook
from msd_daemon.services.planner_port import PlannerPort
from msd_daemon.services.slow_sources import SlowSources


class StreamOwner(Protocol):
    """The session whose job is changed."""

    job: ResolvedJob
    state: str
    generation: Generation | None

    @property
    def folder(self) -> JobFolder:
        """The job's files."""
        ...

    @property
    def is_over(self) -> bool:
        """True where nobody is to be served any more."""
        ...

    def failed(self, error: MsdError) -> None:
        """The generation can't go on."""


class StreamChanges:
    """Of one job.

    Args:
        owner: The session.
        planner: Where changes are accepted.
    """

    def __init__(self, owner: StreamOwner, planner: PlannerPort) -> None:
        self._owner = owner
        self._planner = planner
        self._hook: LossHook | None = None
        self._slow: SlowSources | None = None

    @property
    def folder(self) -> JobFolder:
        """The job's files."""
        return self._owner.folder

    async def change_mixture(
        self, weights: dict[str, float], at: int | None = None
    ) -> tuple[int, int]:
        """Journal new weights from a step on, by default the first that is possible.

        Returns:
            The step from which they hold, and the first one behind which states know of them.

        Raises:
            ConfigError: A source is unknown, a weight is no weight, or the step is planned already.
            UsageError: The job does not run.
        """
        owner = self._owner
        if owner.generation is None:
            raise UsageError(f"job {owner.job.name!r} is {owner.state}: start iterating first")
        generation = owner.generation
        step = await self._planner.change_mixture(weights, at)
        return step, generation.mixture_known_from

    async def skip_steps(self, first: int, end: int) -> dict[str, int]:
        """Leave the content of plan steps out; return where, and behind which step states know.

        Raises:
            ConfigError: It is no run of steps, or begins with one that is planned already.
            UsageError: The job does not run.
        """
        if self._owner.generation is None or self._owner.is_over:
            raise UsageError(
                f"job {self._owner.job.name!r} is {self._owner.state}: start iterating first"
            )
        generation = self._owner.generation
        answer = await self._planner.skip_steps(first, end)
        return {
            "first": answer.first,
            "end": answer.end,
            "step": answer.step,
            "known_from": generation.mixture_known_from,
        }

    async def rewind(
        self, step: int, skip: tuple[int, int] | None, forget_after: int | None
    ) -> StreamRewound:
        """Journal a rewind and end the generation: every rank gets StreamRewoundError.

        Raises:
            ConfigError: The skip is none, or begins before the step.
            NotFoundError: The journal does not hold the step.
        """
        answer = await self._planner.rewind(step, skip, forget_after)
        self._owner.failed(
            StreamRewoundError(
                f"job {self._owner.job.name!r} was rewound to step {step}: load the checkpoint of step "
                f"{step} (or an earlier one) into model, optimizer and data, and iterate again; "
                f"msdctl rewind {self._owner.job.name} --to {step} --state FILE writes the data's state",
                step=step,
            )
        )
        return answer

    def report_loss(self, step: int, losses: dict[str, float]) -> None:
        """Hand a rank's losses to the job's hook.

        Raises:
            UsageError: The job has no hook.
            ConfigError: A source is unknown, or the hook failed.
        """
        job = self._owner.job
        rule = job.mixture_hook
        if rule is None:
            raise UsageError(
                f"job {job.name!r} has no mixture.hook to report losses to: add one, or leave "
                "report_loss out"
            )
        if self._hook is None:
            names = tuple(source.name for source in job.sources)
            self._hook = LossHook(rule, names, self._weights_in_force, self._hook_change)
        self._hook.report(step, losses)

    def watch(self, now_ns: int) -> None:
        """Have others take over from sources that can't keep up, where the job says so."""
        owner = self._owner
        rule, generation = owner.job.slow_sources, owner.generation
        if rule is None or generation is None or owner.is_over:
            return
        if self._slow is None:
            self._slow = SlowSources(owner.job, rule, owner.folder.path, self._substitute)
        self._slow.look(generation, now_ns)

    async def _substitute(self, weights: dict[str, float]) -> int:
        return await self._planner.change_mixture(weights, kind="substitute")

    def _weights_in_force(self) -> dict[str, float]:
        generation = self._owner.generation
        wanted = generation.totals.wanted if generation is not None else []
        names = [source.name for source in self._owner.job.sources]
        return dict(zip(names, wanted, strict=False))

    async def _hook_change(self, weights: dict[str, float]) -> int:
        return await self._planner.change_mixture(weights, kind="hook")

    def status(self) -> dict[str, Any]:
        """Return the parts of the job's status that are the hook's and the slow sources'."""
        found: dict[str, Any] = {}
        if self._hook is not None:
            hook = {"calls": self._hook.calls, "changed_step": self._hook.changed_step}
            found["mixture_hook"] = hook
        if self._slow is not None:
            found["slow_sources"] = self._slow.status()
        return found

    def close(self) -> None:
        """End the hook's process, and change nothing more."""
        if self._slow is not None:
            self._slow.close()
        if self._hook is not None:
            self._hook.close()
