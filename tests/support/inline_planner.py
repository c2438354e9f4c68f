"""A planner and real loaders in this process: the stream that any daemon must serve.

Metadata of chunks is kept, so that several plannings of the same sources read them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from federation.model.chunk import ChunkMeta
from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, Starved, StepPlanner
from msd_client.contract.state import StreamState
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.transforms import Tokenizer, open_tokenizer

CHUNK_BYTES = 1 << 20


class _Counting:
    """Counts the tokens of each text once; ids are zeros, as only lengths are asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._counts: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: list[str]) -> tuple[Any, Any]:
        keys = [hash(text) for text in texts]
        unknown = [place for place, key in enumerate(keys) if key not in self._counts]
        if unknown:
            _, offsets = self._tokenizer.encode_batch([texts[place] for place in unknown])
            for place, count in zip(unknown, np.diff(offsets).tolist(), strict=True):
                self._counts[keys[place]] = count
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([self._counts[key] for key in keys], out=offsets[1:])
        return np.zeros(int(offsets[-1]), np.int32), offsets


class InlineSources:
    """The chunks of a job's sources from their beginning, read once."""

    def __init__(self, job: ResolvedJob) -> None:
        tokenizer: Any = _Counting(open_tokenizer(job.tokenizer))
        self._loaders = [
            SourceLoader(source, index, tokenizer, job.seed, 0, 1, None)
            for index, source in enumerate(job.sources)
        ]
        self._metas: list[list[ChunkMeta]] = [[] for _ in job.sources]

    def chunk(self, source: int, number: int) -> ChunkMeta:
        """Return a source's chunk by number."""
        metas = self._metas[source]
        while len(metas) <= number:
            draft = self._loaders[source].next_chunk(CHUNK_BYTES)
            assert draft is not None
            metas.append(draft.meta)
        return metas[number]

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()


class InlineStream:
    """A job's plans from step 0 on."""

    def __init__(
        self, job: ResolvedJob, sources: InlineSources, mesh: Mapping[str, int] | None = None
    ) -> None:
        names = tuple(source.name for source in job.sources)
        state = StreamState.initial(
            job.digest(), names, job.stream_version, sample_digest=job.sample_digest()
        )
        self.planner = StepPlanner(job, ClientPlaceTree.from_mesh(mesh or {}), state)
        self._sources = sources
        self._given = [0] * len(names)

    def plan_step(self) -> StepPlan | Ended:
        """Plan the next step, feeding what it lacks."""
        while True:
            planned = self.planner.plan_step()
            if not isinstance(planned, Starved):
                return planned
            for source in planned.sources:
                self.planner.add_chunk(self._sources.chunk(source, self._given[source]))
                self._given[source] += 1

    def plan_steps(self, count: int) -> list[StepPlan]:
        """Plan so many steps; the stream must not end before."""
        plans = []
        for _ in range(count):
            planned = self.plan_step()
            assert isinstance(planned, StepPlan)
            plans.append(planned)
        return plans


def inline_job(job: Mapping[str, Any]) -> ResolvedJob:
    """Return a job map resolved as a daemon does it."""
    return resolve_job(job, Path.cwd(), "job")
