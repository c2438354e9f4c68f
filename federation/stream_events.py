"""Events of a stream: checked, made durable, then in force; and played back for older states.

Kinds: `mixture`, `hook` and `substitute` (weights from a plan step on), `skip` (a run of plan steps is left out),
`rewind` (states behind a step are no longer gone on from). An event is journalled before the planner
goes by it, so no plan that uses it leaves before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from federation.journal import Journal
from federation.journal_events import EventRecord
from federation.model.mixture import integer_shares
from federation.planning.planner import StepPlanner
from federation.replay import events_unknown_to, restore_state
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import (
    ConfigError,
    MsdError,
    StateMismatchError,
)
from msd_client.contract.skips import merged_skips, skipped_count, skips_without
from msd_client.contract.state import StreamState
from msd_client.contract.step_numbers import STEP_MAX

log = logging.getLogger(__name__)

MIXTURE_KINDS = ("mixture", "hook", "substitute")
SKIP = "skip"
REWIND = "rewind"
CONTENT_KINDS = (*MIXTURE_KINDS, SKIP)
"""Those that change what a step holds."""

PENDING_CHANGES_MAX = 64
"""Mixture changes that may wait for their steps; a state holds the shares of each."""
SKIPPED_STEPS_MAX = 10_000
"""Plan steps that may wait to be left out; each of them is read and drawn all the same."""


def change_mixture(
    planner: StepPlanner,
    journal: Journal,
    generation: int,
    weights: Mapping[str, float],
    plan_step: int,
    kind: str = "mixture",
) -> None:
    """Put weights in force from a plan step on, journalled first.

    Raises:
        ConfigError: They do not fit, or too many changes wait.
        ResourceError: The journal can't be written; nothing is changed.
    """
    before = planner.state()
    waiting = len(before.pending_steps)
    if waiting >= PENDING_CHANGES_MAX:
        raise ConfigError(
            f"{waiting} mixture changes wait for their steps already, at most {PENDING_CHANGES_MAX} "
            "may, as every state holds them: write a schedule into the job",
            seen=waiting,
            limit=PENDING_CHANGES_MAX,
        )
    planner.change_mixture(weights, plan_step)
    _append(planner, journal, generation, before, (plan_step, kind, pack(dict(weights))))


def skip_steps(
    planner: StepPlanner, journal: Journal, generation: int, first: int, end: int
) -> None:
    """Leave plan steps out, journalled first.

    Raises:
        ConfigError: It is no run of steps, comes too late, or too many wait.
        ResourceError: The journal can't be written; nothing is changed.
    """
    before = planner.state()
    check_skip(first, end)
    planner.skip_steps(first, end)
    after = planner.state()
    waiting = skipped_count(after.pending_skips, after.plan_step)
    if waiting > SKIPPED_STEPS_MAX:
        planner.take_back_events(before)
        raise _too_many(waiting)
    _append(planner, journal, generation, before, (first, SKIP, pack({"steps": [first, end]})))


def check_skip(first: int, end: int) -> None:
    """Refuse what is no run of steps.

    Raises:
        ConfigError: It has no step, too many, or numbers that no step has.
    """
    if not 0 <= first < end <= STEP_MAX:
        raise ConfigError(
            f"a skip of steps {first}:{end} holds none, or numbers beyond {STEP_MAX}: write the first, "
            "and the one behind the last",
            seen=end,
            limit=first + 1,
        )
    if end - first > SKIPPED_STEPS_MAX:
        raise _too_many(end - first)


def _too_many(count: int) -> ConfigError:
    return ConfigError(
        f"{count} steps would wait to be left out, at most {SKIPPED_STEPS_MAX} may, as each is read "
        "and drawn all the same: skip fewer",
        seen=count,
        limit=SKIPPED_STEPS_MAX,
    )


def _append(
    planner: StepPlanner,
    journal: Journal,
    generation: int,
    before: StreamState,
    event: tuple[int, str, bytes],
) -> None:
    """Make an accepted event durable; without that it was not accepted."""
    try:
        journal.append_event(generation, *event, planner.state().event_number)
    except MsdError:
        planner.take_back_events(before)
        raise


class Rewound(NamedTuple):
    """What a rewind did."""

    step: int
    plan_step: int
    event_number: int
    forgotten: int
    """Events that were dropped by it."""


def rewind(
    journal: Journal,
    step: int,
    *,
    event_number: int,
    skip: tuple[int, int] | None = None,
    forget_after: int | None = None,
) -> Rewound:
    """Note that the stream goes on from a state at or before a step, without what was planned behind it.

    Args:
        journal: The job's; of a job that runs, its planner's own.
        step: The trainer's number of the step that comes next.
        event_number: Events that the running planner knows; 0 where none runs.
        skip: Plan steps to leave out from then on, first and end.
        forget_after: Content events of later plan steps are dropped.

    Raises:
        ConfigError: The skip is none, or begins before the step.
        NotFoundError: The journal holds no such step.
        ResourceError: The journal can't be read or written.
    """
    state = restore_state(journal, step)
    with journal.reading():
        _refuse_abandoned(journal, state)
        generation = journal.last_generation()
        number = max(event_number, journal.events_table.last_number(), state.event_number)
    if skip is not None:
        check_skip(*skip)
        if skip[0] < state.plan_step:
            raise ConfigError(
                f"a skip from plan step {skip[0]} on lies before step {step}, whose plan step is "
                f"{state.plan_step}: rewind further, or skip later ones",
                seen=skip[0],
                limit=state.plan_step,
            )
    with journal.transaction():
        table = journal.events_table
        dropped = 0
        if forget_after is not None:
            dropped = table.drop(f"rewind to {step}", after_step=forget_after, kinds=CONTENT_KINDS)
        number += 1
        body = pack({"step": step})
        table.append(generation, state.plan_step, REWIND, body, number)
        if skip is not None:
            number += 1
            table.append(generation, skip[0], SKIP, pack({"steps": list(skip)}), number)
    return Rewound(step, state.plan_step, number, dropped)


def clear_rewinds(journal: Journal) -> int:
    """Let states behind a rewind be gone on from again; return how many rewinds were in force."""
    with journal.transaction():
        return journal.events_table.drop("rewind --clear", kinds=(REWIND,))


def _refuse_abandoned(journal: Journal, state: StreamState) -> None:
    """Refuse a state that a rewind cut off.

    Raises:
        StateMismatchError: It lies behind the step of a rewind that it does not know.
    """
    for event in journal.events_table.after(state.event_number):
        if event.kind != REWIND:
            continue
        step = int(unpack_map(event.body)["step"])
        if state.step > step:
            raise StateMismatchError(
                f"the state is of step {state.step}, and the job was rewound to step {step} since: "
                f"load the checkpoint of step {step} or an earlier one (msdctl rewind JOB --to "
                f"{step} --state FILE writes it), or take the rewind back by msdctl rewind JOB "
                "--clear",
                seen=state.step,
                limit=step,
            )


def forget_events(journal: Journal, plan_step: int, reason: str) -> int:
    """Drop content events of plan steps behind one; return how many."""
    with journal.transaction():
        dropped = journal.events_table.drop(reason, after_step=plan_step, kinds=CONTENT_KINDS)
        journal.events_table.forgive_gone()
    if dropped:
        log.warning(
            "journal: %d events behind plan step %d are dropped: %s", dropped, plan_step, reason
        )
    return dropped


def check_resume(journal: Journal, state: StreamState, *, is_fresh: bool) -> None:
    """Refuse a state that the journal does not go on from; a fresh one begins another stream.

    Args:
        journal: The job's.
        state: Where ranks want to go on.
        is_fresh: The state is the one before a job's first step: the trainer loaded none. What was
            journalled is another stream's then, unless the job was rewound to step 0.

    Raises:
        StateMismatchError: A rewind cut it off.
    """
    with journal.reading():
        is_rewound = any(event.kind == REWIND for event in journal.events_table.after(0))
        if not is_fresh or is_rewound:
            _refuse_abandoned(journal, state)
            return
    with journal.transaction():
        count = journal.events_table.end_stream()
    if count:
        log.warning(
            "journal: a stream begins anew, %d events of the one before are not played back", count
        )


def play_back(planner: StepPlanner, journal: Journal) -> list[EventRecord]:
    """Have a planner accept, at their steps, the events that its state does not know; return them.

    Events that wait in the state and were dropped since are taken out of it.

    Raises:
        StateMismatchError: Some are not kept any more.
        JournalDamagedError: One is not what was written.
    """
    played = []
    state = planner.state()
    plan_step = state.plan_step
    cleaned = _without_dropped(journal, state)
    if cleaned is not state:
        planner.take_back_events(cleaned)
    for event in events_unknown_to(journal, planner.state()):
        if event.kind not in CONTENT_KINDS:
            continue
        if event.step < plan_step:
            log.warning(
                "journal: event %d (%s at plan step %d) lies before the state, which goes on at %d "
                "without it: the state is of another line of the stream",
                event.event_number,
                event.kind,
                event.step,
                plan_step,
            )
            continue
        if event.kind == SKIP:
            planner.skip_steps(*unpack_map(event.body)["steps"])
        else:
            planner.change_mixture(unpack_map(event.body), event.step)
        played.append(event)
    with journal.reading():
        planner.count_events(journal.events_table.last_number())
    return played


def first_changed_step(before: StreamState, after: StreamState) -> int | None:
    """Return the first plan step at which what waits in two states differs, None where nothing does.

    Args:
        before: A state.
        after: The same state with events more or fewer.
    """
    changes = _waiting_changes(before) ^ _waiting_changes(after)
    return min((step for step, *_ in changes), default=None)


def _waiting_changes(state: StreamState) -> set[tuple[int, ...]]:
    """Return what waits in a state: its step first, then what it does."""
    mixtures = zip(state.pending_steps.tolist(), state.pending_shares.tolist(), strict=True)
    changes: set[tuple[int, ...]] = {(step, -1, *shares) for step, shares in mixtures}
    return changes | {(first, end) for first, end in state.pending_skips.tolist()}


def _without_dropped(journal: Journal, state: StreamState) -> StreamState:
    """Return a state without what waits in it and was dropped since; itself where nothing was."""
    with journal.reading():
        known = (state.plan_step, state.event_number)
        dropped = journal.events_table.waiting_at(*known, is_dropped=True)
        kept = journal.events_table.waiting_at(*known, is_dropped=False)
    if not any(event.kind in CONTENT_KINDS for event in dropped):
        return state
    steps, shares = state.pending_steps.tolist(), state.pending_shares.tolist()
    skips = state.pending_skips
    for event in dropped:
        if event.kind == SKIP:
            skips = skips_without(skips, *unpack_map(event.body)["steps"])
        elif event.kind in MIXTURE_KINDS:
            wanted = integer_shares(unpack_map(event.body), state.source_names).tolist()
            for place, step in enumerate(steps):
                if step == event.step and shares[place] == wanted:
                    del steps[place], shares[place]
                    break
    for event in kept:
        if event.kind == SKIP:  # the dropped one may have covered some of it
            skips = merged_skips(skips, *unpack_map(event.body)["steps"])
    return replace(
        state,
        pending_steps=np.array(steps, np.int64),
        pending_shares=np.array(shares, np.int64).reshape(-1, len(state.source_names)),
        pending_skips=skips,
    )
