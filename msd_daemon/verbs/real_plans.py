"""Plans of a job by its real loaders, in this process, for verbs that look at one step."""

from __future__ import annotations

from collections.abc import Iterator

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, Starved, StepPlanner
from federation.planning.strategies import Strategy
from msd_client.contract.errors import SourceExhaustedError
from msd_client.contract.state import StreamState
from msd_daemon.sources.loader import open_source_loader
from msd_daemon.transforms import open_tokenizer

CHUNK_BYTES = 1 << 20


def real_plans(job: ResolvedJob, tree: ClientPlaceTree, strategy: Strategy) -> Iterator[StepPlan]:
    """Yield the plans of a job from its first step on; records are read as they are drawn.

    Args:
        job: The resolved job.
        tree: The mesh.
        strategy: The job's own or built-in one.

    Raises:
        DataError: The draw reached a fault that the job does not skip, or a source's end.
        StoreError: A store does not answer.
    """
    tokenizer = open_tokenizer(job.tokenizer)
    names = tuple(source.name for source in job.sources)
    state = StreamState.initial(
        job.digest(), names, job.stream_version, sample_digest=job.sample_digest()
    )
    planner = StepPlanner(job, tree, state, strategy)
    loaders = [open_source_loader(job, number, tokenizer) for number in range(len(names))]
    try:
        while not isinstance(outcome := planner.plan_step(), Ended):
            if not isinstance(outcome, Starved):
                yield outcome
                continue
            for source in outcome.sources:
                draft = loaders[source].next_chunk(CHUNK_BYTES)
                if draft is None:
                    raise SourceExhaustedError(
                        f"source {names[source]!r} has no record left: check its files",
                        source=names[source],
                    )
                planner.add_chunk(draft.meta)
    finally:
        for loader in loaders:
            loader.close()
