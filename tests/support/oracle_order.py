"""Documents and the order in which a source gives them, worked out once more in plain loops.

Part of the oracle (tests/support/oracle.py), written from DESIGN.md section 4; shares no code with
what it checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SHARDS, BLOCKS, RECORDS = 1, 2, 3


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
    status: str = "ok"
    """Anything else, as `held_out`, is why it is no sample."""


@dataclass(frozen=True, eq=False)
class Source:
    """A source: its shards in the order of their paths."""

    name: str
    kind: str
    """`tokens` (.bin/.idx and other rows), `jsonl` or `stream` (compressed JSONL, tar, CSV)."""
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
    loss_weight: float = 1.0
    block_counts: Sequence[Sequence[int]] = ()
    """Documents of each block of each shard, where the container itself has blocks."""


def cut(documents: Sequence[Document], records: int, size_bytes: int) -> list[list[Document]]:
    """Cut documents into runs of at most so many records and bytes, at least one record each."""
    runs: list[list[Document]] = [[]]
    held = 0
    for document in documents:
        run = runs[-1]
        if run and (len(run) == records or held + document.size_bytes > size_bytes):
            runs.append([])
            held = 0
        runs[-1].append(document)
        held += document.size_bytes
    return runs


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
                for number, block in enumerate(self._blocks(shard))
            ]
            window = first // source.window_shards
            key = keyed(self._root, epoch, BLOCKS, window)
            for place, found in enumerate(self._permuted(blocks, key)):
                yield window << 25 | place, self._block(epoch, *found)

    def _permuted(self, items: list[Any], key: int) -> list[Any]:
        return permuted(key, items) if self._source.is_shuffled else items

    def _blocks(self, number: int) -> list[list[Document]]:
        source = self._source
        shard = source.shards[number]
        if source.block_counts:
            waiting = iter(shard)
            return [list(islice(waiting, count)) for count in source.block_counts[number]]
        if source.kind == "jsonl":
            found: dict[int, list[Document]] = {}
            for document in shard:
                found.setdefault(document.begin_bytes // source.block_bytes, []).append(document)
            return [found.get(place, []) for place in range(max(found, default=0) + 1)]
        return cut(shard, source.block_records, source.block_bytes)

    def _block(
        self, epoch: int, position: int, number: int, block: Sequence[Document]
    ) -> Iterator[Document]:
        source = self._source
        windows = cut(block, source.window_records, source.window_bytes)
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
