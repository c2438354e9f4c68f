"""In which steps of a generation a record was drawn, and where its parts waited, by the journal alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from federation.journal_reader import JournalReader, KeptSteps
from msd_client.contract.state import (
    CURSOR_BLOCK_KEY,
    CURSOR_INDEX,
    CURSOR_OFFSET,
    IS_EXHAUSTED,
    StreamState,
)
from msd_daemon.history.record_names import Place


class Cursor(NamedTuple):
    """How far the draw of a source came."""

    place: Place
    """The last drawn record."""
    offset: int
    """Tokens of it drawn so far; 0: nothing was drawn yet."""


@dataclass
class DrawnSteps:
    """What a generation did with one record."""

    is_drawn_before: bool = False
    """Its draw was over, or begun, before the first kept step."""
    is_reached: bool = False
    """The draw came to it, or passed it."""
    is_left_out: bool = False
    """Steps that were left out were among those that drew it, or took parts of it."""
    steps: list[int] = field(default_factory=list)
    """Kept steps that may hold a part of it: those that drew it, and those that took parts out of
    the carried pool."""
    is_waiting: bool = False
    """A part of it waits behind the last planned step: in the carried pool, or not drawn yet."""


def drawn_steps(
    reader: JournalReader, kept: KeptSteps, source: int, place: Place, drawn_tokens: int
) -> DrawnSteps:
    """Return what a generation did with a record: a binary search over snapshots, then a short walk.

    Args:
        reader: The journal.
        kept: The generation.
        source: Index of the source.
        place: Of the record in its order.
        drawn_tokens: Tokens of it behind which nothing more is drawn; 0 where it is no sample.

    Raises:
        JournalDamagedError: A row that is needed is damaged.
    """
    found = DrawnSteps()
    number = kept.generation
    state = reader.state_before(_snapshot_before(reader, kept, source, place), number)
    found.is_drawn_before = _is_begun(state, source, place)
    found.is_reached = found.is_drawn_before
    if (
        found.is_drawn_before
        and _is_over(state, source, place, drawn_tokens)
        and not _waits(state, source, place)
    ):
        return found
    for told in reader.steps(state.step, kept.end, number):
        before, waited = cursor_of(state, source), _waits(state, source, place)
        skipped_before = state.skipped_steps
        state = reader.follow(state, told, number)
        after = cursor_of(state, source)
        is_new_draw = after != before and before.place <= place <= after.place
        if is_new_draw or waited:
            found.steps.append(told.step)
            found.is_left_out |= state.skipped_steps > skipped_before
        found.is_reached = _is_begun(state, source, place)
        found.is_waiting = found.is_reached and (
            _waits(state, source, place) or not _is_over(state, source, place, drawn_tokens)
        )
        if found.is_reached and not found.is_waiting:
            break
    return found


def cursor_of(state: StreamState, source: int) -> Cursor:
    """Return how far the draw of a source came."""
    key, index, offset = state.progress[
        [CURSOR_BLOCK_KEY, CURSOR_INDEX, CURSOR_OFFSET], source
    ].tolist()
    return Cursor((key, index), offset)


def _snapshot_before(reader: JournalReader, kept: KeptSteps, source: int, place: Place) -> int:
    """Return the last snapshot whose state has not come to the record; the first where none has."""
    steps = [step for step in reader.snapshots(kept.generation) if kept.first <= step <= kept.end]
    low, high = 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        state = reader.state_before(steps[middle], kept.generation)
        if _is_begun(state, source, place):
            high = middle
        else:
            low = middle
    return steps[low]


def _is_begun(state: StreamState, source: int, place: Place) -> bool:
    cursor = cursor_of(state, source)
    return cursor.offset > 0 and cursor.place >= place


def _is_over(state: StreamState, source: int, place: Place, drawn_tokens: int) -> bool:
    """True where nothing of the record will be drawn any more."""
    cursor = cursor_of(state, source)
    if cursor.place == place and cursor.offset > 0:
        return cursor.offset >= drawn_tokens or bool(state.progress[IS_EXHAUSTED, source])
    return _is_begun(state, source, place)


def _waits(state: StreamState, source: int, place: Place) -> bool:
    carried = state.carried
    return bool(
        ((carried[0] == source) & (carried[1] == place[0]) & (carried[2] == place[1])).any()
    )
