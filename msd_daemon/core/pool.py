"""The node's chunk pool: one memory for all source loaders, lent in pieces (DESIGN.md section 3).

Owns which bytes are lent, which chunk lies where, and why a chunk must stay. A chunk stays while it
has undrawn records, or a planned step or a carried fragment needs it. Undrawn read-ahead may be
revoked and made again, so a full pool never deadlocks. Pure; offsets and sizes are bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from msd_daemon.core.chunk_media import ChunkMedia

PAGE_BYTES = 4096
"""Granularity of pieces."""


ANY_LENGTH = 1 << 62


class Piece(NamedTuple):
    """A lent range of the pool."""

    offset_bytes: int
    size_bytes: int


@dataclass(eq=False, slots=True)
class Chunk:
    """A published chunk and the reasons it stays."""

    piece: Piece
    loader: int
    """Source loader that made it; -1 for fetched and copied ones."""
    source_index: int
    block_key: int
    first_index: int
    records: int
    used_bytes: int
    is_drawn: bool = False
    """Every record of it lies before the draw's cursor."""
    step_pins: int = 0
    carried_pins: int = 0
    is_gone: bool = False
    media: ChunkMedia | None = None
    """None where its records hold no images, sounds or videos."""

    @property
    def is_pinned(self) -> bool:
        """True while a planned step or a carried fragment needs it."""
        return self.step_pins > 0 or self.carried_pins > 0


class Revocation(NamedTuple):
    """A loader must continue from here again; chunks from there on were dropped."""

    loader: int
    block_key: int
    first_index: int


class Allocator:
    """First fit over a sorted list of free ranges."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._starts: list[int] = [0]
        self._sizes: list[int] = [capacity_bytes]
        self.free_bytes = capacity_bytes

    def take(self, size_bytes: int) -> Piece | None:
        """Return a piece of at least `size_bytes`, or None where no free range is long enough."""
        size = round_up_page(size_bytes)
        for place, free in enumerate(self._sizes):
            if free < size:
                continue
            start = self._starts[place]
            if free == size:
                del self._starts[place], self._sizes[place]
            else:
                self._starts[place] += size
                self._sizes[place] -= size
            self.free_bytes -= size
            return Piece(start, size)
        return None

    def give_back(self, piece: Piece) -> None:
        """Return a piece, joining it with free neighbours."""
        start, size = piece
        place = bisect.bisect_left(self._starts, start)
        self.free_bytes += size
        if place < len(self._starts) and start + size == self._starts[place]:
            size += self._sizes[place]
            del self._starts[place], self._sizes[place]
        if place > 0 and self._starts[place - 1] + self._sizes[place - 1] == start:
            self._sizes[place - 1] += size
            return
        self._starts.insert(place, start)
        self._sizes.insert(place, size)

    def largest_free_bytes(self) -> int:
        """Return the length of the longest free range."""
        return max(self._sizes, default=0)


def round_up_page(size_bytes: int) -> int:
    """Return the size of the piece that is lent for so many bytes."""
    return -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class PoolStatistics:
    """Frozen snapshot of the pool."""

    capacity_bytes: int
    free_bytes: int
    lent_bytes: int
    undrawn_bytes: int
    pinned_bytes: int
    chunks_count: int
    revocations_total: int


@dataclass(slots=True)
class _Block:
    """Chunks of one block, by first index."""

    firsts: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class Located(NamedTuple):
    """Where a record lies: chunk, record number in it, tokens of the sample before the record."""

    chunk: Chunk
    sample: int
    base_tokens: int
    end_tokens: int = ANY_LENGTH
    """Tokens of the sample up to the end of what lies there: a copy may hold a part."""


class PoolState:
    """Pieces and chunks of one generation of a job."""

    def __init__(self, capacity_bytes: int) -> None:
        self.allocator = Allocator(capacity_bytes)
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._single: dict[tuple[int, int, int, int], Located] = {}
        """Fetched and copied records by (source, block key, index, fragment offset or -1)."""
        self._by_loader: dict[int, list[Chunk]] = {}
        """Undrawn chunks of each loader in order."""
        self._undrawn_bytes: dict[int, int] = {}
        self._planned: dict[int, tuple[int, int]] = {}
        """Last record that plans draw, by source. Chunks up to it are never revoked: two sources of
        one waiting plan would take each other's room for ever."""
        self._lent: dict[int, Piece] = {}
        """Pieces out for filling, by offset."""
        self._revocations = 0
        self._chunks_count = 0

    def lend(self, size_bytes: int) -> Piece | None:
        """Lend a piece for filling, or None where the pool has no room for it now."""
        piece = self.allocator.take(size_bytes)
        if piece is not None:
            self._lent[piece.offset_bytes] = piece
        return piece

    def returned(self, offset_bytes: int) -> Piece:
        """Take back a piece that was lent and not used, or not needed; return it."""
        piece = self._lent.pop(offset_bytes)
        self.allocator.give_back(piece)
        return piece

    def shrink(self, offset_bytes: int, used_bytes: int) -> Piece:
        """Keep only the used part of a lent piece lent; return that."""
        piece = self._lent[offset_bytes] = self._trim(offset_bytes, used_bytes)
        return piece

    def published(
        self,
        offset_bytes: int,
        used_bytes: int,
        *,
        loader: int,
        source_index: int,
        block_key: int,
        first_index: int,
        records: int,
        media: ChunkMedia | None = None,
    ) -> Chunk:
        """Take a filled piece as a chunk; the unused tail goes back at once."""
        piece = self._trim(offset_bytes, used_bytes)
        chunk = Chunk(piece, loader, source_index, block_key, first_index, records, used_bytes)
        chunk.media = media
        block = self._blocks.setdefault((source_index, block_key), _Block())
        place = bisect.bisect_left(block.firsts, first_index)
        block.firsts.insert(place, first_index)
        block.chunks.insert(place, chunk)
        self._by_loader.setdefault(loader, []).append(chunk)
        self._undrawn_bytes[loader] = self._undrawn_bytes.get(loader, 0) + used_bytes
        self._chunks_count += 1
        return chunk

    def published_singles(
        self,
        offset_bytes: int,
        used_bytes: int,
        *,
        source_index: int,
        block_key: int,
        indices: Iterable[int],
        media: ChunkMedia | None = None,
    ) -> Chunk:
        """Take a piece of records that were read again by position."""
        piece = self._trim(offset_bytes, used_bytes)
        listed = list(indices)
        chunk = Chunk(
            piece, -1, source_index, block_key, -1, len(listed), used_bytes, is_drawn=True
        )
        chunk.media = media
        for number, index in enumerate(listed):
            self._single[(source_index, block_key, index, -1)] = Located(chunk, number, 0)
        self._chunks_count += 1
        return chunk

    def locate(
        self, source_index: int, block_key: int, index: int, offset: int, length: int = 0
    ) -> Located | None:
        """Return where a record lies, or None where it is not resident (revoked or not yet read).

        Args:
            source_index: Its source.
            block_key: Its block.
            index: Its place in the block.
            offset: First token that is wanted.
            length: Tokens that are wanted: a copy of fewer is passed over.
        """
        if self._single:
            for start in (offset, -1):
                found = self._single.get((source_index, block_key, index, start))
                if found is not None and offset + length <= found.end_tokens:
                    return found
        chunk = self.find_chunk(source_index, block_key, index)
        return None if chunk is None else Located(chunk, index - chunk.first_index, 0)

    def find_chunk(self, source_index: int, block_key: int, index: int) -> Chunk | None:
        """Return the chunk of a loader's that holds a record, or None."""
        block = self._blocks.get((source_index, block_key))
        if block is None:
            return None
        place = bisect.bisect_right(block.firsts, index) - 1 if len(block.firsts) > 1 else 0
        while place >= 0:
            chunk = block.chunks[place]
            if 0 <= index - chunk.first_index < chunk.records:
                return chunk
            place -= 1  # two loaders that followed one another cut differently: chunks overlap
        return None

    def draw_advanced(self, loader: int, block_key: int, index: int) -> None:
        """Mark a loader's chunks drawn that lie wholly before the cursor (block key, index)."""
        chunks = self._by_loader.get(loader)
        if not chunks:
            return
        passed = 0
        for chunk in chunks:
            is_before = chunk.block_key < block_key or (
                chunk.block_key == block_key and chunk.first_index + chunk.records <= index
            )
            if not is_before:
                break
            chunk.is_drawn = True
            self._undrawn_bytes[loader] -= chunk.used_bytes
            passed += 1
        if passed:
            dropped, chunks[:] = chunks[:passed], chunks[passed:]
            for chunk in dropped:
                self._collect(chunk)

    def plan_advanced(self, source_index: int, block_key: int, index: int) -> None:
        """Keep a source's chunks up to this record: a plan that came needs them."""
        self._planned[source_index] = (block_key, index)

    def pin_step(self, chunk: Chunk) -> None:
        """Keep a chunk for a planned step."""
        chunk.step_pins += 1

    def unpin_step(self, chunk: Chunk) -> None:
        """A planned step no longer needs a chunk."""
        chunk.step_pins -= 1
        assert chunk.step_pins >= 0
        self._collect(chunk)

    def pin_carried(self, chunk: Chunk) -> None:
        """Keep a chunk for a carried fragment."""
        chunk.carried_pins += 1

    def unpin_carried(self, chunk: Chunk) -> None:
        """A carried fragment was placed, or copied elsewhere."""
        chunk.carried_pins -= 1
        assert chunk.carried_pins >= 0
        self._collect(chunk)

    def copied(
        self, piece: Piece, old: Located, key: tuple[int, int, int, int], length: int
    ) -> None:
        """Take over a carried fragment of `length` tokens, copied into a piece of its own.

        The new chunk has the carried pin; the old chunk loses the fragment's.
        """
        self._lent.pop(piece.offset_bytes)
        source_index, block_key, _, offset = key
        chunk = Chunk(piece, -1, source_index, block_key, -1, 1, piece.size_bytes, is_drawn=True)
        chunk.carried_pins = 1
        if old.chunk.media is not None:
            chunk.media = old.chunk.media.part(old.sample, offset - old.base_tokens, length)
        self._single[key] = Located(chunk, 0, offset, offset + length)
        self._chunks_count += 1
        self.unpin_carried(old.chunk)

    @property
    def lent_count(self) -> int:
        """Pieces out for filling, or held by shadows."""
        return len(self._lent)

    def undrawn_bytes(self, loader: int) -> int:
        """Return the bytes of chunks a loader read ahead."""
        return self._undrawn_bytes.get(loader, 0)

    def undrawn(self) -> list[Chunk]:
        """Return all chunks with undrawn records, each loader's in order."""
        return [chunk for chunks in self._by_loader.values() for chunk in chunks]

    def undrawn_chunks(self, loader: int) -> int:
        """Return how many chunks a loader read ahead."""
        return len(self._by_loader.get(loader, ()))

    def revoke_tail(self, loader: int) -> Revocation | None:
        """Drop a loader's last chunk where nothing planned needs it; None where there is none."""
        chunks = self._by_loader.get(loader)
        if not chunks or chunks[-1].is_pinned:
            return None
        last = chunks[-1]
        if (last.block_key, last.first_index) <= self._planned.get(last.source_index, (-1, 0)):
            return None
        chunk = chunks.pop()
        chunk.is_drawn = True
        self._undrawn_bytes[loader] -= chunk.used_bytes
        self._revocations += 1
        self._collect(chunk)
        return Revocation(loader, chunk.block_key, chunk.first_index)

    def statistics(self) -> PoolStatistics:
        """Return a frozen snapshot."""
        undrawn = self.undrawn()
        return PoolStatistics(
            self.allocator.capacity_bytes,
            self.allocator.free_bytes,
            sum(piece.size_bytes for piece in self._lent.values()),
            sum(chunk.piece.size_bytes for chunk in undrawn),
            self.allocator.capacity_bytes
            - self.allocator.free_bytes
            - sum(piece.size_bytes for piece in self._lent.values())
            - sum(chunk.piece.size_bytes for chunk in undrawn if not chunk.is_pinned),
            self._chunks_count,
            self._revocations,
        )

    def _trim(self, offset_bytes: int, used_bytes: int) -> Piece:
        lent = self._lent.pop(offset_bytes)
        keep = round_up_page(used_bytes)
        if keep < lent.size_bytes:
            self.allocator.give_back(Piece(offset_bytes + keep, lent.size_bytes - keep))
        return Piece(offset_bytes, keep)

    def _collect(self, chunk: Chunk) -> None:
        if chunk.is_gone or not chunk.is_drawn or chunk.is_pinned:
            return
        chunk.is_gone = True
        self._chunks_count -= 1
        self.allocator.give_back(chunk.piece)
        if chunk.first_index < 0:
            self._single = {key: at for key, at in self._single.items() if at.chunk is not chunk}
            return
        key = (chunk.source_index, chunk.block_key)
        block = self._blocks[key]
        place = next(i for i, other in enumerate(block.chunks) if other is chunk)
        del block.firsts[place], block.chunks[place]
        if not block.chunks:
            del self._blocks[key]
