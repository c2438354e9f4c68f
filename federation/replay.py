"""What a journal says of a stream: the state before any kept step, and the events it does not know.

A state is a snapshot and the differences behind it, at most SNAPSHOT_EVERY_STEPS of them. Where
generations overlap, as after a rewind, a step is the newest generation's that holds it.
"""

from __future__ import annotations

from typing import NamedTuple

from federation.journal import Journal
from federation.journal_events import EventRecord
from federation.planning.calibrator import EVENT_KIND as CALIBRATION
from msd_client.contract.errors import (
    JournalDamagedError,
    MsdError,
    NotFoundError,
    PlannerUnavailableError,
    ProtocolError,
    StateMismatchError,
)
from msd_client.contract.state import StateDelta, StreamState

STEPS_COMPARED_MAX = 256
"""More than are planned ahead; a state that lies further back is compared as far."""


class Replayed(NamedTuple):
    """What a journal says of a generation up to a step."""

    state: StreamState
    calibrations: list[EventRecord]
    """Fits of this generation; no state knows of them."""
    digests: dict[int, str]
    """Of steps from there on that were journalled already."""


def replay(journal: Journal, generation: int, step: int) -> Replayed:
    """Return the state before `step` and what was journalled behind it; those steps are dropped.

    Raises:
        PlannerUnavailableError: The journal lacks a step; start again from the trainers' state.
        JournalDamagedError: A step is not what was written; it is named.
    """
    with journal.reading():
        try:
            state = restore_state(journal, step, generation)
        except NotFoundError as error:
            raise PlannerUnavailableError(
                f"{error.message}: connect again with the last state", step=step
            ) from error
        digests = {record.step: record.digest for record in journal.steps_after(generation, step)}
        calibrations = [it for it in journal.events(generation) if it.kind == CALIBRATION]
    journal.drop_steps(generation, step)
    return Replayed(state, calibrations, digests)


def restore_state(journal: Journal, step: int, generation: int | None = None) -> StreamState:
    """Return the state before a step, made from a snapshot and the differences behind it.

    Reads at most one snapshot and the differences up to the next one, however long the run was.

    Args:
        journal: May be open to read alone.
        step: The trainer's number, 0 or more.
        generation: Whose; None: the newest that holds the step.

    Raises:
        NotFoundError: No kept generation holds it; the message says which steps are kept.
        JournalDamagedError: The snapshot or a step is not what was written; it is named.
    """
    with journal.reading():
        held = holding_generation(journal, step) if generation is None else generation
        snapshot = None if held is None else journal.last_snapshot(held, step)
        if held is None or snapshot is None:
            raise NotFoundError(
                f"the journal does not hold step {step}: {kept_steps(journal)}", step=step
            )
        state = _decoded(f"the snapshot at step {snapshot[0]}", snapshot[1])
        for record in journal.steps_between(held, state.step, step):
            if record.step != state.step:
                break
            try:
                state = state.apply(StateDelta.decode(record.delta))
            except ProtocolError as error:
                raise JournalDamagedError(
                    f"step {record.step} of generation {held} is damaged in the journal "
                    f"({error.message}): restore one up to it, or a later one from a saved state",
                    step=record.step,
                ) from error
    if state.step != step:
        raise NotFoundError(
            f"generation {held} of the journal ends before step {state.step}, step {step} is wanted",
            step=step,
        )
    return state


def planned_already(journal: Journal, state: StreamState, job: bytes) -> dict[int, str]:
    """Return the digests of steps that a former generation planned behind this very state, by step.

    Only of the same job, and as far as no event was accepted meanwhile: such steps are to come out
    the same again. Of a damaged journal nothing is compared.

    Args:
        journal: Before the new generation is opened in it.
        state: Where that begins.
        job: msgpack of the job, as the journal keeps it.
    """
    with journal.reading():
        for number, first in journal.generations():
            if not _leads_to(journal, number, first, state):
                continue
            record = journal.generation(number)
            if record is None or record.job != job:
                continue
            digests: dict[int, str] = {}
            end = state.step + STEPS_COMPARED_MAX
            for step in journal.steps_between(number, state.step, end):
                try:
                    delta = StateDelta.decode(step.delta)
                except ProtocolError:
                    break
                if delta.event_number != state.event_number:
                    break
                digests[step.step] = step.digest
            return digests
    return {}


def _leads_to(journal: Journal, generation: int, first: int, state: StreamState) -> bool:
    """Return True where a generation went through this state."""
    if first == state.step:
        snapshot = journal.last_snapshot(generation, first)
        if snapshot is None or snapshot[0] != first:
            return False
        try:
            return StreamState.decode(snapshot[1]).stream_digest == state.stream_digest
        except MsdError:
            return False
    before = journal.steps_between(generation, state.step - 1, state.step)
    return bool(before) and before[0].digest == state.stream_digest.hex()


def holding_generation(journal: Journal, step: int) -> int | None:
    """Return the newest generation in which the state before a step is kept, None for none."""
    for generation, _ in journal.generations():
        last = journal.last_step(generation)
        snapshot = journal.last_snapshot(generation, step)
        if snapshot is not None and (
            snapshot[0] == step or (last is not None and step <= last + 1)
        ):
            return generation
    return None


def kept_steps(journal: Journal) -> str:
    """Return which steps each generation holds, for people."""
    found = []
    for generation, first in reversed(journal.generations()):
        last = journal.last_step(generation)
        oldest = journal.first_snapshot(generation)
        begin = first if oldest is None else oldest
        found.append(f"generation {generation} {begin} to {begin if last is None else last + 1}")
    return "it holds " + (", ".join(found) or "no step")


def events_unknown_to(journal: Journal, state: StreamState) -> list[EventRecord]:
    """Return the events in force that a state does not know, oldest first.

    Raises:
        StateMismatchError: Some of them are not kept any more.
        JournalDamagedError: One is not what was written.
    """
    with journal.reading():
        events = journal.events_table.after(state.event_number)
        gone = journal.events_table.let_go_up_to()
    if gone > state.event_number:
        raise StateMismatchError(
            f"the state of step {state.step} knows of {state.event_number} events, and those up to "
            f"{gone} are not kept in the journal: load a later state, or go on without them by "
            "connect(..., forget_events_after=0)",
            seen=state.event_number,
            limit=gone,
        )
    return events


def _decoded(what: str, data: bytes) -> StreamState:
    try:
        return StreamState.decode(data)
    except MsdError as error:
        raise JournalDamagedError(f"{what} is damaged in the journal ({error.message})") from error
