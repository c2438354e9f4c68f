"""The names of records by their place in the order: shard, place in it, key."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from federation.model.job import ResolvedJob
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.bad_record import BadRecord
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.transforms.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 16

Place = tuple[int, int]
"""Block key and index in the block's order."""


class RecordName(NamedTuple):
    """What names a record for people."""

    shard: str
    """Path."""
    shard_block: int | None
    """Row group or batch that `place` counts in; None where it counts in the shard."""
    place_name: str
    """What `place` counts: `byte offset`, `row`, `record`, `document`, `token`."""
    place: int
    key: str
    """Empty where nothing names it."""


class RecordNames:
    """Names the records of one source; asked for ascending places, it reads each block once.

    Args:
        job: The resolved job.
        source: Index of the source in it.
        tokenizer: Of the job.
        index_dir: Where indexes are kept, None for none.
    """

    def __init__(
        self, job: ResolvedJob, source: int, tokenizer: Tokenizer, index_dir: Path | None
    ) -> None:
        self._loader: SourceLoader = open_source_loader(
            job, source, tokenizer, index_dir=index_dir, is_naming=True
        )
        self._known: dict[Place, RecordName] = {}
        self._chunk: _Chunk | None = None

    def of(self, places: Iterable[Place]) -> dict[Place, RecordName]:
        """Return the names of records.

        Raises:
            CorruptRecordError: The source no longer has such a record.
        """
        found: dict[Place, RecordName] = {}
        for place in sorted(set(places)):
            if place not in self._known:
                self._known[place] = self._find(place)
            found[place] = self._known[place]
        return found

    def forget(self, cursor: Place, kept: set[Place]) -> None:
        """Forget the names before a cursor, but for those to keep."""
        for place in [place for place in self._known if place < cursor and place not in kept]:
            del self._known[place]

    def close(self) -> None:
        """Close all readers."""
        self._loader.close()

    def _find(self, place: Place) -> RecordName:
        if self._chunk is None:
            self._loader.seek(*place)
            self._chunk = _Chunk((place[0], place[1]), [])
        if place < self._chunk.begin:
            draft = self._loader.fetch(place[0], [place[1]])
            return self._named(place[0], draft.bad[0][1])
        while place >= self._chunk.end and not (
            place[0] == self._chunk.begin[0] and self._chunk.is_block_end
        ):
            draft_on = self._loader.next_chunk(CHUNK_BYTES)
            if draft_on is None:
                raise self._gone(place)
            self._chunk = _Chunk.of(draft_on)
        names, first = self._chunk.names, self._chunk.begin
        at = place[1] - first[1]
        if place[0] != first[0] or not 0 <= at < len(names):
            raise self._gone(place)
        return self._named(place[0], names[at])

    def _named(self, block_key: int, bad: BadRecord) -> RecordName:
        block = self._loader.shard_block(block_key)
        return RecordName(bad.shard, block, bad.place_name, bad.place, bad.key)

    def _gone(self, place: Place) -> CorruptRecordError:
        return CorruptRecordError(
            f"source {self._loader.name!r} no longer holds a record that was drawn (block "
            f"{place[0]:#x}, record {place[1]}): a shard was changed since; restore it",
            source=self._loader.name,
            block_key=place[0],
        )


class _Chunk:
    """Names of consecutive records of a block."""

    def __init__(self, begin: Place, names: list[BadRecord], *, is_block_end: bool = False) -> None:
        self.begin = begin
        self.names = names
        self.is_block_end = is_block_end

    @staticmethod
    def of(draft: ChunkDraft) -> _Chunk:
        meta = draft.meta
        names = [bad for _, bad in draft.bad]
        begin = (meta.block_key, meta.first_index)
        return _Chunk(begin, names, is_block_end=meta.is_block_end)

    @property
    def end(self) -> Place:
        return self.begin[0], self.begin[1] + len(self.names)
