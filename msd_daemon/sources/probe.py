"""A short, bounded measurement of what a source costs, before anything of a job runs.

It reads a few records through the source's recipe as a loader worker would. The first chunk is left
out where more came: it opens shards, starts the user's code and warms caches, once in a run. Where
reads are most of it, two loaders read at once, other blocks than the first did, to see whether a
second one gets more. What lies in the page cache is measured as such.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from federation.model.chunk import RecordStatus
from federation.model.job import ResolvedJob
from federation.model.source_profile import SourceProfile, profile_fingerprint
from msd_client.contract.errors import MsdError
from msd_client.contract.position import pack_block_key
from msd_daemon.core.loader_costs import NO_COST, ReadCost
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.transforms.tokenizer import Tokenizer

PARTS = 3
"""One loader reads a third of the blocks; two at once read the others."""
CHUNK_BYTES = 1 << 16
SLOW_CHUNKS = 32
SLOW_FACTOR = 5
"""Where reads are waited for, so many times as long is read, or so many chunks."""


class ProbeLimits(NamedTuple):
    """How far a probe of one source goes."""

    records: int = 2048
    measure_s: float = 0.4
    """Of reading, behind the first chunk."""
    first_s: float = 10.0
    """Of the first chunk: after so long it is all that is measured."""


class _Reading(NamedTuple):
    """What one loader read."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    chunk_bytes: int = 0
    cost: ReadCost = NO_COST

    def plus(self, other: _Reading) -> _Reading:
        """Return both together."""
        return _Reading(
            self.records + other.records,
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.chunk_bytes + other.chunk_bytes,
            self.cost.plus(other.cost),
        )


def probe_source(
    job: ResolvedJob,
    source_index: int,
    tokenizer: Tokenizer,
    *,
    limits: ProbeLimits | None = None,
    index_dir: Path | None = None,
    open_loader: Callable[..., SourceLoader] = open_source_loader,
) -> SourceProfile:
    """Return the profile of a source, measured in this process for about a second.

    Args:
        job: The resolved job.
        source_index: Which source.
        tokenizer: Of the job.
        limits: How far it goes.
        index_dir: Where indexes are kept, None for none.
        open_loader: Makes the loaders.

    Raises:
        ConfigError: A recipe's list, template or code is not what the job was resolved with.
        StoreError: A store does not answer.
    """
    limits = limits or ProbeLimits()
    loader = _open(job, source_index, tokenizer, (0, PARTS), index_dir, open_loader)
    try:
        first, more = _read(loader, limits)
        opened = _private_bytes()
    finally:
        loader.close()
    # What closing gives back: what reading needed in between is shared by all sources of a worker.
    opened = max(opened - _private_bytes(), 0)
    both = first.plus(more)
    measured = more if more.tokens else both
    profile = SourceProfile(
        fingerprint=profile_fingerprint(job, source_index),
        origin="probe",
        records=measured.records,
        samples=measured.samples,
        tokens=measured.tokens,
        # The first chunk may have read far ahead.
        read_bytes=both.cost.read_bytes * measured.records // max(both.records, 1),
        chunk_bytes=measured.chunk_bytes,
        cpu_ns=measured.cost.cpu_ns,
        user_ns=measured.cost.user_ns,
        wait_ns=measured.cost.wait_ns,
        open_bytes=opened,
    )
    if not profile.is_read_bound or _parts_of(job, source_index) < PARTS:
        return profile

    def loader_of(part: int) -> SourceLoader:
        return _open(job, source_index, tokenizer, (part, PARTS), index_dir, open_loader)

    return replace(profile, pair_ppm=_pair_ppm(profile, loader_of, limits))


def _parts_of(job: ResolvedJob, source_index: int) -> int:
    """Return among how many loaders the source could be dealt."""
    spec = job.sources[source_index]
    return spec.lane_count if spec.order_class == "streaming" else PARTS


def _open(
    job: ResolvedJob,
    source_index: int,
    tokenizer: Tokenizer,
    part: tuple[int, int],
    index_dir: Path | None,
    open_loader: Callable[..., SourceLoader],
) -> SourceLoader:
    if _parts_of(job, source_index) < PARTS:
        part = (0, 1)  # a stream of few lanes: a part may have none
    loader = open_loader(job, source_index, tokenizer, *part, index_dir)
    try:
        loader.seek(pack_block_key(0, 0, 0), 0)
    except BaseException:
        loader.close()
        raise
    return loader


def _read(loader: SourceLoader, limits: ProbeLimits) -> tuple[_Reading, _Reading]:
    """Return what the first chunk took that had a sample, and what came behind it."""
    first, more = _Reading(), _Reading()
    end_s = time.monotonic() + limits.first_s
    while not first.samples and time.monotonic() < end_s and first.records < limits.records:
        read = _chunk(loader)
        if read is None:
            return first, more
        first = first.plus(read)
    if time.monotonic() >= end_s:
        return first, more
    begun_s = time.monotonic()
    chunks = 0
    while more.records < limits.records:
        spent_s = time.monotonic() - begun_s
        is_slow = more.cost.wait_ns > more.cost.cpu_ns + more.cost.user_ns
        # A few reads say little of a disk or store: their number is counted, too.
        if spent_s > limits.measure_s * (SLOW_FACTOR if is_slow and chunks < SLOW_CHUNKS else 1):
            break
        read = _chunk(loader)
        if read is None:
            break
        more, chunks = more.plus(read), chunks + 1
    return first, more


def _chunk(loader: SourceLoader) -> _Reading | None:
    draft = loader.next_chunk(CHUNK_BYTES)
    if draft is None:
        return None
    meta = draft.meta
    return _Reading(
        len(meta.lengths),
        int((meta.status == int(RecordStatus.OK)).sum()),
        int(meta.lengths.sum(dtype=np.int64)),
        draft.encoded_bytes(),
        loader.take_cost(),
    )


def _pair_ppm(
    profile: SourceProfile, loader_of: Callable[[int], SourceLoader], limits: ProbeLimits
) -> int:
    """Return records a second of two loaders at once, in millionths of one's; 0: it can't be told."""
    found: list[_Reading] = []

    def read(part: int) -> None:
        try:
            loader = loader_of(part)
            try:
                found.append(_read(loader, limits)[1])
            finally:
                loader.close()
        except (MsdError, OSError, ValueError, LookupError):
            return  # the run itself will tell: this only measures

    threads = [threading.Thread(target=read, args=(part,)) for part in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < 2 or not all(one.records for one in found):
        return 0
    alone_ns = profile.busy_ns
    rates = [
        one.records * alone_ns * 1_000_000 // (profile.records * max(_busy_ns(one.cost), 1))
        for one in found
    ]
    return min(max(sum(rates), 1), 2_000_000)


def _busy_ns(cost: ReadCost) -> int:
    """Return a loader's time; what it waited for a CPU is this machine's now, not the source's."""
    return cost.cpu_ns + cost.user_ns + cost.wait_ns


def _private_bytes() -> int:
    """Return the private memory of this process, after what is free was given back."""
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        arrow.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # not glibc: free memory stays counted
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0
