"""A day of history on disk: what `msdctl why --at` and the charts of a dashboard are made from.

One file an hour in `<state>/history/`, lines of JSON appended by one thread; files older than a day,
or beyond FOLDER_BYTES_MAX, go. A line that a power cut left short is passed over. No database: the
state folder may lie on a network file system, and one lost line harms nobody.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

KEPT_S = 24 * 3600
HOUR_S = 3600
FOLDER_BYTES_MAX = 64 << 20
WAITING_MAX = 1000
"""Records that wait for a slow disk; more are let go."""
SUFFIX = ".jsonl"


class HistoryFiles:
    """The folder; every method blocks.

    Args:
        folder: Made at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hour = -1

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write records, each with `at` in Unix seconds.

        Raises:
            OSError: They can't be written.
        """
        lines: dict[int, list[str]] = {}
        for record in records:
            hour = int(record["at"]) // HOUR_S
            lines.setdefault(hour, []).append(json.dumps(record, separators=(",", ":")))
        for hour, texts in lines.items():
            if hour != self._hour:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.prune(hour)
                self._hour = hour
            data = ("\n".join(texts) + "\n").encode()
            fd = os.open(self._path(hour), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)

    def prune(self, hour: int) -> None:
        """Remove files that are too old at this hour, and the oldest of too many bytes."""
        sizes = [(number, path.stat().st_size, path) for number, path in self._files()]
        total = sum(size for _, size, _ in sizes)
        for number, size, path in sizes:
            if number < hour - KEPT_S // HOUR_S or total > FOLDER_BYTES_MAX:
                path.unlink(missing_ok=True)
                total -= size

    def read(self, since: float, until: float) -> Iterator[dict[str, Any]]:
        """Yield the records between two Unix times, oldest first; broken lines are passed over."""
        for number, path in self._files():
            if not int(since) // HOUR_S <= number <= int(until) // HOUR_S:
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                for line in file:
                    with contextlib.suppress(ValueError):
                        record = json.loads(line)
                        if isinstance(record, dict) and since <= record.get("at", -1) <= until:
                            yield record

    def _files(self) -> list[tuple[int, Path]]:
        """Return the files with their hours, oldest first."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        hours = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        return sorted((int(hour), self._path(int(hour))) for hour in hours if hour.isdigit())

    def _path(self, hour: int) -> Path:
        return self._folder / f"{hour}{SUFFIX}"


class HistoryWriter:
    """Writes records in a thread of its own, so that a slow disk holds nobody up.

    Args:
        files: Where to.
    """

    def __init__(self, files: HistoryFiles) -> None:
        self._files = files
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING_MAX)
        self._is_told = False
        self.dropped_total = 0
        self.cpu_ns = 0
        """Of its thread, so far."""
        self._thread = threading.Thread(target=self._run, name="msd-history", daemon=True)
        self._thread.start()

    def put(self, record: dict[str, Any]) -> None:
        """Have a record written; never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped_total += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits; a disk that hangs is not waited for."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            records = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    records.append(self._queue.get_nowait())
            found = [record for record in records if record is not None]
            try:
                self._files.append(found)
                self._is_told = False
            except OSError as error:
                if not self._is_told:
                    log.warning("history is not written: %s", error)
                self._is_told = True
            self.cpu_ns = time.thread_time_ns()
            if len(found) < len(records):
                return
