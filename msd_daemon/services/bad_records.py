"""A job's bad records: noted off the event loop as chunks arrive, told to whoever asks."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from federation.model.chunk import RecordStatus
from federation.model.job import ResolvedJob
from msd_client.contract.errors import NotFoundError
from msd_daemon.services.bad_list import BadList, ListedRecord
from msd_daemon.services.job_folder import named_folders
from msd_daemon.workers.bad_notice import BadNotice

log = logging.getLogger(__name__)

LIST_FILE = "bad.db"
WAITING_MAX = 50_000
"""Records that wait for the disk; more are let go of with a word in the log."""
PAGE_MAX = 2000
"""Records of one answer, which has to fit a control message."""

Cursors = list[tuple[int, int]]


class BadRecords:
    """Owns the list of one session.

    Args:
        folder: The job's.
        job: The resolved job.
        uid: Of its owner.
    """

    def __init__(self, folder: Path, job: ResolvedJob, uid: int) -> None:
        self._list = BadList(folder / LIST_FILE)
        self._names = [source.name for source in job.sources]
        self._job, self._uid = job, uid
        self._waiting: list[tuple[str, BadNotice]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_broken = False
        self._is_closed = False
        self._lock = threading.Lock()
        """Held by who writes: a write that is under way ends before `close` does."""

    @cached_property
    def _about(self) -> dict[str, str]:
        return {"job": self._job.name, "digest": self._job.digest(), "uid": str(self._uid)}

    def add(self, notice: BadNotice) -> None:
        """Note what a chunk holds; written soon."""
        if self._is_broken or self._is_closed or not 0 <= notice.source < len(self._names):
            return
        if sum(len(waiting.rows) for _, waiting in self._waiting) >= WAITING_MAX:
            log.warning("bad records of %s are not listed: the disk is slow", self._about["job"])
            return
        self._waiting.append((self._names[notice.source], notice))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def page(self, source: str | None, offset: int, limit: int) -> dict[str, Any]:
        """Return a part of the list, see `page_of`; what was noted so far is in it."""
        while self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])
        return await asyncio.to_thread(page_of, self._list, source, offset, limit)

    def close(self, cursors: Cursors | None) -> None:
        """Write what waits, and how far the draw came; blocks for a moment."""
        if self._is_closed:
            return
        if self._is_broken or (not self._waiting and not self._list.path.exists()):
            self._shut()
            return
        waiting, self._waiting = self._waiting, []
        about = dict(self._about)
        if cursors is not None:
            about["cursors"] = json.dumps(dict(zip(self._names, cursors, strict=True)))
        self._put(waiting, about)
        self._shut()

    def _shut(self) -> None:
        with self._lock:
            self._is_closed = True

    async def _write(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            await asyncio.to_thread(self._put, waiting, self._about)

    def _put(self, notices: list[tuple[str, BadNotice]], about: dict[str, str]) -> None:
        try:
            with self._lock:
                if not self._is_closed:
                    self._list.write(notices, about)
        except OSError as error:
            # The list is for people: the job goes on, its counts stand in the state.
            self._is_broken = True
            log.warning(
                "%s can't be written, bad records are only counted: %s", self._list.path, error
            )


def page_of(listing: BadList, source: str | None, offset: int, limit: int) -> dict[str, Any]:
    """Return a part of a list for a client: `records` of maps, `total`, `unlisted` by source."""
    page = listing.read(source, max(offset, 0), min(max(limit, 0), PAGE_MAX))
    return {
        "records": [_told(row) for row in page.rows],
        "total": page.total,
        "unlisted": page.forgotten,
    }


def page_of_folder(
    state_dir: Path, name: str | None, uid: int, wanted: tuple[str | None, int, int]
) -> dict[str, Any] | None:
    """Return a part of the list of the last run of a job that is over, None where there is none.

    Args:
        state_dir: The daemon's.
        name: As `named_folders` takes it; None: of any job, the last that has a list.
        uid: Who asks: owners see their own.
        wanted: Source, offset and limit.

    Raises:
        NotFoundError: The job has no such source.
    """
    found = named_folders(state_dir, name, uid)
    if name is None:
        found = [known for known in found if (known.folder.path / LIST_FILE).is_file()]
    if not found:
        return None
    if found[0].sources:
        check_source(found[0].name, wanted[0], found[0].sources)
    path = found[0].folder.path
    listing = BadList(path / LIST_FILE)
    page = page_of(listing, *wanted)
    cursors = {
        source: (int(key), int(index))
        for source, (key, index) in json.loads(listing.about().get("cursors", "{}")).items()
    }
    mark_drawn(page, cursors)
    return page | {"job": found[0].name, "folder": str(path)}


def check_source(job: str, source: str | None, names: Sequence[str]) -> None:
    """Refuse the name of a source that a job does not have; None is any.

    Raises:
        NotFoundError: It has none of that name.
    """
    if source is not None and source not in names:
        raise NotFoundError(
            f"job {job} has no source {source!r}: name one of {', '.join(names)}", source=source
        )


def mark_drawn(page: dict[str, Any], cursors: dict[str, tuple[int, int]] | None) -> None:
    """Say of each record whether the draw has passed it; None: nothing was drawn."""
    for record in page["records"]:
        cursor = (cursors or {}).get(record["source"], (0, 0))
        record["is_drawn"] = (record["block_key"], record["block_index"]) < tuple(cursor)


def _told(row: ListedRecord) -> dict[str, Any]:
    return row._asdict() | {"status": RecordStatus(row.status).name.lower()}
