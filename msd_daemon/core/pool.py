"""The node's chunk pool: one memory for all source loaders, lent in pieces (DESIGN.md section 3).

Owns which bytes are lent, which chunk lies where, and why a chunk must stay. A chunk stays while it
has undrawn records, or a planned step or a carried fragment needs it. Undrawn read-ahead may be
revoked and made again, so a full pool never deadlocks. A chunk that nothing needs any more lies on
until its room is wanted: a generation that begins anew finds it there (core/warm_pool.py). Pure;
offsets and sizes are bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from federation.model.chunk import ChunkMeta
from msd_daemon.core.allocator import Allocator, Piece, round_up_page
from msd_daemon.core.chunk import Chunk, ChunkRun, Located, RecordPlace, SharedPiece
from msd_daemon.core.chunk_media import ChunkMedia

IDLE_CHUNKS_MAX = 16384
"""Chunks that are known still though nothing needs them: each costs the daemon its metadata."""


class Revocation(NamedTuple):
    """A loader must continue from here again; chunks from there on were dropped."""

    loader: int
    block_key: int
    first_index: int


class ParcelChunk(NamedTuple):
    """A chunk of a parcel, as it lies in the pool."""

    source_index: int
    offset_bytes: int
    used_bytes: int
    records: int


@dataclass(frozen=True)
class PoolStatistics:
    """Frozen snapshot of the pool."""

    capacity_bytes: int
    free_bytes: int
    """Nobody needs them; what lies there still may be `idle_bytes`."""
    idle_bytes: int
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


class PoolState:
    """Pieces and chunks of one generation of a job.

    Args:
        capacity_bytes: Of the pool.
        kept: Pieces with chunks that are about to be enlisted.
    """

    def __init__(self, capacity_bytes: int, kept: Iterable[Piece] = ()) -> None:
        self.allocator = Allocator(capacity_bytes, kept)
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._single: dict[RecordPlace, Located] = {}
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
        self._runs: dict[int, ChunkRun] = {}
        self._idle: dict[Chunk, list[tuple[RecordPlace, Located]]] = {}
        """Chunks that nothing needs, the longest idle first; of fetched and copied ones what they hold."""
        self._idle_bytes = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that nobody needs."""
        return self.allocator.free_bytes + self._idle_bytes

    def loader_opened(
        self, loader: int, source_index: int, own: tuple[int, int], begin: tuple[int, int]
    ) -> None:
        """Take note of where a source loader begins: what it publishes follows without a gap.

        Args:
            loader: Its number.
            source_index: Its source.
            own: Which of the source's loaders it is, of how many.
            begin: (block key, index) of its first record.
        """
        self._runs[loader] = ChunkRun(source_index, own, begin)

    def lend(self, size_bytes: int) -> Piece | None:
        """Lend a piece for filling, or None where the pool has no room for it now."""
        piece = self.allocator.take(size_bytes)
        if piece is None and round_up_page(size_bytes) <= self.room_bytes:
            while piece is None and self._idle:
                self._forget(next(iter(self._idle)))
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
        meta: ChunkMeta | None = None,
    ) -> Chunk:
        """Take a filled piece as a chunk; the unused tail goes back at once."""
        piece = self._trim(offset_bytes, used_bytes)
        chunk = Chunk(piece, loader, source_index, block_key, first_index, records, used_bytes)
        chunk.media, chunk.meta = media, meta
        self.enlist(chunk)
        return chunk

    def enlist(self, chunk: Chunk) -> None:
        """Take a chunk in as the last one that its loader read; its piece is no other's."""
        block = self._blocks.setdefault((chunk.source_index, chunk.block_key), _Block())
        place = bisect.bisect_left(block.firsts, chunk.first_index)
        block.firsts.insert(place, chunk.first_index)
        block.chunks.insert(place, chunk)
        loader = chunk.loader
        self._by_loader.setdefault(loader, []).append(chunk)
        self._undrawn_bytes[loader] = self._undrawn_bytes.get(loader, 0) + chunk.used_bytes
        self._chunks_count += 1
        if chunk.meta is not None:
            chunk.run = self._runs.get(loader)

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
        self.enlist_singles(
            ((source_index, block_key, index, -1), Located(chunk, number, 0))
            for number, index in enumerate(listed)
        )
        return chunk

    def enlist_singles(self, places: Iterable[tuple[RecordPlace, Located]]) -> None:
        """Take a chunk in by the records and fragments that it holds; its piece is no other's."""
        self._single.update(places)
        self._chunks_count += 1

    def published_parcel(
        self, offset_bytes: int, used_bytes: int, parts: Iterable[ParcelChunk]
    ) -> list[Chunk]:
        """Take a piece with chunks of another node's samples; each has one step pin.

        Args:
            offset_bytes: Of the piece that was lent.
            used_bytes: Of it, from its start on.
            parts: The chunks in it.
        """
        listed = list(parts)
        shared = SharedPiece(self._trim(offset_bytes, used_bytes), len(listed))
        chunks = []
        for part in listed:
            place = Piece(part.offset_bytes, part.used_bytes)
            chunk = Chunk(place, -1, part.source_index, -1, -1, part.records, part.used_bytes)
            chunk.is_drawn, chunk.step_pins, chunk.shared_piece = True, 1, shared
            chunks.append(chunk)
        self._chunks_count += len(chunks)
        return chunks

    def drop_unpinned_singles(self) -> None:
        """Let go what was enlisted for carried fragments that lie elsewhere."""
        for chunk in dict.fromkeys(located.chunk for located in self._single.values()):
            self._collect(chunk)

    def dropped(self, piece: Piece) -> None:
        """Take back a piece that was kept, and whose chunk nobody enlisted."""
        self.allocator.give_back(piece)

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
                if chunk.run is not None:
                    chunk.run.drawn.append(chunk)
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

    def loader_closed(self, loader: int) -> None:
        """A source loader reads no more: what no plan needs of it goes."""
        for chunk in self._by_loader.pop(loader, []):
            chunk.is_drawn, chunk.run = True, None
            self._collect(chunk)
        self._undrawn_bytes.pop(loader, None)
        self._runs.pop(loader, None)

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

    def first_undrawn_block(self, loader: int) -> int | None:
        """Return the key of the first block that a loader has undrawn chunks of, None where none."""
        chunks = self._by_loader.get(loader)
        return chunks[0].block_key if chunks else None

    def last_place(self, loader: int) -> tuple[int, int] | None:
        """Return (block key, first index) of a loader's last undrawn chunk, None where it has none."""
        chunks = self._by_loader.get(loader)
        return (chunks[-1].block_key, chunks[-1].first_index) if chunks else None

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
        chunk.run = None
        self._undrawn_bytes[loader] -= chunk.used_bytes
        self._revocations += 1
        self._collect(chunk)
        return Revocation(loader, chunk.block_key, chunk.first_index)

    def statistics(self) -> PoolStatistics:
        """Return a frozen snapshot."""
        undrawn = self.undrawn()
        return PoolStatistics(
            self.allocator.capacity_bytes,
            self.room_bytes,
            self._idle_bytes,
            sum(piece.size_bytes for piece in self._lent.values()),
            sum(chunk.piece.size_bytes for chunk in undrawn),
            self.allocator.capacity_bytes
            - self.room_bytes
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
        if chunk.shared_piece is not None:
            chunk.shared_piece.chunks -= 1
            if not chunk.shared_piece.chunks:
                self.allocator.give_back(chunk.shared_piece.piece)
            return
        places: list[tuple[RecordPlace, Located]] = []
        if chunk.first_index < 0:
            places = [(key, at) for key, at in self._single.items() if at.chunk is chunk]
            for key, _ in places:
                del self._single[key]
        else:
            block_at = (chunk.source_index, chunk.block_key)
            block = self._blocks[block_at]
            place = next(i for i, other in enumerate(block.chunks) if other is chunk)
            del block.firsts[place], block.chunks[place]
            if not block.chunks:
                del self._blocks[block_at]
        if chunk.run is None and not places:
            self.allocator.give_back(chunk.piece)
            return
        self._idle[chunk] = places
        self._idle_bytes += chunk.piece.size_bytes
        if len(self._idle) > IDLE_CHUNKS_MAX:
            self._forget(next(iter(self._idle)))

    def _forget(self, chunk: Chunk) -> None:
        """Give an idle chunk's room back, and that of the idle ones before it in its run.

        A run has no gap: what lies before the chunk is no part of it any more.
        """
        leaving = [chunk] if chunk.run is None else chunk.run.forget(chunk)
        for gone in leaving:
            gone.run = None
            if self._idle.pop(gone, None) is not None:
                self._idle_bytes -= gone.piece.size_bytes
                self.allocator.give_back(gone.piece)

    def runs(self) -> list[tuple[ChunkRun, list[Chunk]]]:
        """Return each loader's run with its chunks in order, idle ones included."""
        return [
            (run, [*run.drawn, *self._by_loader.get(loader, ())])
            for loader, run in self._runs.items()
        ]

    def places(self) -> list[tuple[RecordPlace, Located]]:
        """Return where single records and fragments lie, in idle chunks too."""
        return [*self._single.items(), *(place for idle in self._idle.values() for place in idle)]
