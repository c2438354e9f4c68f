"""The loaders of a job in this process: what preview, inline streams and `msdctl graph` plan from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from federation.model.job import ResolvedJob
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, Starved, StepPlanner
from msd_client.contract.errors import SourceExhaustedError
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.loader import open_source_loader
from msd_daemon.sources.record_guard import NO_GUARD, SourceGuard
from msd_daemon.transforms import open_tokenizer

CHUNK_BYTES = 1 << 18


class InlineFeed:
    """One loader for each source of a job, read on as a planner starves.

    Args:
        job: The resolved job.
        keep: Sees every chunk that is read; None where plans are enough.
        index_dir: Where indexes are kept, None for none.
        guards: Of the sources, that know the records not to be touched; None: all may be.
    """

    def __init__(
        self,
        job: ResolvedJob,
        keep: Callable[[ChunkDraft], None] | None = None,
        index_dir: Path | None = None,
        guards: Sequence[SourceGuard] | None = None,
    ) -> None:
        tokenizer = open_tokenizer(job.tokenizer)
        self._job = job
        self._keep = keep
        self.loaders = [
            open_source_loader(
                job,
                number,
                tokenizer,
                index_dir=index_dir,
                guard=NO_GUARD.source if guards is None else guards[number],
            )
            for number in range(len(job.sources))
        ]

    def next_step(self, planner: StepPlanner) -> StepPlan | Ended:
        """Plan the next step, reading whatever it starves for.

        Raises:
            DataError: The draw reached a fault that the job does not skip, or a source's end.
            StoreError: A store does not answer.
        """
        while isinstance(planned := planner.plan_step(), Starved):
            for source in planned.sources:
                self._read_on(planner, source)
        return planned

    def seek(self, cursors: Sequence[Sequence[int]]) -> None:
        """Go on from a planner's cursors: (block key, index) of each source."""
        for loader, (block_key, index) in zip(self.loaders, cursors, strict=True):
            loader.seek(block_key, index)

    def close(self) -> None:
        """Close all shards."""
        for loader in self.loaders:
            loader.close()

    def _read_on(self, planner: StepPlanner, source: int) -> None:
        draft = self.loaders[source].next_chunk(CHUNK_BYTES)
        if draft is None:
            name = self._job.sources[source].name
            raise SourceExhaustedError(
                f"source {name!r} has no record left: check its files", source=name
            )
        if self._keep is not None:
            self._keep(draft)
        planner.add_chunk(draft.meta)
