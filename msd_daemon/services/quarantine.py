"""The records of a job that no worker touches any more: durable before anything is planned by them.

One line of JSON for each, appended and synced, in the folder of the job; a resume, a restart of the
daemon or another generation reads them all. They are events of the stream (DESIGN.md P2): each holds
from its epoch on, so that a replay of earlier ones gives what it gave.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from federation.model.chunk import RecordStatus
from federation.model.job import ResolvedJob
from msd_client.contract.errors import ErrorBudgetExceededError, ResourceError
from msd_client.contract.position import unpack_block_key
from msd_daemon.sources.record_guard import SourceGuard
from msd_daemon.workers.bad_notice import BadNotice

log = logging.getLogger(__name__)

ENTRIES_MAX = 10_000
"""Of one source."""
FILE_BYTES_MAX = 256 << 20
TEXT_CHARACTERS_MAX = 1000
SUSPECTS_MAX = 64


@dataclass(frozen=True)
class QuarantineEntry:
    """One record."""

    source: str
    shard: int
    """Number in the source."""
    fingerprint: str
    """Of the shard: an entry of another file is passed over."""
    epoch: int
    """It holds from this epoch on."""
    place: int
    key: str
    cause: str
    """crash, time, outside (killed twice at it), user (in the process of the user's code), or lost."""
    text: str
    records: int = 0
    """Of a shard that could not be opened in this one epoch: records lost of block `place`, or, of a
    streamed shard, from record `place` on. 0: a record."""


class Quarantine:
    """Entries of one job, and the places where a worker died that are tried record by record.

    Args:
        path: The file; made at the first entry.
        job: The resolved job.
    """

    def __init__(self, path: Path, job: ResolvedJob) -> None:
        self._path = path
        self._job = job
        self._entries: dict[tuple[int, int, int], QuarantineEntry] = {}
        """By index of the source, shard and place."""
        self._losses: dict[tuple[int, int, int, int], QuarantineEntry] = {}
        """By index of the source, shard, block and epoch."""
        self._suspects: dict[int, list[list[int]]] = {}
        self._is_loaded = False

    @property
    def entries(self) -> list[QuarantineEntry]:
        """All that are known."""
        return [*self._entries.values(), *self._losses.values()]

    async def load(self) -> None:
        """Read what earlier runs of the job left; the first call does it.

        Raises:
            ResourceError: The file is there and can't be read.
        """
        if self._is_loaded:
            return
        try:
            found = await asyncio.to_thread(self._read)
        except OSError as error:
            raise ResourceError(
                f"{self._path} can't be read: {error.strerror}; it names the records that killed a "
                "worker: mend its rights",
                path=str(self._path),
            ) from error
        for entry in found:
            self._take(entry)
        self._is_loaded = True

    async def add(self, entry: QuarantineEntry) -> None:
        """Make an entry durable.

        Raises:
            OSError: It can't be written: nothing may be planned by it.
            ErrorBudgetExceededError: The source has too many.
        """
        counts = Counter(known.source for known in self.entries)
        if counts[entry.source] >= ENTRIES_MAX:
            raise ErrorBudgetExceededError(
                f"source {entry.source}: {ENTRIES_MAX} of its records killed or hung a worker, the "
                f"last one: {entry.text}; mend its shards or its decoder",
                source=entry.source,
                seen=counts[entry.source] + 1,
                limit=ENTRIES_MAX,
            )
        await asyncio.to_thread(self._append, entry)
        self._take(entry)

    def loss_entry(self, told: dict[str, Any]) -> QuarantineEntry:
        """Return the entry of a loss that a worker told of (FromLoader.LOST)."""
        source = self._job.sources[told["source"]]
        shard = source.shards[told["shard"]]
        text = f"{shard.path} {told['text']}"[:TEXT_CHARACTERS_MAX]
        entry = (
            source.name,
            told["shard"],
            shard.fingerprint,
            told["epoch"],
            told["block"],
            "",
            "lost",
        )
        return QuarantineEntry(*entry, text, told["records"])

    def new_entries(self, notice: BadNotice) -> list[QuarantineEntry]:
        """Return entries of records that a user's code hung, died or took too much on, as yet unknown.

        Without one every restart and every replay would wait for them again. Rows of row groups are
        left out: their places do not tell them apart.
        """
        if not 0 <= notice.source < len(self._job.sources):
            return []
        source = self._job.sources[notice.source]
        numbers = {shard.path: number for number, shard in enumerate(source.shards)}
        found = []
        for row in notice.rows:
            number = numbers.get(row.shard)
            if row.status != RecordStatus.QUARANTINED or row.place_name == "row" or number is None:
                continue
            epoch = unpack_block_key(notice.block_key).epoch
            known = self._entries.get((notice.source, number, row.place))
            if known is None or epoch < known.epoch:
                text, print_ = row.text[:TEXT_CHARACTERS_MAX], source.shards[number].fingerprint
                entry = (source.name, number, print_, epoch, row.place, row.key, "user", text)
                found.append(QuarantineEntry(*entry))
        return found

    def suspect(self, source: int, shard: int, first_place: int, last_place: int) -> None:
        """Have the records between two places handled one by one."""
        suspects = self._suspects.setdefault(source, [])
        suspects.append([shard, first_place, last_place])
        del suspects[:-SUSPECTS_MAX]

    def orders(self) -> list[dict[str, Any]]:
        """Return what a new worker has to be told, a message for each source (ToLoader.QUARANTINE)."""
        sources = sorted({key[0] for key in (*self._entries, *self._losses)} | set(self._suspects))
        return [self.order(source) for source in sources]

    def order(self, source: int) -> dict[str, Any]:
        """Return what workers have to be told of one source."""
        records = [
            [shard, place, entry.epoch, entry.text]
            for (of, shard, place), entry in self._entries.items()
            if of == source
        ]
        return {
            "source": source,
            "records": records,
            "suspects": list(self._suspects.get(source, [])),
            "losses": [
                [*place, entry.records, entry.text]
                for (of, *place), entry in self._losses.items()
                if of == source
            ],
        }

    def _take(self, entry: QuarantineEntry) -> None:
        try:
            source = self._job.source_index(entry.source)
        except KeyError:
            return  # of another stream of the job
        shards = self._job.sources[source].shards
        if entry.shard >= len(shards) or shards[entry.shard].fingerprint != entry.fingerprint:
            log.warning("%s: an entry is of no shard of %s any more", self._path, entry.source)
            return
        if entry.records:
            self._losses.setdefault((source, entry.shard, entry.place, entry.epoch), entry)
            return
        key = (source, entry.shard, entry.place)
        known = self._entries.get(key)
        if known is None or entry.epoch < known.epoch:
            self._entries[key] = entry

    def _read(self) -> list[QuarantineEntry]:
        try:
            with self._path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for line in data.splitlines():
            try:
                found.append(QuarantineEntry(**json.loads(line)))
            except (ValueError, TypeError):  # the last one of a machine that lost its power
                log.warning("%s: a line is cut short, it is passed over", self._path)
        return found

    def _append(self, entry: QuarantineEntry) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        told = asdict(entry)
        if not entry.records:
            del told["records"]  # earlier releases read the line, too
        line = json.dumps(told).encode() + b"\n"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            end = os.fstat(fd).st_size
            if end and os.pread(fd, 1, end - 1) != b"\n":
                line = b"\n" + line  # behind one that was cut short
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def guards_of(path: Path, job: ResolvedJob) -> list[SourceGuard]:
    """Return a guard for each source that knows what a job's quarantine file names. Blocks.

    Raises:
        OSError: The file is there and can't be read.
    """
    quarantine = Quarantine(path, job)
    for entry in quarantine._read():
        quarantine._take(entry)
    guards = [
        SourceGuard(number, shards={shard.path: at for at, shard in enumerate(source.shards)})
        for number, source in enumerate(job.sources)
    ]
    for order in quarantine.orders():
        guards[order["source"]].learn(order)
    return guards
