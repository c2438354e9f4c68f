"""Rewinds asked for by an operator: of a job that runs, or of one that is over, from its journal."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from federation.messages import StreamRewound
from msd_client.contract.errors import ConfigError
from msd_client.contract.step_numbers import STEP_MAX
from msd_daemon.services.job_folder import JobFolder


@dataclass(frozen=True)
class RewindOrder:
    """What `msdctl rewind` asks for."""

    step: int | None
    """None where rewinds are taken back."""
    skip: tuple[int, int] | None
    forget_after: int | None
    wants_state: bool
    """The data's state of that step is answered."""
    is_noted: bool
    """False where the state alone is wanted: the job goes on as it is."""

    @property
    def changes_running(self) -> bool:
        """True where a job that runs has to end its generation."""
        return self.step is not None and self.is_noted

    @staticmethod
    def of(body: dict[str, Any]) -> RewindOrder:
        """Return the order of a request.

        Raises:
            ConfigError: It holds what is no step, or nothing to do.
        """
        is_clear = body.get("clear") is True
        step = _number(body.get("to"), "to")
        if (step is None) != is_clear:
            raise ConfigError("rewind: give the step to go back to, or clear to take rewinds back")
        skip = body.get("skip")
        return RewindOrder(
            step,
            None if skip is None else step_run(skip),
            _number(body.get("forget_after"), "forget_after"),
            body.get("wants_state") is True,
            body.get("state_only") is not True,
        )


class RunningJob(Protocol):
    """A session as a rewind sees it."""

    @property
    def folder(self) -> JobFolder:
        """The job's files."""

    async def rewind(
        self, step: int, skip: tuple[int, int] | None, forget_after: int | None
    ) -> StreamRewound:
        """Journal a rewind and end the generation."""


def step_run(value: object) -> tuple[int, int]:
    """Return first and end of a run of steps.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"steps is {value!r}: write the first, and the one behind the last")
    first, end = (_number(part, "steps") for part in value)
    if first is None or end is None:
        raise ConfigError(f"steps is {value!r}: write the first, and the one behind the last")
    return first, end


async def rewind_running(job: RunningJob, order: RewindOrder) -> dict[str, Any]:
    """Rewind a job whose planner has the journal; return what msdctl is told."""
    assert order.step is not None
    told: dict[str, Any] = {}
    if order.wants_state:  # first: what can't be written is not rewound to
        told["state"] = await asyncio.to_thread(_state_of, job.folder.journal, order.step)
    done = await job.rewind(order.step, order.skip, order.forget_after)
    return told | {
        "step": done.step,
        "plan_step": done.plan_step,
        "forgotten": done.forgotten,
        "was_running": True,
    }


def rewind_at_rest(path: Path, order: RewindOrder) -> dict[str, Any]:
    """Rewind a job that no planner plans; blocks. Return what msdctl is told.

    Raises:
        NotFoundError: There is no journal, or it does not hold the step.
        ResourceError: The journal can't be read or written.
    """
    from federation.journal import Journal, read_journal
    from federation.stream_events import clear_rewinds, rewind

    read_journal(path).close()  # none is made by asking
    told: dict[str, Any] = {"was_running": False}
    if order.step is not None and order.wants_state:
        told["state"] = _state_of(path, order.step)
    if not order.is_noted:
        return told | {"step": order.step}
    journal = Journal(path)
    try:
        if order.step is None:
            return told | {"cleared": clear_rewinds(journal)}
        done = rewind(
            journal, order.step, event_number=0, skip=order.skip, forget_after=order.forget_after
        )
    finally:
        journal.close()
    return told | {
        "step": done.step, "plan_step": done.plan_step, "forgotten": done.forgotten,
    }  # fmt: skip


def _state_of(path: Path, step: int) -> bytes:
    from federation.journal import read_journal
    from federation.replay import restore_state

    journal = read_journal(path)
    try:
        return restore_state(journal, step).encode()
    finally:
        journal.close()


def _number(value: object, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= STEP_MAX:
        raise ConfigError(f"{what} is {value!r}: write the number of a step, from 0 to {STEP_MAX}")
    return value
