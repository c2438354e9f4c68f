"""What a job's stream must be, worked out once more: plain loops over documents, no numpy.

Written from DESIGN.md sections 4 and 5, the README's "Rules of the stream" and the docstrings of
`federation.planning`; shares no code with what it checks. Small jobs only: everything is a list.
It knows the order of seekable and streamed sources (`oracle_order`), the draw (flat share trees: up
to five sources), every packing (`oracle_packing`), split, truncate and skip, labels and their
weights, segments in multiples of places, ends of sources and streams with their tails, schedules of
the shape and the mixture, and live changes of the mixture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.support.oracle_order import Document, Order, Source
from tests.support.oracle_packing import Fragment, Packer, places_of

SHARE_TOTAL = 1 << 40
INVERSE_UNIT = 1 << 20
SOURCES_MAX = 5
"""With more, levels of the share tree may not be joined into one."""
MILLIONS = {"M": 10**6, "B": 10**9, "T": 10**12}
SLACK = 32


class Piece(NamedTuple):
    """Lineage of a segment."""

    source: str
    epoch: int
    document: int
    offset: int
    length: int


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    labels: list[int]
    position_ids: list[int]
    loss_weights: list[float]
    """What each label weighs; 0 where nothing is trained."""
    cu_seqlens: list[int]
    cu_seqlens_padded: list[int]
    pieces: list[Piece]


@dataclass(frozen=True)
class OracleStep:
    number: int
    rows: list[Row]
    """By canonical number; of packing varlen one for each segment, in draw order."""
    valid_tokens: int


def length_key(batch: Mapping[str, Any]) -> str:
    """Return what the longest fragment is called."""
    return "microbatch_tokens" if batch.get("packing") == "varlen" else "row_tokens"


def points_of(values: Any) -> list[tuple[tuple[str, int], int]]:
    """Return ((unit, start), value) of a schedule as a user writes it."""
    if not isinstance(values, Mapping):
        return [(("steps", 0), values)]
    found = []
    for key, value in values.items():
        text = str(key)
        if text[-1:] in MILLIONS:
            start = round(float(text[:-1]) * MILLIONS[text[-1]])
            found.append((("tokens", start), value))
        else:
            found.append((("steps", int(text)), value))
    return found


class Exhausted(Exception):  # noqa: N818 - stands for the product's error
    """The draw came to the end of a source that is to be repeated and may not be."""


class NothingToTrainError(Exception):
    """A step would hold documents of a single token alone."""


@dataclass
class _Queue:
    """What of one source comes next: a document, and how much of it was drawn."""

    documents: Iterator[tuple[int, Document]]
    epochs: int | None
    """Passes that count."""
    long: str
    is_open: bool = False
    """True where a last step is filled from behind them."""
    _next: tuple[int, Document] | None = None
    _offset: int = 0
    _row_tokens: int = 0
    _seen_epoch: int = -1
    """Epoch of the last fragment that was seen."""
    _drawn_epoch: int = -1
    is_barren: bool = False
    """True where a whole epoch holds no fragment."""
    _skipped: list[tuple[int, Document]] = field(default_factory=list)
    """Passed over since the last one that was drawn: rows of another length may hold them."""
    _again: list[tuple[int, Document]] = field(default_factory=list)

    def peek(self, number: int, row_tokens: int) -> Fragment | None:
        """Return the fragment that comes next in rows of this length, None at the end."""
        if row_tokens != self._row_tokens:
            self._row_tokens = row_tokens
            self._seen_epoch, self.is_barren = self._drawn_epoch, False
            if self._skipped:
                following = [self._next] if self._next else []
                self._again = self._skipped + following + self._again
                self._skipped, self._next = [], None
        while True:
            if self._next is None:
                self._next = self._again.pop(0) if self._again else next(self.documents)
                self._offset = 0
            epoch, document = self._next
            if self.epochs is not None and epoch >= self.epochs and not self.is_open:
                return None
            if epoch > self._seen_epoch + 1 and epoch != self.epochs:
                self.is_barren = True
                return None
            length = len(document.tokens)
            is_long = length > row_tokens and not self._offset
            if not length or document.status != "ok" or (is_long and self.long == "skip"):
                self._skipped.append(self._next)
                self._next = None
                continue
            left = min(length - self._offset, row_tokens)
            self._seen_epoch = epoch
            return Fragment(number, epoch, document, self._offset, left)

    def pop(self, fragment: Fragment) -> None:
        self._skipped, self._drawn_epoch = [], fragment.epoch
        self._offset = fragment.offset + fragment.length
        if self.long != "split" or self._offset == len(fragment.document.tokens):
            self._next = None


class Oracle:
    """A job's steps. Takes a job as a user writes it, sources as documents.

    Args:
        job: The job map; of its sources only the documents given here are looked at.
        sources: In the order of their names.
        changes: Live changes of the mixture by the step that they hold from.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        sources: Sequence[Source],
        changes: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        assert [source.name for source in sources] == sorted(source.name for source in sources)
        assert len(sources) <= SOURCES_MAX
        self._job = job
        self._batch = batch = job["batch"]
        self._rows, self._row_tokens, self._step_tokens = 0, 0, 0
        self._multiple = batch.get("segment_multiple", 1)
        self._packing = batch.get("packing", "best_fit")
        self._segments_max = batch.get("row_segments_max") or self._derived_segments_max()
        self._sources = sources
        self._queues = [
            _Queue(
                Order(source, job.get("seed", 0)).documents(),
                self._epochs(source),
                batch.get("long", "split"),
            )
            for source in sources
        ]
        mixture = dict(job.get("mixture") or {0: {source.name: 1 for source in sources}})
        self._is_samples = mixture.pop("unit", "tokens") == "samples"
        self._schedule = {int(start): weights for start, weights in mixture.items()}
        self._changes = dict(changes or {})
        self._shares: list[int] = []
        self._times = [0] * len(sources)
        self._gone: set[int] = set()
        self._carried: list[Fragment] = []
        self._placed_tokens = 0
        self._is_met = False
        self._fillers = 0
        self._is_wrapped = False
        self.ending = ""
        self.step = 0
        self.unlabelled: list[Piece] = []
        """What was dropped at the end, as no step may hold nothing else."""

    def steps(self, count: int | None = None) -> Iterator[OracleStep]:
        """Yield steps up to the end of the stream."""
        end = self._job.get("end", "pad")
        while count is None or self.step < count:
            if self._job.get("steps") is not None and self.step >= self._job["steps"]:
                return
            left = self._tokens_left()
            if (left is not None and left <= 0) or self._is_wrapped:
                return
            self._take_shape()
            self._mix()
            carried = self._cut(self._carried)
            limit = left if end == "pad" else None
            pool = carried + self._draw(carried, limit, self.step)
            if end == "wrap" and self.ending and pool and self._fits(pool, len(carried)):
                pool += self._wrap(pool)
            if end == "drop" and self.ending and not self._is_met:
                return
            rows, rest = self._pack(pool, len(carried), limit)
            placed = sum(fragment.length for row in rows for fragment in row)
            if end == "drop" and left is not None and placed > left:
                return
            made = [self._row(row) for row in rows]
            valid = sum(weight > 0 for row in made for weight in row.loss_weights)
            if not valid:
                if not self.ending and (limit is None or limit > self._step_tokens):
                    raise NothingToTrainError
                if self.ending:
                    self.unlabelled = [self._piece(fragment) for fragment in pool]
                    self._carried = []
                return
            self._carried = self._rejoined(rest, carried)
            self._placed_tokens += placed
            yield OracleStep(self.step, made, valid)
            self.step += 1

    def carried(self) -> list[Piece]:
        """Return what was drawn and stands in no row."""
        return [self._piece(fragment) for fragment in self._carried]

    # ---- draw ----

    def _epochs(self, source: Source) -> int | None:
        limits = [n for n in (source.max_epochs, self._job.get("epochs")) if n is not None]
        if limits:
            return min(limits)
        return None if source.at_exhaustion == "repeat" else 1

    def _tokens_left(self) -> int | None:
        total = self._job.get("tokens")
        return None if total is None else total - self._placed_tokens

    def _derived_segments_max(self) -> int:
        longest = max(value for _, value in points_of(self._batch[length_key(self._batch)]))
        if self._packing == "concat":
            return longest
        return min(longest, max(64, longest // 8))

    def _take_shape(self) -> None:
        """Take the rows, and their length, that hold for this step."""
        self._row_tokens = self._scheduled(self._batch[length_key(self._batch)])
        if self._packing == "varlen":
            self._step_tokens = self._scheduled(self._batch["step_tokens"])
            return
        self._rows = self._scheduled(self._batch["rows"])
        self._step_tokens = self._rows * self._row_tokens

    def _scheduled(self, values: Any) -> int:
        found = 0
        for point, value in sorted(points_of(values)):
            unit, start = point
            if start <= (self.step if unit == "steps" else self._placed_tokens):
                found = value
        return found

    def _places(self, length: int) -> int:
        return places_of(length, self._multiple)

    def _cut(self, carried: list[Fragment]) -> list[Fragment]:
        """Cut carried fragments for shorter rows; a concatenation cuts as it goes."""
        if self._packing == "concat":
            return carried
        pieces = []
        for fragment in carried:
            if fragment.length <= self._row_tokens:
                pieces.append(fragment)
                continue
            for done in range(0, fragment.length, self._row_tokens):
                length = min(self._row_tokens, fragment.length - done)
                piece = replace(fragment, offset=fragment.offset + done, length=length)
                piece.origin = fragment
                pieces.append(piece)
        return pieces

    def _rejoined(self, rest: list[Fragment], carried: list[Fragment]) -> list[Fragment]:
        """Leave cut fragments whole, of which no piece was placed, up to one that was in part."""
        left = {id(fragment) for fragment in rest}
        origins = [fragment.origin or fragment for fragment in carried]
        is_cut = [fragment.origin is not None for fragment in carried]
        is_left = [id(fragment) in left for fragment in carried]
        whole: list[Fragment] = []
        for number, origin in enumerate(origins):
            mine = [is_left[n] for n, other in enumerate(origins) if other is origin]
            if is_cut[number] and any(mine) and not all(mine):
                break
            if all(mine) and (not whole or whole[-1] is not origin):
                whole.append(origin)
        else:
            number = len(carried)
        later = [f for f, is_in in zip(carried[number:], is_left[number:], strict=True) if is_in]
        for fragment in later:
            fragment.origin = None
        held = {id(fragment) for fragment in carried}
        return whole + later + [fragment for fragment in rest if id(fragment) not in held]

    def _mix(self) -> None:
        """Take the weights that hold from this step on."""
        weights = self._changes.get(self.step) or self._schedule.get(self.step)
        if weights:
            self._set_weights(weights)

    def _set_weights(self, weights: Mapping[str, float]) -> None:
        total = math.fsum(weights.values())
        shares = []
        for source in self._sources:
            weight = weights.get(source.name, 0)
            shares.append(max(1, round(weight / total * SHARE_TOTAL)) if weight else 0)
        self._change_shares(shares, self._gone)

    def _active(self) -> list[int]:
        return [n for n, share in enumerate(self._shares) if share and n not in self._gone]

    def _inverse(self, number: int) -> int:
        total = sum(self._shares[other] for other in self._active())
        return round(INVERSE_UNIT * total / self._shares[number])

    def _change_shares(self, shares: list[int], gone: set[int]) -> None:
        """Go over to other shares; each source stays ahead or behind by as much as it was."""
        ahead = [0] * len(self._sources)
        if self._shares and self._active():
            active = self._active()
            least = min(self._times[n] for n in active)
            amounts = {
                n: ((self._times[n] - least) << 16) // (2 * self._inverse(n)) for n in active
            }
            total = sum(self._shares[n] for n in active)
            for n in active:
                fair = -sum(amounts.values()) * self._shares[n] // total
                ahead[n] = amounts[n] + fair
        self._shares, self._gone = shares, gone
        active = self._active()
        if not active:
            self.ending = "every source of the mixture is exhausted"
        for n in active:
            self._times[n] = (2 * self._inverse(n) * ahead[n]) >> 16

    def _draw(self, pool: list[Fragment], limit: int | None, drawn_step: int) -> list[Fragment]:
        """Draw what the step needs beside a pool."""
        drawn: list[Fragment] = []
        while not self._needs_nothing(pool + drawn, limit, pool) and not self.ending:
            number, fragment = self._next()
            if fragment is None:
                self._end_source(number)
                continue
            self._queues[number].pop(fragment)
            fragment.drawn_step = drawn_step
            self._times[number] += 2 * self._amount(fragment) * self._inverse(number)
            drawn.append(fragment)
        self._is_met = self._needs_nothing(pool + drawn, limit, pool)
        return drawn

    def _needs_nothing(
        self, pool: list[Fragment], limit: int | None, before: list[Fragment]
    ) -> bool:
        space = self._step_tokens
        if self._packing == "varlen":
            enough = space if limit is None else min(space, limit)
            return sum(fragment.length for fragment in pool) >= enough
        if self._packing == "padded":
            drawn = pool[len(before) :]
            places = sum(self._places(fragment.length) for fragment in drawn)
            return len(pool) >= self._rows or places >= space
        if self._packing in ("best_fit", "best_fit_even"):
            space += space // SLACK
        if sum(self._places(fragment.length) for fragment in pool) >= space:
            return True
        if limit is not None and sum(fragment.length for fragment in pool) >= limit:
            return True
        return len(pool) >= self._rows * self._segments_max

    def _fits(self, pool: list[Fragment], carried_count: int) -> bool:
        copies = [replace(fragment) for fragment in pool]
        _, rest = self._pack(copies, carried_count, None)
        return not rest

    def _wrap(self, pool: list[Fragment]) -> list[Fragment]:
        """Fill the last step from behind the ends of all sources, by the same mixture."""
        self._gone, self.ending = set(), ""
        self._times = [0] * len(self._sources)
        for queue in self._queues:
            queue.is_open = True
        fillers = self._draw(pool, None, self.step + 1)
        self.ending, self._is_wrapped = "filled from the next epoch", True
        self._fillers = len(fillers)
        return fillers

    def _amount(self, fragment: Fragment) -> int:
        return int(fragment.offset == 0) if self._is_samples else fragment.length

    def _next(self) -> tuple[int, Fragment | None]:
        """Return the source whose next fragment is due first: at the middle of its stretch.

        The end of a source is due as a fragment of one token would be, before others due then.
        """
        best: tuple[int, bool, int] | None = None
        for number in self._active():
            fragment = self._queues[number].peek(number, self._row_tokens)
            span = 1
            if fragment is not None and not self._is_samples:
                span = fragment.length
            elif fragment is not None and fragment.offset:
                span = -1  # the rest of a sample is due with its beginning
            due = self._times[number] + span * self._inverse(number)
            best = min(best or (due, fragment is not None, number),
                       (due, fragment is not None, number))  # fmt: skip
        assert best is not None
        return best[2], self._queues[best[2]].peek(best[2], self._row_tokens)

    def _end_source(self, number: int) -> None:
        source = self._sources[number]
        if self._queues[number].is_barren:
            raise Exhausted(source.name)
        if source.at_exhaustion == "stop":
            self.ending = f"source {source.name} is exhausted"
        elif source.at_exhaustion == "repeat" and self._job.get("epochs") is None:
            raise Exhausted(source.name)
        else:
            self._change_shares(self._shares, self._gone | {number})

    # ---- rows ----

    def _pack(
        self, pool: list[Fragment], carried_count: int, left: int | None
    ) -> tuple[list[list[Fragment]], list[Fragment]]:
        packer = Packer(
            self._packing,
            self._rows,
            self._row_tokens,
            self._multiple,
            self._segments_max,
            self._fillers,
            bool(self.ending),
        )
        return packer.pack(pool, carried_count, left)

    def _piece(self, fragment: Fragment) -> Piece:
        return Piece(
            self._sources[fragment.source].name,
            fragment.epoch,
            fragment.document.number,
            fragment.offset,
            fragment.length,
        )

    def _row(self, fragments: list[Fragment]) -> Row:
        size, pad = self._row_tokens, self._batch.get("pad_id", 0)
        if self._packing == "varlen":
            size = sum(self._places(fragment.length) for fragment in fragments)
        ignored = self._job.get("ignore", -100)
        ignored = pad if ignored == "loss_mask" else ignored
        is_joined = self._job.get("documents", "separate") == "joined"
        shift = 1 if self._job.get("labels", "shifted") == "shifted" else 0
        tokens, labels = [pad] * size, [ignored] * size
        positions, weights = [0] * size, [0.0] * size
        owner: list[int | None] = [None] * size  # source of the token in each place
        true, padded = [0], [0]
        for fragment in fragments:
            start = padded[-1]
            extent = self._places(fragment.length)
            for n in range(extent):
                positions[start + n] = n
            end = fragment.offset + fragment.length
            for n, token in enumerate(fragment.document.tokens[fragment.offset : end]):
                place = start + n
                tokens[place], owner[place] = token, fragment.source
                touches = is_joined and place > 0 and owner[place - 1] is not None
                if n or touches:  # it is predicted, where the place before holds a token
                    labels[place - shift] = token
                    weights[place - shift] = self._sources[owner[place - shift]].loss_weight
            true.append(true[-1] + fragment.length)
            padded.append(start + extent)
        rest = size - padded[-1]
        if rest:
            positions[padded[-1] :] = range(rest)
            true.append(true[-1] + rest)
            padded.append(size)
        pieces = [self._piece(fragment) for fragment in fragments]
        return Row(tokens, labels, positions, weights, true, padded, pieces)
