"""What a job's stream must be, worked out once more: plain loops over documents, no numpy.

Written from DESIGN.md sections 4 and 5, the README's "Rules of the stream" and the docstrings of
`federation.planning`; shares no code with what it checks. Small jobs only: everything is a list.
It knows the order of seekable and streamed sources, the draw (flat share trees: up to five
sources), best_fit, concat and padded packing, split, truncate and skip, labels, ends of sources
and streams, schedules and live changes of the mixture.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SHARDS, BLOCKS, RECORDS = 1, 2, 3
SHARE_TOTAL = 1 << 40
INVERSE_UNIT = 1 << 20
SOURCES_MAX = 5
"""With more, levels of the share tree may not be joined into one."""
CARRIED_PART = 4
SLACK = 32

# ---- documents ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Document:
    """A document as it lies in its shard."""

    number: int
    """Counts through all shards of its source."""
    tokens: Sequence[int]
    size_bytes: int
    """Raw bytes, as record windows count them."""
    begin_bytes: int = 0
    """Where it begins in its shard; JSONL only."""


@dataclass(frozen=True, eq=False)
class Source:
    """A source: its shards in the order of their paths."""

    name: str
    kind: str
    """`tokens` (.bin/.idx), `jsonl` or `stream` (compressed JSONL)."""
    shards: Sequence[Sequence[Document]]
    is_shuffled: bool = True
    window_shards: int = 16
    window_records: int = 256
    window_bytes: int = 512 * 1024
    interleave: int = 4
    block_bytes: int = 1 << 20
    block_records: int = 4096
    stream_block_records: int = 256
    at_exhaustion: str = "repeat"
    max_epochs: int | None = None


def mix64(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def keyed(key: int, *parts: int) -> int:
    for part in parts:
        key = mix64(key ^ mix64(part + GOLDEN))
    return key


def permuted(key: int, items: list[Any]) -> list[Any]:
    hashes = [mix64(key + (place + 1) * GOLDEN) for place in range(len(items))]
    return [items[place] for place in sorted(range(len(items)), key=hashes.__getitem__)]


class Order:
    """The order of one source's documents."""

    def __init__(self, source: Source, seed: int) -> None:
        self._source = source
        name = int.from_bytes(hashlib.sha256(source.name.encode()).digest()[:8], "little")
        self._root = keyed(mix64(seed + GOLDEN), name)
        self._blocks_of: dict[int, dict[int, list[Document]]] = {}

    def documents(self, epochs: int | None = None) -> Iterator[tuple[int, Document]]:
        """Yield (epoch, document), epoch after epoch."""
        epoch = 0
        while epochs is None or epoch < epochs:
            for document in self.epoch(epoch):
                yield epoch, document
            epoch += 1

    def at(self, epoch: int, key: int, index: int) -> Document:
        """Return the document at a position: window << 25 | block, index in the block's order."""
        if epoch not in self._blocks_of:
            self._blocks_of[epoch] = {place: list(block) for place, block in self.blocks(epoch)}
        return self._blocks_of[epoch][key][index]

    def epoch(self, epoch: int) -> Iterator[Document]:
        for _, block in self.blocks(epoch):
            yield from block

    def blocks(self, epoch: int) -> Iterator[tuple[int, Iterator[Document]]]:
        """Yield (window << 25 | block, its documents in order)."""
        source = self._source
        shards = self._permuted(list(range(len(source.shards))), keyed(self._root, epoch, SHARDS))
        if source.kind == "stream":
            yield from self._streamed(epoch, shards)
            return
        for first in range(0, len(shards), source.window_shards):
            blocks = [
                (position, number, block)
                for position, shard in enumerate(shards)
                if first <= position < first + source.window_shards
                for number, block in enumerate(self._blocks(source.shards[shard]))
            ]
            window = first // source.window_shards
            key = keyed(self._root, epoch, BLOCKS, window)
            for place, found in enumerate(self._permuted(blocks, key)):
                yield window << 25 | place, self._block(epoch, *found)

    def _permuted(self, items: list[Any], key: int) -> list[Any]:
        return permuted(key, items) if self._source.is_shuffled else items

    def _blocks(self, shard: Sequence[Document]) -> list[list[Document]]:
        source = self._source
        if source.kind == "jsonl":
            found: dict[int, list[Document]] = {}
            for document in shard:
                found.setdefault(document.begin_bytes // source.block_bytes, []).append(document)
            return [found.get(number, []) for number in range(max(found, default=0) + 1)]
        blocks: list[list[Document]] = [[]]
        held = 0
        for document in shard:
            block = blocks[-1]
            is_full = len(block) == source.block_records
            if block and (is_full or held + document.size_bytes > source.block_bytes):
                blocks.append([])
                held = 0
            blocks[-1].append(document)
            held += document.size_bytes
        return blocks

    def _block(
        self, epoch: int, position: int, number: int, block: Sequence[Document]
    ) -> Iterator[Document]:
        source = self._source
        windows: list[list[Document]] = [[]]
        held = 0
        for document in block:
            window = windows[-1]
            is_full = len(window) == source.window_records
            if window and (is_full or held + document.size_bytes > source.window_bytes):
                windows.append([])
                held = 0
            windows[-1].append(document)
            held += document.size_bytes
        for window_number, window in enumerate(windows):
            key = keyed(self._root, epoch, RECORDS, position, number, window_number)
            yield from self._permuted(window, key)

    def _streamed(self, epoch: int, shards: list[int]) -> Iterator[tuple[int, Iterator[Document]]]:
        source = self._source
        lanes = max(1, min(source.interleave if source.is_shuffled else 1, len(shards)))
        step = source.stream_block_records
        queues: list[list[tuple[int, int, Sequence[Document]]]] = [[] for _ in range(lanes)]
        for position, shard in enumerate(shards):
            documents = source.shards[shard]
            for number, first in enumerate(range(0, len(documents), step)):
                block = (position, number, documents[first : first + step])
                queues[position % lanes].append(block)
        turn = 0
        while any(queues):
            for lane, queue in enumerate(queues):
                if queue:
                    yield turn * lanes + lane, self._block(epoch, *queue.pop(0))
            turn += 1


# ---- the stream ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Fragment:
    """A drawn piece of a document."""

    source: int
    epoch: int
    document: Document
    offset: int
    length: int
    drawn_step: int = -1

    def is_of(self, other: Fragment) -> bool:
        mine = (self.source, self.epoch, self.document.number)
        return mine == (other.source, other.epoch, other.document.number)


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
    pieces: list[Piece]


@dataclass(frozen=True)
class OracleStep:
    number: int
    rows: list[Row]
    """By canonical number."""
    valid_tokens: int


class Exhausted(Exception):  # noqa: N818 - stands for the product's error
    """The draw came to the end of a source that is to be repeated and may not be."""


class NothingToTrainError(Exception):
    """A step would hold documents of a single token alone."""


@dataclass
class _Queue:
    """Fragments of one source that come next."""

    source: Source
    documents: Iterator[tuple[int, Document]]
    row_tokens: int
    long: str
    known: list[Fragment] = field(default_factory=list)

    def peek(self, number: int) -> Fragment | None:
        while not self.known:
            entry = next(self.documents, None)
            if entry is None:
                return None
            epoch, document = entry
            length = len(document.tokens)
            if length > self.row_tokens and self.long == "skip":
                continue
            if length > self.row_tokens and self.long == "truncate":
                length = self.row_tokens
            self.known = [
                Fragment(number, epoch, document, offset, min(self.row_tokens, length - offset))
                for offset in range(0, length, self.row_tokens)
            ]
        return self.known[0]


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
        self._rows, self._row_tokens = batch["rows"], batch["row_tokens"]
        self._packing = batch.get("packing", "best_fit")
        self._segments_max = batch.get("row_segments_max") or self._derived_segments_max()
        self._sources = sources
        self._queues = [
            _Queue(
                source,
                Order(source, job.get("seed", 0)).documents(self._epochs(source)),
                self._row_tokens,
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
        self.ending = ""
        self.step = 0

    def steps(self, count: int | None = None) -> Iterator[OracleStep]:
        """Yield steps up to the end of the stream."""
        while count is None or self.step < count:
            if self._job.get("steps") is not None and self.step >= self._job["steps"]:
                return
            left = self._tokens_left()
            if left is not None and left <= 0:
                return
            self._mix()
            pool = self._carried + self._draw()
            rows, self._carried = self._pack(pool, len(self._carried), left)
            made = [self._row(row) for row in rows]
            valid = sum(label != self._ignored for row in made for label in row.labels)
            if not valid:
                if not self.ending and (left is None or left > self._rows * self._row_tokens):
                    raise NothingToTrainError
                return
            self._placed_tokens += sum(piece.length for row in made for piece in row.pieces)
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
        if self._packing == "concat":
            return int(self._row_tokens)
        return int(min(self._row_tokens, max(64, self._row_tokens // 8)))

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

    def _draw(self) -> list[Fragment]:
        drawn: list[Fragment] = []
        tokens, count = self._need()
        while not self.ending and tokens > 0 and count > 0:
            number, fragment = self._next()
            if fragment is None:
                self._end_source(number)
                continue
            self._queues[number].known.pop(0)
            fragment.drawn_step = self.step
            self._times[number] += 2 * self._amount(fragment) * self._inverse(number)
            drawn.append(fragment)
            tokens -= fragment.length
            count -= 1
        return drawn

    def _need(self) -> tuple[int, int]:
        if self._packing == "padded":
            return self._rows * self._row_tokens, self._rows - len(self._carried)
        tokens = self._rows * self._row_tokens
        if self._packing == "best_fit":
            tokens += tokens // SLACK
        left = self._tokens_left()
        if left is not None:
            tokens = min(tokens, left)
        tokens -= sum(fragment.length for fragment in self._carried)
        return tokens, self._rows * self._segments_max - len(self._carried)

    def _amount(self, fragment: Fragment) -> int:
        return int(fragment.offset == 0) if self._is_samples else fragment.length

    def _next(self) -> tuple[int, Fragment | None]:
        """Return the source whose next fragment is due first: at the middle of its stretch.

        The end of a source is due as a fragment of one token would be, before others due then.
        """
        best: tuple[int, bool, int] | None = None
        for number in self._active():
            fragment = self._queues[number].peek(number)
            span = 1
            if fragment is not None and not self._is_samples:
                span = fragment.length
            elif fragment is not None and fragment.offset:
                span = -1  # the rest of a sample is due with its beginning
            due = self._times[number] + span * self._inverse(number)
            best = min(best or (due, fragment is not None, number),
                       (due, fragment is not None, number))  # fmt: skip
        assert best is not None
        return best[2], self._queues[best[2]].peek(best[2])

    def _end_source(self, number: int) -> None:
        source = self._sources[number]
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
        if self._packing == "concat":
            return self._concat(pool, carried_count, left)
        usable = len(pool)
        if left is not None:
            through = 0
            for number, fragment in enumerate(pool):
                through += fragment.length
                if through >= left:
                    usable = number + 1
                    break
        row_of = dict.fromkeys(range(len(pool)), -1)
        if self._packing == "padded":
            row_of |= {place: place for place in range(min(usable, self._rows))}
        else:
            row_of |= self._best_fit(pool[:usable], min(carried_count, usable))
            for place, fragment in enumerate(pool):
                if row_of[place] < 0 and fragment.length == self._row_tokens:
                    for other, later in enumerate(pool):
                        if later.is_of(fragment) and later.offset > fragment.offset:
                            row_of[other] = -1
        rows: list[list[Fragment]] = [[] for _ in range(self._rows)]
        for place, fragment in enumerate(pool):
            if row_of[place] >= 0:
                rows[row_of[place]].append(fragment)
        return rows, [fragment for place, fragment in enumerate(pool) if row_of[place] < 0]

    def _best_fit(self, pool: list[Fragment], carried_count: int) -> dict[int, int]:
        """Return the row of each place of the pool, -1 where no row holds it."""
        order = sorted(range(len(pool)), key=lambda n: (pool[n].drawn_step, -pool[n].length))
        free = [self._row_tokens] * self._rows
        carried, drawn = order[:carried_count], order[carried_count:]
        full = [self._segments_max] * self._rows
        if not carried:
            return self._fill(pool, drawn, free, full)
        tokens = sum(pool[n].length for n in carried)
        full_count = sum(pool[n].length == self._row_tokens for n in drawn)
        needed = max(5 * tokens // (4 * self._row_tokens), len(carried) // self._segments_max) + 1
        usable = max(self._rows - full_count, min(needed, self._rows))
        part = max(1, self._segments_max // CARRIED_PART, 5 * len(carried) // (4 * usable))
        part = min(part, self._segments_max)
        room = [part if row < usable else 0 for row in range(self._rows)]
        found = self._fill(pool, carried, free, room)
        room = [
            room[row] + self._segments_max - part if row < usable else self._segments_max
            for row in range(self._rows)
        ]
        found |= self._fill(pool, [n for n in carried if found[n] < 0], free, room)
        return found | self._fill(pool, drawn, free, room)

    def _fill(
        self, pool: list[Fragment], places: list[int], free: list[int], room: list[int]
    ) -> dict[int, int]:
        found = {}
        for place in places:
            length = pool[place].length
            fitting = [
                (free[row], row) for row in range(self._rows) if room[row] and free[row] >= length
            ]
            found[place] = -1
            if fitting:
                _, row = min(fitting)
                found[place] = row
                free[row] -= length
                room[row] -= 1
        return found

    def _concat(
        self, pool: list[Fragment], carried_count: int, left: int | None
    ) -> tuple[list[list[Fragment]], list[Fragment]]:
        space = self._rows * self._row_tokens
        if left is not None:
            space = min(space, left)
        rows: list[list[Fragment]] = [[] for _ in range(self._rows)]
        rest: list[Fragment] = []
        place = 0
        for number, fragment in enumerate(pool):
            done = 0
            while done < fragment.length and place < space:
                row = rows[place // self._row_tokens]
                room = self._row_tokens - place % self._row_tokens
                taken = min(fragment.length - done, room, space - place)
                offset = fragment.offset + done
                last = row[-1] if row else None
                touches = last is not None and last.offset + last.length == offset
                is_drawn = number >= carried_count
                if last is not None and touches and last.is_of(fragment) and is_drawn:
                    last.length += taken
                else:
                    row.append(
                        Fragment(fragment.source, fragment.epoch, fragment.document, offset, taken)
                    )
                done += taken
                place += taken
            if done < fragment.length:
                fragment.offset += done
                fragment.length -= done
                rest.append(fragment)
        return rows, rest

    @property
    def _ignored(self) -> int:
        return int(self._job.get("ignore", -100))

    def _piece(self, fragment: Fragment) -> Piece:
        return Piece(
            self._sources[fragment.source].name,
            fragment.epoch,
            fragment.document.number,
            fragment.offset,
            fragment.length,
        )

    def _row(self, fragments: list[Fragment]) -> Row:
        tokens: list[int] = []
        starts: list[int] = []
        positions: list[int] = []
        for fragment in fragments:
            starts.append(len(tokens))
            end = fragment.offset + fragment.length
            tokens += fragment.document.tokens[fragment.offset : end]
            positions += range(fragment.length)
        labels = tokens.copy()
        if self._job.get("documents", "separate") == "separate":
            for start in starts:
                labels[start] = self._ignored
        elif labels:
            labels[0] = self._ignored
        pad = self._row_tokens - len(tokens)
        labels += [self._ignored] * pad
        if self._job.get("labels", "shifted") == "shifted":
            labels = [*labels[1:], self._ignored]
        tokens += [self._batch.get("pad_id", 0)] * pad
        positions += range(pad)
        return Row(tokens, labels, positions, [self._piece(fragment) for fragment in fragments])
