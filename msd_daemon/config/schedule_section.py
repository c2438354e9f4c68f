"""Resolves the user's own functions of a mixture: `schedule` of the step, `hook` of the losses.

A schedule is asked once, at submit. It runs as all code of the user does: from a copy by content, in
a process of the interpreter that the job names. What it says becomes points, so a job never needs it
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from federation.model.job import LossHookRule, MixtureSchedule
from msd_client.contract.errors import ConfigError, TransformError
from msd_daemon.config.faults import MISSING, Fault, fault_of_message
from msd_daemon.config.job_file import JobFile, MixtureFile, check_weight
from msd_daemon.config.mixture_pieces import of_function
from msd_daemon.config.mixture_section import spread_weights
from msd_daemon.config.user_code import resolve_user_call
from msd_daemon.transforms.user_process import UserProcess, open_user_call

CALL_S_MAX = 60.0
MEMORY_BYTES_MAX = 8 << 30
PATH = "mixture.schedule"


def resolve_schedule(
    mixture: MixtureFile,
    source_names: tuple[str, ...],
    steps: int | None,
    base_dir: Path,
    store_dir: Path,
    faults: list[Fault],
    notes: list[str],
    *,
    apart: frozenset[str] = frozenset(),
) -> MixtureSchedule | None:
    """Return the function's weights as points.

    Args:
        mixture: With a schedule.
        source_names: All sources of the job.
        steps: Of the job: the schedule ends there unless it says `until`.
        base_dir: Folder that relative paths start from.
        store_dir: Where copies of the user's code lie.
        faults: Receives what is wrong; the result is None then.
        notes: Receives what was decided.
        apart: Sources that `*` leaves out.
    """
    schedule = mixture.schedule
    assert schedule is not None
    until = schedule.until or steps
    found: list[Fault] = []
    if until is None:
        problem = "the job has no steps, so nothing says how far the function goes"
        found.append(Fault(f"{PATH}.until", MISSING, problem, "write until: 100000, or steps"))
    if mixture.every is not None and mixture.every.unit != "steps":
        problem = "a schedule is a function of the step"
        found.append(Fault("mixture.every", mixture.every.start, problem, "write steps, 100"))
    section = schedule.as_transform(schedule.python)
    call = resolve_user_call(PATH, section, base_dir, store_dir, found)
    if call is None or until is None or found:
        faults += found
        return None
    opened = open_user_call(call, memory_bytes_max=MEMORY_BYTES_MAX, sample_s_max=CALL_S_MAX)
    with opened as process:
        asked = _Asked(process, source_names, apart, found)
        width = None if mixture.every is None else mixture.every.start
        points = of_function(asked.weights_at, until, width, len(source_names), found)
    faults += found
    if found:
        return None
    notes.append(
        f"mixture: {schedule.call} (copy {call.digest}) gave {len(points)} pieces of "
        f"{width or 'a hundredth of the'} steps until step {until}"
    )
    return MixtureSchedule(mixture.unit, points)


def resolve_hook(
    file: JobFile, base_dir: Path, store_dir: Path, faults: list[Fault]
) -> LossHookRule | None:
    """Return the hook and its cadence, None where there is none or a fault was found."""
    hook = None if file.mixture is None else file.mixture.hook
    if hook is None:
        return None
    section = hook.as_transform(hook.python)
    call = resolve_user_call("mixture.hook", section, base_dir, store_dir, faults)
    return None if call is None else LossHookRule(call, hook.every)


class _Asked:
    """The function, its answers checked."""

    def __init__(
        self,
        process: UserProcess,
        source_names: tuple[str, ...],
        apart: frozenset[str],
        faults: list[Fault],
    ) -> None:
        self._process = process
        self._names = source_names
        self._apart = apart
        self._faults = faults

    def weights_at(self, step: int) -> dict[str, float] | None:
        """Return the weight of every source, None where there is a fault."""
        place = f"{PATH}({step})"
        remedy = "mend the function: it gives {source: weight}"
        try:
            given = self._process.call_values(step)
        except (TransformError, ConfigError) as error:
            problem = " | ".join(line.strip(" |") for line in error.message.splitlines())
            self._faults.append(Fault(place, step, problem, "mend the function"))
            return None
        if not isinstance(given, Mapping):
            problem = f"gave {type(given).__name__}, no map of weights"
            self._faults.append(Fault(place, given, problem, remedy))
            return None
        named = dict(given)
        count = len(self._faults)
        for name, weight in named.items():
            try:
                check_weight(weight)
            except ValueError as error:
                self._faults.append(fault_of_message(f"{place}.{name}", weight, str(error)))
        if len(self._faults) > count:
            return None
        weights = spread_weights(place, named, self._names, self._apart, self._faults)
        return weights if len(self._faults) == count else None
