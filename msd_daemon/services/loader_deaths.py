"""Loader workers that hang or die at a record: watched, judged, and the record taken out of the way."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import NamedTuple

from federation.model.job import ResolvedJob
from msd_daemon.core.suspects import Blame, Cause, Suspects, cause_of
from msd_daemon.core.watchdog import Finding, Watchdog
from msd_daemon.services.processes import is_stopped
from msd_daemon.services.quarantine import TEXT_CHARACTERS_MAX, QuarantineEntry
from msd_daemon.services.worker import Worker
from msd_daemon.shm.mark_page import Mark, MarkState
from msd_daemon.sources.formats import format_of
from msd_daemon.workers.stack_signal import STACK_SIGNAL

log = logging.getLogger(__name__)

_FRAMES_SHOWN = 3


class Verdict(NamedTuple):
    """What follows from a worker's death."""

    entry: QuarantineEntry | None = None
    """A record that is not to be touched any more."""
    narrow: Mark | None = None
    """Places whose records are to be handled one by one."""
    place: str = ""
    """What the worker was at, for people; empty where it was at nothing."""

    @property
    def is_settled(self) -> bool:
        """True where the next worker will not die of the same thing in the same way."""
        return self.entry is not None or self.narrow is not None


class LoaderDeaths:
    """Of one job."""

    def __init__(self, job: ResolvedJob) -> None:
        self._job = job
        self._watchdog = Watchdog(job.limits.sample_s)
        self._suspects = Suspects()
        self._over_time: dict[int, int] = {}
        """Pid of workers that were killed for their time: sequence of the record it was."""

    def watch(self, workers: list[Worker], now_ns: int) -> None:
        """Look at every worker; kill -9 what is over its time, its stack logged first."""
        for worker in workers:
            child = worker.child
            if child.status is not None or worker.page is None or child.pid in self._over_time:
                continue
            mark = worker.page.mark()
            has_stopped = mark is not None and is_stopped(child.pid)
            finding = self._watchdog.look(child.pid, mark, now_ns, is_stopped=has_stopped)
            if mark is None or finding is Finding.FINE:
                continue
            with contextlib.suppress(ProcessLookupError):
                if finding is Finding.ASK:
                    worker.page.clear_stack()
                    os.kill(child.pid, STACK_SIGNAL)
                    continue
                log.error(
                    "loader %d (pid %d) is at %s for longer than limits.sample_s = %g s, killing it:\n%s",
                    worker.number, child.pid, self._named(mark), self._watchdog.limit_s,
                    worker.page.stack() or "it wrote no stack",
                )  # fmt: skip
                self._over_time[child.pid] = mark.sequence
                os.kill(child.pid, signal.SIGKILL)

    def acquit(self, worker: Worker) -> Verdict:
        """Say where a worker was that was sent away for what no record can do: it stood still."""
        pid = worker.child.pid
        self._watchdog.forget(pid)
        self._over_time.pop(pid, None)
        mark = None if worker.page is None else worker.page.mark()
        return Verdict(place="" if mark is None else self._named(mark))

    def judge(self, worker: Worker) -> Verdict:
        """Say what a dead worker's page tells."""
        pid, page = worker.child.pid, worker.page
        self._watchdog.forget(pid)
        sequence = self._over_time.pop(pid, None)
        mark = None if page is None else page.mark()
        place = "" if mark is None else self._named(mark)
        if mark is None or page is None or not self._is_known(mark):
            return Verdict(place=place)
        cause = cause_of(worker.child.status or 0, is_over_time=sequence == mark.sequence)
        stack = page.stack()
        blame = self._suspects.died(mark, cause)
        if stack and cause == "crash":
            log.error("loader %d (pid %d) crashed at %s:\n%s", worker.number, pid, self._named(mark), stack)  # fmt: skip
        if blame is Blame.NARROW:
            log.warning("records from %s on are handled one by one", self._named(mark))
            return Verdict(narrow=mark, place=place)
        if blame is Blame.NONE:
            log.warning(
                "loader %d died at %s, which is tried again", worker.number, self._named(mark)
            )
            return Verdict(place=place)
        entry = self._entry(mark, cause, worker.child.status or 0, stack)
        log.error("quarantined: %s: %s", self._named(mark), entry.text)
        return Verdict(entry, place=place)

    def _is_known(self, mark: Mark) -> bool:
        """A worker's memory was anybody's when it crashed: its page is believed within bounds."""
        sources = self._job.sources
        return mark.source < len(sources) and mark.shard < len(sources[mark.source].shards)

    def _entry(self, mark: Mark, cause: Cause, status: int, stack: str) -> QuarantineEntry:
        source = self._job.sources[mark.source]
        shard = source.shards[mark.shard]
        text = {
            "time": f"took longer than limits.sample_s = {self._watchdog.limit_s:g} s",
            "crash": f"ended its loader worker by {_ending(status)}",
            "outside": f"its loader worker was killed twice at it, by {_ending(status)} (out of memory?)",
        }[cause]
        frames = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
        if frames:
            text += "; stack: " + " < ".join(frames[:_FRAMES_SHOWN])
        return QuarantineEntry(
            source.name, mark.shard, shard.fingerprint, mark.epoch, mark.first_place, mark.key,
            cause, text[:TEXT_CHARACTERS_MAX],
        )  # fmt: skip

    def _named(self, mark: Mark) -> str:
        source = self._job.sources[mark.source] if self._is_known(mark) else None
        if source is None:
            return "an unknown record"
        streamed = source.order_class == "streaming"
        place_name = "byte offset" if streamed else format_of(source.format).place_name
        key = f" {mark.key!r}" if mark.key else ""
        path = source.shards[mark.shard].path
        if mark.state == MarkState.READING:
            return f"source {source.name}, {path}: reading it"
        return f"source {source.name}, {path}: record{key} at {place_name} {mark.first_place}"


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
