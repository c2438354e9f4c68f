"""A few records of a source, read through its recipe, to say what becomes of them before a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from federation.model.chunk import FAULT_STATUSES, RecordStatus
from federation.model.job import ResolvedJob
from federation.model.recipe import UserCall
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.transforms.tokenizer import Tokenizer

RECORDS = 8
SOURCE_S_MAX = 30.0
"""No further record is read of a source that has taken so long."""
FAULTS_SHOWN_MAX = 3
GIVEN_BYTES_MAX = 256 << 20
"""Of what a user's code was given, kept to be given again."""


@dataclass
class Trial:
    """What became of the first records of a source."""

    source: str
    records: int = 0
    tokens: int = 0
    statuses: Counter[RecordStatus] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """The first ones; each names file and record."""
    given: dict[UserCall, list[Any]] = field(default_factory=dict)
    """What each of the user's functions was given: fields of samples, pixels, waves."""
    given_bytes: int = 0

    @property
    def samples(self) -> int:
        """Records that became samples."""
        return self.statuses[RecordStatus.OK]

    @property
    def is_broken(self) -> bool:
        """True where every record is a fault: training would get nothing of the source."""
        return bool(self.records) and all(status in FAULT_STATUSES for status in self.statuses)

    def watch(self, call: UserCall, value: Any) -> None:
        """Keep what a function is about to be given."""
        kept = self.given.setdefault(call, [])
        size_bytes = _size_bytes(value)
        if len(kept) < RECORDS and self.given_bytes + size_bytes <= GIVEN_BYTES_MAX:
            self.given_bytes += size_bytes
            kept.append(value.copy() if isinstance(value, np.ndarray) else dict(value))


def try_source(
    job: ResolvedJob,
    source_index: int,
    tokenizer: Tokenizer,
    records: int = RECORDS,
    now_s: Callable[[], float] = time.monotonic,
) -> Trial:
    """Read the first records of one shard of a source as training would, in windows of so many.

    Args:
        job: The resolved job.
        source_index: Which source.
        tokenizer: Of the job.
        records: Most records.
        now_s: A clock.

    Raises:
        ConfigError: A recipe's list, template or code is not what the job was resolved with.
        StoreError: A store does not answer.
    """
    spec = job.sources[source_index]
    window = min(records, spec.shuffle.window_records)
    shuffle = replace(spec.shuffle, window_records=window, window_shards=1, interleave=1)
    sources = list(job.sources)
    sources[source_index] = replace(spec, shuffle=shuffle, max_epochs=1)
    trial = Trial(spec.name)
    small = replace(job, sources=tuple(sources))
    loader = open_source_loader(small, source_index, tokenizer, watch=trial.watch)
    end_s = now_s() + SOURCE_S_MAX
    try:
        while trial.records < records and now_s() < end_s:
            if not _read_on(loader, trial):
                break
    finally:
        loader.close()
    return trial


def _read_on(loader: SourceLoader, trial: Trial) -> bool:
    """Add the next record or records; False where there is none."""
    draft = loader.next_chunk(1)
    if draft is None:
        return False
    meta = draft.meta
    trial.records += len(meta.lengths)
    trial.tokens += int(meta.lengths.sum(dtype=np.int64))
    trial.statuses.update(RecordStatus(status) for status in meta.status.tolist())
    if meta.fault and len(trial.faults) < FAULTS_SHOWN_MAX and meta.fault not in trial.faults:
        trial.faults.append(meta.fault)
    return True


def _size_bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_size_bytes(one) for one in value.values())
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, (bytes, bytearray, str)) else 0
