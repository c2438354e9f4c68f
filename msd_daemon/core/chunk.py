"""Published chunks, and the runs of them that follow each other without a gap. Pure; sizes are bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from federation.model.chunk import ChunkMeta
from msd_daemon.core.allocator import Piece
from msd_daemon.core.chunk_media import ChunkMedia

ANY_LENGTH = 1 << 62
RecordPlace = tuple[int, int, int, int]
"""(source, block key, index, first token of a fragment or -1 for the whole record)."""


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
    meta: ChunkMeta | None = None
    """What the planner was told of it; None for fetched and copied ones."""
    shared_piece: SharedPiece | None = None
    """The piece that it lies in with others; `piece` is its part of that."""
    run: ChunkRun | None = None
    """The run that it is a part of; None where nothing is known of what lies around it."""

    @property
    def is_pinned(self) -> bool:
        """True while a planned step or a carried fragment needs it."""
        return self.step_pins > 0 or self.carried_pins > 0

    @property
    def end(self) -> tuple[int, int]:
        """(block key, index) behind its last record."""
        return self.block_key, self.first_index + self.records


@dataclass(eq=False, slots=True)
class SharedPiece:
    """A piece that several chunks lie in: it goes with the last of them."""

    piece: Piece
    chunks: int


class Located(NamedTuple):
    """Where a record lies: chunk, record number in it, tokens of the sample before the record."""

    chunk: Chunk
    sample: int
    base_tokens: int
    end_tokens: int = ANY_LENGTH
    """Tokens of the sample up to the end of what lies there: a copy may hold a part."""


class ChunkRun:
    """What one source loader published and the pool holds still: nothing is missing in between.

    Args:
        source_index: Its source.
        own: Which of the source's loaders it is, of how many.
        begin: (block key, index) from which on all of the loader's records are in the run.
    """

    def __init__(self, source_index: int, own: tuple[int, int], begin: tuple[int, int]) -> None:
        self.source_index = source_index
        self.own = own
        self.begin = begin
        self.drawn: deque[Chunk] = deque()
        """Chunks that the draw passed, in order; the undrawn ones follow them."""
        self.lane_ends: list[ChunkMeta] = []
        """Of chunks that left the run: no chunk behind them says that their lanes ended."""

    def forget(self, chunk: Chunk) -> list[Chunk]:
        """Let the run begin behind a drawn chunk; return what it loses, the chunk included."""
        leaving = []
        while True:
            gone = self.drawn.popleft()
            leaving.append(gone)
            if gone.meta is not None and gone.meta.is_lane_end:
                epoch = gone.block_key >> 48
                self.lane_ends = [end for end in self.lane_ends if end.block_key >> 48 == epoch]
                self.lane_ends.append(gone.meta)
            if gone is chunk:
                self.begin = chunk.end
                return leaving
