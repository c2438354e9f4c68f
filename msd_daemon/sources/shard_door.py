"""Shards that cannot be opened: waited for, and then lost with all records that they are known to have.

A file system that is away for seconds must not cost a shard, so opening is tried again for a while
(`limits.open_s`). What is lost then is counted in full, block by block, so that `on_error` judges what
was lost, not that one file was. Where nothing tells how many records those are, under `skip` as many
count as spend its budget.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_daemon.shm.mark_page import MarkState
from msd_daemon.sources.record import RawRecord, lost_shard
from msd_daemon.sources.record_guard import Loss, LostPlace, SourceGuard
from msd_daemon.stores.urls import is_url

log = logging.getLogger(__name__)

_UNREADABLE = int(RecordStatus.UNREADABLE)
_FIRST_WAIT_S = 0.02
_WAIT_S_MAX = 1.0


class ShardDoor:
    """Tells whether shards of one source can be opened now.

    Args:
        guard: Of the source in this process: orders are heard, and it is marked that it reads.
        wait_s: How long a shard that cannot be opened is tried again; once for each.
    """

    def __init__(self, guard: SourceGuard, wait_s: float = 0.0) -> None:
        self._guard = guard
        self._wait_s = wait_s
        self._given_up: set[str] = set()

    def fault(self, shard: Shard, epoch: int) -> OSError | None:
        """Return why a shard cannot be opened, None where it can; may wait.

        Shards in stores are opened without a question: their reads are tried again where they are made.
        """
        if is_url(shard.path):
            return None
        fault = _open(shard.path)
        if fault is not None and shard.path not in self._given_up:
            fault = self._wait(shard.path, fault, epoch)
        if fault is None:
            self._given_up.discard(shard.path)
        else:
            self._given_up.add(shard.path)
        return fault

    def loss(self, shard: Shard, block: int, epoch: int) -> Loss | None:
        """Return what was noted as lost of a block, None for nothing."""
        return self._guard.losses.get(LostPlace(self._number(shard), block, epoch))

    def first_loss(self, shard: Shard, epoch: int) -> tuple[int, Loss] | None:
        """Return from which record on a streamed shard was noted as lost, and what; None for none."""
        number = self._number(shard)
        found = [
            (place.block, loss)
            for place, loss in self._guard.losses.items()
            if (place.shard, place.epoch) == (number, epoch)
        ]
        return min(found, default=None)

    def lose(self, shard: Shard, block: int, epoch: int, loss: Loss) -> None:
        """Note what is lost, durably, where a daemon listens."""
        self._guard.lose(LostPlace(self._number(shard), block, epoch), loss)

    def _number(self, shard: Shard) -> int:
        return self._guard.shards.get(shard.path, -1)

    def _wait(self, path: str, fault: OSError, epoch: int) -> OSError | None:
        guard, in_flight = self._guard, self._guard.in_flight
        end_s, pause_s = time.monotonic() + self._wait_s, _FIRST_WAIT_S
        if self._wait_s:
            log.warning(
                "%s cannot be opened (%s), it is tried again for %g s",
                path,
                fault.strerror,
                self._wait_s,
            )
        last: OSError | None = fault
        while last is not None and time.monotonic() < end_s:
            # A mark of its own each time: a worker that waits is not one that stands still.
            number = guard.shards.get(path, 0)
            in_flight.begin(guard.source, number, epoch, -1, -1, state=MarkState.READING)
            time.sleep(min(pause_s, max(end_s - time.monotonic(), 0)))
            in_flight.end()
            guard.listen_now()
            pause_s = min(2 * pause_s, _WAIT_S_MAX)
            last = _open(path)
        return last


def _open(path: str) -> OSError | None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error
    return None


def lost_count(spec: SourceSpec, records: int | None) -> int:
    """Return how many bad records stand for a shard: its own, or as many as spend the budget."""
    if records is not None:
        return max(records, 1)
    rule = spec.on_error
    if rule.policy == "skip" and rule.budget_ratio < 1:
        return int(rule.budget_ratio * rule.window_records) + 1
    return 1


def is_passed(spec: SourceSpec, count: int) -> bool:
    """Tell whether the stream goes on behind a loss: then it is an event, and noted."""
    rule = spec.on_error
    if rule.policy == "skip":
        return rule.budget_ratio >= 1 or count <= int(rule.budget_ratio * rule.window_records)
    return rule.policy == "quarantine"


def loss_text(fault: OSError, known: int | None, count: int) -> str:
    """Return what is wrong with the records of a shard that cannot be opened, for people.

    Args:
        fault: Why.
        known: Records that it has, None where nothing tells.
        count: How many bad records stand for them.
    """
    text = lost_shard(fault, known).fault
    if known is None and count > 1:
        text += f": it counts as {count}, more than on_error.budget_ratio allows"
    return text


def lost_records_of(loss: Loss, first: int = 0) -> Iterator[RawRecord]:
    """Yield what stands for lost records, from a place on."""
    for place in range(first, first + loss.records):
        yield RawRecord(place, b"", _UNREADABLE, loss.text)
