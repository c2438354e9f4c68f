"""Where records of a name stand in the order of their source, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from federation.model.job import ResolvedJob
from msd_client.contract.errors import ConfigError
from msd_client.contract.position import pack_block_key, unpack_block_key
from msd_daemon.history.record_names import CHUNK_BYTES, Place, RecordName
from msd_daemon.sources.bad_record import BadRecord
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.transforms.tokenizer import Tokenizer

Tell = Callable[[int], None]
"""Is told of records that were looked at."""


class FoundRecord(NamedTuple):
    """A record at its place in one epoch."""

    place: Place
    name: RecordName


@dataclass(frozen=True)
class WantedRecord:
    """What a person calls a record: its key, or `shard:place`.

    Args:
        text: As it was written.
        paths: Of the source's shards.
    """

    text: str
    paths: tuple[str, ...]

    @property
    def shard_place(self) -> tuple[list[int], int] | None:
        """Numbers of the shards that it may name, and the place; None where it is a key alone."""
        shard, separator, place = self.text.rpartition(":")
        if not separator or not shard or not place.isdigit():
            return None
        numbers = [
            number
            for number, path in enumerate(self.paths)
            if path == shard or path.endswith(f"/{shard}")
        ]
        return (numbers, int(place)) if numbers else None

    def is_named(self, bad: BadRecord) -> bool:
        """True for a record of this name."""
        if bad.key == self.text:
            return True
        found = self.shard_place
        if found is None or bad.place != found[1]:
            return False
        return any(self.paths[number] == bad.shard for number in found[0])


class RecordSearch:
    """Finds the records of a name; what one epoch told spares the next one the whole source.

    Args:
        job: The resolved job.
        source: Index of the source in it.
        wanted: The name.
        tokenizer: Of the job.
        index_dir: Where indexes are kept, None for none.
        tell: Told of records as they are looked at.
    """

    def __init__(
        self,
        job: ResolvedJob,
        source: int,
        wanted: WantedRecord,
        tokenizer: Tokenizer,
        index_dir: Path | None,
        tell: Tell,
    ) -> None:
        self._job, self._source, self._wanted = job, source, wanted
        self._tokenizer, self._index_dir = tokenizer, index_dir
        self._tell = tell
        named = wanted.shard_place
        self._numbers: list[int] | None = None if named is None else named[0]
        """Shards that hold such records; None: not known yet."""
        self._by_path = {shard.path: at for at, shard in enumerate(job.sources[source].shards)}

    def in_epoch(self, epoch: int) -> list[FoundRecord]:
        """Return the records of that name in an epoch's order.

        Where neither the name nor a former epoch tells their shards, the whole source is read.
        """
        if self._numbers is None:
            found = list(self._scan(epoch, 0, 1))
            self._numbers = sorted({self._by_path[record.name.shard] for record in found})
            return found
        found = []
        for number in self._numbers:
            found += self._in_shard(epoch, number)
        return sorted(found, key=lambda record: record.place)

    def _in_shard(self, epoch: int, number: int) -> Iterator[FoundRecord]:
        with closing(self._open(0, 1)) as loader:
            lane, lanes = loader.lane_of_shard(epoch, number)
            keys = loader.keys_of_shard(epoch, number)
            for key in keys or ():
                loader.seek(key, 0)
                yield from self._named(loader, is_inside=lambda _: True, is_one_block=True)
        if keys is None:
            yield from self._scan(epoch, lane, lanes)

    def _scan(self, epoch: int, part: int, parts: int) -> Iterator[FoundRecord]:
        with closing(self._open(part, parts)) as loader:
            loader.seek(pack_block_key(epoch, 0, 0), 0)
            yield from self._named(loader, lambda at: unpack_block_key(at).epoch == epoch)

    def _named(
        self, loader: SourceLoader, is_inside: Callable[[int], bool], *, is_one_block: bool = False
    ) -> Iterator[FoundRecord]:
        while (draft := loader.next_chunk(CHUNK_BYTES)) is not None:
            key = draft.meta.block_key
            if not is_inside(key):
                return
            for at, bad in draft.bad:
                if self._wanted.is_named(bad):
                    block = loader.shard_block(key)
                    name = RecordName(bad.shard, block, bad.place_name, bad.place, bad.key)
                    yield FoundRecord((key, draft.meta.first_index + at), name)
            self._tell(len(draft.bad))
            if is_one_block and draft.meta.is_block_end:
                return

    def _open(self, part: int, parts: int) -> SourceLoader:
        return open_source_loader(
            self._job,
            self._source,
            self._tokenizer,
            part,
            parts,
            index_dir=self._index_dir,
            is_naming=True,
        )


def source_number(job: ResolvedJob, name: str) -> int:
    """Return the index of a source.

    Raises:
        ConfigError: The job has none of that name; those that it has are named.
    """
    try:
        return job.source_index(name)
    except KeyError:
        known = ", ".join(source.name for source in job.sources[:20])
        raise ConfigError(
            f"job {job.name} has no source {name!r}: name one of {known}", source=name
        ) from None
