"""The ledger: every token names its document, ranks write down what they were given.

A `Corpus` numbers the tokens of all its documents: an id is found again as (source, document,
offset), and no two documents have neighbouring ids, so whatever a batch holds can be traced. A
`Ledger` is what ranks received; it checks each batch by itself, compares steps with the oracle and
settles accounts: tokens in = delivered + dropped + held in the state, for each source and epoch and
for each single token.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import msd_daemon
from msd_client.contract.state import (
    CURSOR_OFFSET,
    DELIVERED_TOKENS,
    DRAWN_TOKENS,
    DROPPED_COLUMNS,
    IS_EXHAUSTED,
    RECORD_ORDER,
    StreamState,
)
from msd_client.joined_job import Data
from msd_client.step import Step
from tests.support.node import Node, run_ranks
from tests.support.oracle import Document, Order, Piece, Row, Source, length_key
from tests.support.sources import compress

Ids = npt.NDArray[np.int64]
IGNORED = -100
INLINE_FIELDS = ("tokens", "labels", "position_ids", "cu_seqlens", "segment_source")
LINE_HEAD = len('{"text": "')


class Corpus:
    """Documents of given lengths whose tokens are all different.

    Args:
        lengths: By source: the document lengths of each shard.
    """

    def __init__(self, lengths: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self.lengths = {name: lengths[name] for name in sorted(lengths)}
        self.names = list(self.lengths)
        self.source_of: list[int] = []
        self.number_of: list[int] = []
        self._firsts: list[int] = []
        sizes: list[int] = []
        following = 1  # 0 is the padding's
        for source, shards in enumerate(self.lengths.values()):
            for number, length in enumerate(length for shard in shards for length in shard):
                self.source_of.append(source)
                self.number_of.append(number)
                self._firsts.append(following)
                sizes.append(length)
                following += length + 1
        self.vocabulary = following
        self.firsts = np.array(self._firsts, np.int64)
        self.sizes = np.array(sizes, np.int64)

    def place_of(self, tokens: npt.NDArray[Any]) -> tuple[Ids, Ids]:
        """Return the document, counted over all sources, and the offset of each token."""
        wide = tokens.astype(np.int64)
        document = np.searchsorted(self.firsts, wide, side="right") - 1
        offset = wide - self.firsts[document]
        assert (document >= 0).all(), "a token of no document"
        assert (offset < self.sizes[document]).all(), "a token of no document"
        return document, offset

    def piece_of(self, tokens: npt.NDArray[Any], epoch: int = 0) -> Piece:
        """Return the lineage that a segment's tokens tell; they must be one run of one document."""
        document, offset = self.place_of(tokens)
        assert (document == document[0]).all(), "a segment crosses documents"
        assert (np.diff(offset) == 1).all(), "a segment has a gap"
        at = int(document[0])
        name = self.names[self.source_of[at]]
        return Piece(name, epoch, self.number_of[at], int(offset[0]), len(tokens))

    def write_tokens(self, folder: Path, dtype: str = "<i4") -> dict[str, Any]:
        """Write pairs of .bin and .idx; return the sources' sections."""
        folder.mkdir(exist_ok=True)
        document = 0
        for name, shards in self.lengths.items():
            for number, lengths in enumerate(shards):
                last = document + len(lengths)
                write_pair(
                    folder / f"{name}-{number:03d}", self._ids(document, last), lengths, dtype
                )
                document = last
        return {name: {"paths": str(folder / f"{name}-*.bin")} for name in self.names}

    def write_texts(self, folder: Path, kinds: Mapping[str, str]) -> dict[str, Any]:
        """Write JSONL whose words are the ids; kinds: "" or "zst", "gz", "xz" by source."""
        folder.mkdir(exist_ok=True)
        self._write_tokenizer(folder / "tokenizer.json")
        for source in self.oracle_sources(kinds):
            kind = kinds[source.name]
            for number, shard in enumerate(source.shards):
                data = b"".join(_line(document.tokens) + b"\n" for document in shard)
                path = folder / f"{source.name}-{number:03d}.jsonl{'.' if kind else ''}{kind}"
                path.write_bytes(compress(data, kind) if kind else data)
        return {name: {"paths": str(folder / f"{name}-*.jsonl*")} for name in self.names}

    def oracle_sources(
        self, kinds: Mapping[str, str] | None = None, token_bytes: int = 4, **options: Any
    ) -> list[Source]:
        """Return the sources as the oracle takes them; options by source name, or for all."""
        sources = []
        document = 0
        for name, shards in self.lengths.items():
            made: list[list[Document]] = []
            number = 0
            for lengths in shards:
                begin = 0
                made.append([])
                for length in lengths:
                    first = self._firsts[document]
                    tokens = range(first, first + length)
                    size = token_bytes * length if kinds is None else len(_line(tokens))
                    made[-1].append(Document(number, tokens, size, begin))
                    begin += size + 1
                    number += 1
                    document += 1
            kind = "tokens"
            if kinds is not None:
                kind = "stream" if kinds[name] else "jsonl"
            shared = {key: value for key, value in options.items() if key not in self.names}
            sources.append(Source(name, kind, made, **(shared | options.get(name, {}))))
        return sources

    def _ids(self, first: int, last: int) -> npt.NDArray[Any]:
        runs = [
            np.arange(start, start + size)
            for start, size in zip(self.firsts[first:last], self.sizes[first:last], strict=True)
        ]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def _write_tokenizer(self, path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {str(number): number for number in range(self.vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path))


def _line(tokens: Sequence[int]) -> bytes:
    return json.dumps({"text": " ".join(map(str, tokens))}).encode()


def write_pair(prefix: Path, ids: npt.NDArray[Any], lengths: Sequence[int], dtype: str) -> None:
    """Write a pair of one sequence a document."""
    sizes = np.array(lengths, "<i4")
    width = np.dtype(dtype).itemsize
    pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * width
    entries = np.arange(len(sizes) + 1, dtype="<i8")
    code = {"<u2": 8, "<i4": 4}[dtype]
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes((code,))
    head += len(sizes).to_bytes(8, "little") + len(entries).to_bytes(8, "little")
    prefix.with_suffix(".bin").write_bytes(ids.astype(dtype).tobytes())
    prefix.with_suffix(".idx").write_bytes(
        head + sizes.tobytes() + pointers.astype("<i8").tobytes() + entries.tobytes()
    )


@dataclass(frozen=True, eq=False)
class Given:
    """One microbatch as one rank got it, copied out."""

    step: int
    microbatch: int
    rank: int
    tokens: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    position_ids: npt.NDArray[Any]
    cu_seqlens: npt.NDArray[Any]
    segment_source: npt.NDArray[Any]

    def segments(self) -> list[tuple[int, int, int]]:
        """Return (source index, start, end) of each segment, padding left out."""
        bounds = self.cu_seqlens.tolist()
        return [
            (source, start, end)
            for source, start, end in zip(
                self.segment_source.tolist(), bounds[:-1], bounds[1:], strict=True
            )
            if source >= 0
        ]

    def check(self, corpus: Corpus) -> None:
        """Check labels, positions and boundaries; labels shifted, documents separate, pad 0."""
        tokens, labels = self.tokens.reshape(-1), self.labels.reshape(-1)
        bounds = self.cu_seqlens.astype(np.int64)
        starts, lengths = bounds[:-1], np.diff(bounds)
        assert bounds[0] == 0
        assert bounds[-1] == tokens.size
        assert (lengths > 0).all()
        rows = np.arange(0, tokens.size, self.tokens.shape[1])
        assert np.isin(rows, starts).all(), "a row begins inside a segment"
        position = np.arange(tokens.size) - np.repeat(starts, lengths)
        assert np.array_equal(self.position_ids.reshape(-1), position)
        source = np.repeat(self.segment_source, lengths)
        is_pad = source < 0
        assert np.array_equal(is_pad, tokens == 0)
        wanted = np.append(tokens[1:], 0).astype(labels.dtype)
        wanted[bounds[1:] - 1] = IGNORED
        wanted[is_pad] = IGNORED
        assert np.array_equal(labels, wanted)
        if is_pad.all():
            return
        document, offset = corpus.place_of(tokens[~is_pad])
        assert np.array_equal(np.array(corpus.source_of)[document], source[~is_pad])
        is_inside = (position > 0)[~is_pad]
        assert (np.diff(document, prepend=-1)[is_inside] == 0).all(), "a segment crosses documents"
        assert (np.diff(offset, prepend=-1)[is_inside] == 1).all(), "a segment has a gap"


class Account(NamedTuple):
    """Tokens of one epoch of one source."""

    taken_in: int
    delivered: int
    dropped: int
    held: int


@dataclass
class Ledger:
    """What all ranks of a run were given, and the states that they had."""

    corpus: Corpus
    given: list[Given] = field(default_factory=list)
    valid_tokens: dict[int, int] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)
    """By number of completed steps; equal on all ranks."""

    @property
    def steps(self) -> list[int]:
        return sorted(self.valid_tokens)

    @property
    def last_state(self) -> StreamState:
        return StreamState.decode(self.states[max(self.states)])

    def state(self, step: int) -> dict[str, bytes]:
        """Return the state after so many steps, to load."""
        return {"msd": self.states[step]}

    def upto(self, step: int) -> Ledger:
        """Return the part before a step: what was consumed when that state was saved."""
        return Ledger(
            self.corpus,
            [given for given in self.given if given.step < step],
            {number: count for number, count in self.valid_tokens.items() if number < step},
            {number: state for number, state in self.states.items() if number <= step},
        )

    def __add__(self, later: Ledger) -> Ledger:
        """Join two runs that follow each other."""
        assert later.steps[0] == self.steps[-1] + 1
        return Ledger(
            self.corpus,
            self.given + later.given,
            self.valid_tokens | later.valid_tokens,
            self.states | later.states,
        )

    def rows(self) -> dict[int, list[bytes]]:
        """Return each step's rows (tokens, labels, positions) as a sorted multiset."""
        rows: dict[int, list[bytes]] = {}
        for given in self.given:
            for row in zip(given.tokens, given.labels, given.position_ids, strict=True):
                rows.setdefault(given.step, []).append(row_bytes(*row))
        return {step: sorted(found) for step, found in rows.items()}

    def segment_rows(self) -> dict[int, list[bytes]]:
        """Return each step's segments as `rows` does rows; of jobs with segment_multiple 1."""
        found: dict[int, list[bytes]] = {}
        for given in self.given:
            flat = [part.reshape(-1) for part in (given.tokens, given.labels, given.position_ids)]
            for _, start, end in given.segments():
                found.setdefault(given.step, []).append(row_bytes(*(p[start:end] for p in flat)))
        return {step: sorted(segments) for step, segments in found.items()}

    def pieces(self) -> list[tuple[int, int, Piece]]:
        """Return (step, rank, piece) of every segment; epochs are not known to ranks and 0 here."""
        return [
            (given.step, given.rank, self.corpus.piece_of(given.tokens.reshape(-1)[start:end]))
            for given in self.given
            for _, start, end in given.segments()
        ]

    def check(self) -> None:
        """Check each batch by itself, the count of valid tokens, and the order of a document's parts."""
        valid: Counter[int] = Counter()
        for given in self.given:
            given.check(self.corpus)
            valid[given.step] += int((given.labels != IGNORED).sum())
        assert dict(valid) == self.valid_tokens
        assert self.steps == list(range(self.steps[0], self.steps[-1] + 1))

    def check_equals(self, wanted: Mapping[int, list[bytes]], *, is_varlen: bool = False) -> None:
        """Check that every step holds the rows that it should; of varlen jobs the segments."""
        rows = self.segment_rows() if is_varlen else self.rows()
        for step in self.steps:
            assert rows[step] == wanted[step], f"step {step} holds other rows"

    def check_inline(self, job: Mapping[str, Any], dp: int, steps: int) -> None:
        """Check that a reader in one process gives every rank the same batches and states."""
        mine = {(given.step, given.rank, given.microbatch): given for given in self.given}
        with msd_daemon.inline(job, dp=dp) as stream:
            for step in itertools.islice(stream, steps):
                for rank in range(dp):
                    for number, batch in enumerate(step.microbatches(rank)):
                        given = mine.pop((step.number, rank, number))
                        for name in INLINE_FIELDS:
                            assert np.array_equal(getattr(given, name), getattr(batch, name)), name
                assert stream.state_dict() == self.state(step.number + 1)
        assert not mine

    def delivered(self) -> Ids:
        """Return how often each id was delivered. Shape (vocabulary,)."""
        counts = np.zeros(self.corpus.vocabulary, np.int64)
        for given in self.given:
            counts += np.bincount(given.tokens.reshape(-1), minlength=len(counts))
        counts[0] = 0
        return counts

    def settle(
        self, job: Mapping[str, Any], sources: Sequence[Source]
    ) -> dict[tuple[str, int], Account]:
        """Check conservation up to the last state; the ledger must begin with step 0.

        Returns:
            The account of each source and epoch.
        """
        assert self.steps[0] == 0
        return settle(self.corpus, job, sources, self.delivered(), self.last_state)


def settle(
    corpus: Corpus,
    job: Mapping[str, Any],
    sources: Sequence[Source],
    delivered: Ids,
    state: StreamState,
) -> dict[tuple[str, int], Account]:
    """Check that each token that was taken in was delivered, was dropped, or is held.

    Args:
        corpus: All documents.
        job: The job map.
        sources: The oracle's, which know the order.
        delivered: How often each id was delivered. Shape (vocabulary,).
        state: The state after the last delivered step.
    """
    owed = np.zeros(corpus.vocabulary, np.int64)
    accounts: dict[tuple[str, int], Counter[str]] = {}
    carried = state.carried.T.tolist()
    for number, source in enumerate(sources):
        totals: Counter[str] = Counter()
        for epoch, document, taken, dropped, reason in _taken(job, source, state, number):
            account = accounts.setdefault((source.name, epoch), Counter())
            size = len(document.tokens)
            account["in"] += taken
            account["dropped"] += dropped
            totals["drawn"] += taken - dropped
            totals[reason] += 1
            totals["dropped_tokens"] += dropped
            first = document.tokens[0] if size else 0
            owed[first : first + taken - dropped] += 1
        progress = state.progress[:, number].tolist()
        assert totals["drawn"] == progress[DRAWN_TOKENS], source.name
        for place, reason in enumerate(DROPPED_COLUMNS):
            assert totals[reason] == int(state.dropped[place, number]), (source.name, reason)
        held = [entry for entry in carried if entry[0] == number]
        for _, block_key, _, _, length, _ in held:
            accounts[source.name, block_key >> 48]["held"] += length
        held_tokens = sum(entry[4] for entry in held)
        assert progress[DELIVERED_TOKENS] == totals["drawn"] - held_tokens, source.name
    for first, length in _held_ids(sources, job, carried):
        owed[first : first + length] -= 1
    wrong = np.flatnonzero(owed != delivered)
    assert not len(wrong), _describe(corpus, wrong, owed, delivered)
    return {
        key: Account(
            account["in"],
            account["in"] - account["dropped"] - account["held"],
            account["dropped"],
            account["held"],
        )
        for key, account in sorted(accounts.items())
    }


def _taken(
    job: Mapping[str, Any], source: Source, state: StreamState, number: int
) -> Iterable[tuple[int, Document, int, int, str]]:
    """Yield (epoch, document, tokens taken in, tokens dropped, reason) up to the cursor."""
    row_tokens, long = job["batch"][length_key(job["batch"])], job["batch"].get("long", "split")
    progress = state.progress[:, number].tolist()
    if not progress[CURSOR_OFFSET]:
        return  # nothing was drawn
    is_over = progress[IS_EXHAUSTED] or state.ending == f"source {source.name} is exhausted"
    last_epoch = -1
    for place, (epoch, document) in enumerate(Order(source, job.get("seed", 0)).documents()):
        size = len(document.tokens)
        if place > progress[RECORD_ORDER] and (not is_over or epoch != last_epoch):
            return
        last_epoch = epoch
        if not size:
            yield epoch, document, 0, 0, "empty"
        elif size > row_tokens and long == "skip":
            yield epoch, document, size, size, "long_skipped"
        elif size > row_tokens and long == "truncate":
            yield epoch, document, size, size - row_tokens, "long_truncated"
        elif place < progress[RECORD_ORDER]:
            yield epoch, document, size, 0, ""
        else:
            assert place == progress[RECORD_ORDER], "a document behind the cursor of a source's end"
            yield epoch, document, progress[CURSOR_OFFSET], 0, ""


def _held_ids(
    sources: Sequence[Source], job: Mapping[str, Any], carried: list[list[int]]
) -> Iterable[tuple[int, int]]:
    """Yield (first id, tokens) of the carried fragments.

    Their documents are looked up as a planner's record position says: (epoch, block, index).
    """
    orders = [Order(source, job.get("seed", 0)) for source in sources]
    for source, block_key, index, offset, length, _ in carried:
        document = orders[source].at(block_key >> 48, block_key & ((1 << 48) - 1), index)
        assert offset + length <= len(document.tokens)
        yield document.tokens[0] + offset, length


def _describe(corpus: Corpus, wrong: Ids, owed: Ids, delivered: Ids) -> str:
    lines = []
    for token in wrong[:8].tolist():
        piece = corpus.piece_of(np.array([token]))
        lines.append(f"{piece}: due {owed[token]} times, delivered {delivered[token]}")
    return f"{len(wrong)} tokens: " + "; ".join(lines)


def row_bytes(tokens: Any, labels: Any, position_ids: Any) -> bytes:
    """Return a row's content, in one width whatever the dtypes."""
    return b"".join(np.asarray(part, np.int64).tobytes() for part in (tokens, labels, position_ids))


def rows_of(rows: Iterable[Row]) -> list[bytes]:
    """Return an oracle's rows as a ledger's."""
    return sorted(row_bytes(row.tokens, row.labels, row.position_ids) for row in rows)


def read_ledger(
    node: Node,
    corpus: Corpus,
    job: Any,
    mesh: Mapping[str, int],
    steps: int | None,
    *,
    on_step: Any = None,
    **options: Any,
) -> Ledger:
    """Let one rank per DP group read; checks what can be checked without an oracle.

    Args:
        node: A running daemon.
        corpus: What the job reads.
        job: Job map or file.
        mesh: A mesh of dp alone, so that no row is counted twice.
        steps: How many, None for all.
        on_step: Called with (data, step) after each step.
        options: For `run_ranks`.
    """
    parts = [Ledger(corpus) for _ in range(mesh["dp"])]

    def read(data: Data, step: Step) -> None:
        note(parts[data.rank], data, step)
        if on_step is not None:
            on_step(data, step)

    run_ranks(node, job, mesh, steps, read_step=read, **options)
    whole = parts[0]
    for part in parts[1:]:
        assert part.valid_tokens == whole.valid_tokens
        assert part.states == whole.states
        whole.given += part.given
    whole.check()
    return whole


def note(ledger: Ledger, data: Data, step: Step) -> None:
    """Write down a step."""
    for batch in step:
        ledger.given.append(
            Given(
                step.number,
                batch.microbatch,
                data.rank,
                *(
                    np.array(batch[name])
                    for name in (
                        "tokens", "labels", "position_ids", "cu_seqlens", "segment_source",
                    )
                ),
            )
        )  # fmt: skip
        del batch
    ledger.valid_tokens[step.number] = step.valid_tokens
    ledger.states[step.number + 1] = data.train.state_dict()["msd"]
