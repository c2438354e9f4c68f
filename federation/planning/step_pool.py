"""What a step is packed from and into: the pool of fragments, how much to draw, the rows.

Fragments are columns of one matrix, whose last rows are the job's extra ones
(federation.planning.extra_rows). Where rows became shorter, carried fragments of older steps may be
longer than a row: they are cut into pieces of a row's length first (`cut_carried`), in the order of
their tokens. In jobs with masks this cannot happen: rows never become shorter there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.model.job import BatchRule

Int64Array = npt.NDArray[np.int64]

SLACK_DIVISOR = 32
"""Both kinds of best fit draw 1/32 more tokens than rows hold: real text then packs to more than 99 %."""

SOURCE, BLOCK_KEY, INDEX, OFFSET, LENGTH, DRAWN_STEP = range(6)


class Need(NamedTuple):
    """How much a step draws: until so many places, fragments or tokens, whichever comes first."""

    places: int
    """Places of rows: tokens, each fragment's rounded up to `segment_multiple`."""
    fragments: int
    tokens: int | None = None
    """None where places bound tokens too."""
    units: tuple[int, ...] = ()
    """Of each modality: enough of one is enough, so that what is carried stays bounded."""

    @property
    def is_met(self) -> bool:
        """True where nothing has to be drawn."""
        tokens = 1 if self.tokens is None else self.tokens
        return min(self.places, self.fragments, tokens, *self.units) <= 0

    def after(self, drawn: Int64Array, multiple: int) -> Need:
        """Return what is needed beyond these fragments: known, drawn or carried ones.

        Row LENGTH holds their lengths, the last rows hold the units of each modality.
        """
        lengths = drawn[LENGTH]
        tokens = None if self.tokens is None else self.tokens - int(lengths.sum())
        units = self.units
        if units:
            taken = drawn[-len(units) :].sum(axis=1).tolist()
            units = tuple(count - part for count, part in zip(units, taken, strict=True))
        return Need(
            self.places - int(places_of(lengths, multiple).sum()),
            self.fragments - len(lengths),
            tokens,
            units,
        )


class Packed(NamedTuple):
    """Rows of a step and what is left over."""

    segments: Int64Array
    """(source, block_key, index, offset, length), sorted by (row, column). Shape (5, n)."""
    row: Int64Array
    """Shape (n,)."""
    column: Int64Array
    row_starts: Int64Array
    """First segment of each row that has one. Shape (r,)."""
    row_sizes: Int64Array
    """Segments of those rows. Shape (r,)."""
    carried_out: Int64Array
    """Places in the former carried columns that left. Shape (o,)."""
    carried_in: Int64Array
    """Fragments that join the carried ones behind those that stay. Shape (6 + extra rows, i)."""
    placed: npt.NDArray[np.bool_]
    """Fragments of the pool that stand in rows with at least one token. Shape (f,)."""
    extras: Int64Array
    """Extra rows of the segments. Shape (extra rows, n)."""


class Pool(NamedTuple):
    """What a step can be packed from."""

    fragments: Int64Array
    """Carried ones, then drawn ones, then fillers, each in draw order. Shape (6 + extra rows, f),
    CARRIED_COLUMNS and the job's extra rows."""
    carried_count: int
    tokens_left: int | None = None
    """Tokens the stream may still place, None for no end: fragments behind those that reach it stay
    carried."""
    origins: Int64Array | None = None
    """Where carried fragments were cut for shorter rows: place of each among the former carried
    ones. Shape (carried_count,)."""
    filler_count: int = 0
    """Last fragments, of the epoch behind the stream's end: they fill what the others leave."""
    is_last: bool = False
    """True where nothing is drawn any more, so rows may stay empty."""
    units_max: tuple[int, ...] = ()
    """Most units of a row, of each modality: the last rows of `fragments` hold theirs."""
    has_begins: bool = False
    """True where the first extra row says which fragments begin a sample."""
    cost: CostSpec = CostSpec()
    """The job's own, for packing that looks at costs; never a calibrated one."""
    is_held: npt.NDArray[np.bool_] | None = None
    """Fragments that wait for a later step (federation.planning.delay), None for none. Shape (f,)."""
    modalities: tuple[str, ...] = ()
    """Names of those that `units_max` is of."""
    has_groups: bool = False
    """True where an extra row, behind that of `has_begins`, says how many fragments of its group
    stand behind each: a group goes into one row as a whole."""

    @property
    def group_starts(self) -> Int64Array:
        """Where each group begins; a fragment of none is one by itself. Shape (groups,)."""
        return group_starts(self.fragments[DRAWN_STEP + 1 + self.has_begins])

    def without_held(self) -> Pool:
        """Return what of the pool may be packed now."""
        if self.is_held is None:
            return self
        is_open = ~self.is_held
        is_carried_open = is_open[: self.carried_count]
        return self._replace(
            fragments=self.fragments[:, is_open],
            carried_count=int(np.count_nonzero(is_carried_open)),
            origins=None if self.origins is None else self.origins[is_carried_open],
            is_held=None,
        )


def step_tokens(rule: BatchRule) -> int:
    """Return the tokens that a step's rows hold, or that a varlen step is drawn up to."""
    return rule.step_tokens if rule.is_varlen else rule.rows * rule.row_tokens


def places_of(lengths: Int64Array, multiple: int) -> Int64Array:
    """Return the places of a row that fragments of these lengths take. Shape (n,)."""
    if multiple == 1:
        return lengths
    rounded: Int64Array = -(-lengths // multiple) * multiple
    return rounded


def draw_need(
    rule: BatchRule,
    carried: Int64Array,
    tokens_left: int | None,
    units_max: tuple[int, ...] = (),
) -> Need:
    """Return what a step has to draw beside its carried fragments.

    Args:
        rule: The step's batch.
        carried: Cut for the step's rows. Shape (6 + extra rows, c).
        tokens_left: Tokens that the stream may still place, None for no end.
        units_max: Most units of a row, of each modality.
    """
    if rule.packing == "padded":
        return Need(step_tokens(rule), rule.rows - carried.shape[1])
    if rule.is_varlen:
        return varlen_need(rule, tokens_left, units_max)
    places = step_tokens(rule)
    units = tuple(rule.rows * most for most in units_max)
    if rule.packing in ("best_fit", "best_fit_even"):
        places += places // SLACK_DIVISOR
        units = tuple(count + count // SLACK_DIVISOR for count in units)
    if tokens_left is not None and rule.segment_multiple == 1:
        places, tokens_left = min(places, tokens_left), None
    need = Need(places, rule.rows * rule.row_segments_max, tokens_left, units)
    return need.after(carried, rule.segment_multiple)


def varlen_need(rule: BatchRule, tokens_left: int | None, units_max: tuple[int, ...]) -> Need:
    """Return what a varlen step draws: tokens alone, or all media that its rows may hold.

    The fragment that reaches the tokens belongs to the step, so nothing is carried and a step is a
    function of the draw. Places and fragments never end it: `step_tokens` fragments, or so many
    multiples of places, are at least as many tokens.
    """
    tokens = rule.step_tokens if tokens_left is None else min(rule.step_tokens, tokens_left)
    return Need(
        rule.step_tokens * rule.segment_multiple,
        rule.step_tokens,
        tokens,
        tuple((rule.rows - 1) * most for most in units_max),
    )


def cut_carried(carried: Int64Array, rule: BatchRule) -> tuple[Int64Array, Int64Array | None]:
    """Cut carried fragments that are longer than a row; `concat` cuts as it goes.

    Those of jobs with masks are never longer (`ExtraRows.fit_state`); of others the only extra row
    there may be says whether a fragment begins a sample, and of its pieces the first alone does.

    Returns:
        The fragments in order, shape (6 + extra rows, n), and the place in `carried` of each, None
        where none was cut.
    """
    lengths = carried[LENGTH]
    if rule.packing == "concat" or not (lengths > rule.row_tokens).any():
        return carried, None
    parts = -(-lengths // rule.row_tokens)
    origins = np.repeat(np.arange(len(parts)), parts)
    pieces = carried[:, origins]
    skipped = (np.arange(len(origins)) - np.repeat(np.cumsum(parts) - parts, parts)) * (
        rule.row_tokens
    )
    pieces[OFFSET] += skipped
    pieces[LENGTH] = np.minimum(pieces[LENGTH] - skipped, rule.row_tokens)
    pieces[DRAWN_STEP + 1 :, skipped > 0] = 0
    return pieces, origins


def group_starts(follow: Int64Array) -> Int64Array:
    """Return where each group begins; a fragment of none is one by itself. Shape (groups,).

    Args:
        follow: How many fragments of its group stand behind each. Shape (n,).
    """
    is_start = np.ones(len(follow), np.bool_)
    is_start[1:] = follow[:-1] == 0
    return np.flatnonzero(is_start)


def run_starts(values: Int64Array) -> Int64Array:
    """Return where each run of equal values begins. Shape (runs,)."""
    if not len(values):
        return np.zeros(0, np.int64)
    changes = np.flatnonzero(values[1:] != values[:-1])
    starts = np.zeros(len(changes) + 1, np.int64)
    starts[1:] = changes + 1
    return starts


def runs(row: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return where the runs of equal values begin and how long they are. Shape (runs,) each."""
    starts = run_starts(row)
    counts = np.empty_like(starts)
    counts[:-1] = starts[1:] - starts[:-1]
    if len(starts):
        counts[-1] = len(row) - starts[-1]
    return starts, counts
