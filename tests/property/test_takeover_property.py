"""Planners and loaders die at any moment: who takes over plans what would have been planned."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.chunk import ChunkMeta
from federation.model.job import BatchRule, ErrorPolicy, ResolvedJob
from federation.model.plan import StepPlan
from federation.planning.kept_chunks import KeptChunks
from federation.planning.planner import Starved, StepPlanner
from msd_client.contract.state import StreamState
from tests.support.metadata import (
    FakeLoader,
    Feed,
    SourceCorpus,
    make_job,
    make_spec,
    random_corpus,
    start,
)

STEPS = 30
READS_MAX = 2000
"""Far more than a step takes."""


@dataclass
class Reader:
    """A loader as the daemon knows it: where its next process would begin."""

    loader: FakeLoader
    source: int
    position: tuple[int, int]
    tail: list[tuple[int, int]] = field(default_factory=list)
    """Where its last chunks began."""

    def next_chunk(self) -> ChunkMeta | None:
        meta = self.loader.next_chunk()
        if meta is not None:
            self.tail = [*self.tail[-2:], (meta.block_key, meta.first_index)]
            self.position = meta.block_key, meta.first_index + len(meta.lengths)
        return meta

    def dies(self, seed: int) -> None:
        """Another process goes on behind what was taken over, in chunks of other sizes."""
        self.loader.seed = seed
        self.loader.seek(*self.position)

    def is_revoked(self, seed: int) -> None:
        """Its last chunk was dropped, and is read again."""
        if self.tail:
            self.position = self.tail.pop()
            self.dies(seed)


class Node:
    """What a daemon does with planners that die: keeps what they have to be told."""

    def __init__(
        self, job: ResolvedJob, corpora: list[SourceCorpus], loaders: int, rng: random.Random
    ) -> None:
        self.rng = rng
        self.job = job
        self.kept = KeptChunks(job.sources)
        self.planner: StepPlanner = start(job)
        self.state = self.planner.state().encode()
        """Behind the last plan that arrived."""
        self.readers = []
        for source, corpus in enumerate(corpora):
            is_streaming = corpus.spec.order_class == "streaming"
            count = min(loaders, len(corpus.parts)) if is_streaming else loaders
            for number in range(count):
                loader = FakeLoader(corpus, source, number, count, 9, number)
                loader.seek(0, 0)
                self.readers.append(Reader(loader, source, (0, 0)))
        self.deaths = 0

    def read(self, source: int | None = None) -> ChunkMeta | None:
        readers = [reader for reader in self.readers if source in (None, reader.source)]
        meta = self.rng.choice(readers).next_chunk()
        if meta is not None:
            self.kept.add(meta)
        return meta

    def step(self) -> StepPlan:
        for _ in range(READS_MAX):
            if self.rng.random() < 0.15:
                self.happens()
            outcome = self.planner.plan_step()
            if isinstance(outcome, StepPlan):
                self.kept.forget(outcome.cursors_after())
                self.state = self.planner.state().encode()
                return outcome
            assert isinstance(outcome, Starved), outcome
            meta = self.read(self.rng.choice([*outcome.sources, None]))
            if meta is not None:
                self.planner.add_chunk(meta)
        raise AssertionError(f"the planner waits for ever: {outcome}")

    def happens(self) -> None:
        """Let something die."""
        self.deaths += 1
        reader = self.rng.choice(self.readers)
        match self.rng.choice(["planner", "planner", "loader", "revocation", "both"]):
            case "loader":
                reader.dies(self.deaths)
            case "revocation":
                reader.is_revoked(self.deaths)
            case "planner":
                self.planner_dies()
            case "both":
                reader.dies(self.deaths)
                self.planner_dies()
                reader.dies(-self.deaths)

    def planner_dies(self) -> None:
        for _ in range(self.rng.randrange(3)):  # plans that it sent and nobody received
            self.planner.plan_step()
        for _ in range(self.rng.randrange(4)):  # read while the next one replays
            self.read()
        self.planner = start(self.job, state=StreamState.decode(self.state))
        for meta in self.kept.chunks():
            self.planner.add_chunk(meta)


def make_corpora(rng: random.Random) -> list[SourceCorpus]:
    skip = ErrorPolicy("skip", 1.0)
    specs = [
        make_spec("plain", rng.randint(1, 8), on_error=skip),
        make_spec(
            "lanes", rng.randint(2, 6), "streaming", interleave=rng.randint(1, 4), on_error=skip
        ),
        make_spec("more", rng.randint(2, 6), "streaming", interleave=2, on_error=skip),
    ]
    corpora = [
        random_corpus(spec, rng.randrange(1 << 30), lambda r: r.randint(1, 60), 3, 12, 0.1)
        for spec in specs
    ]
    for window in range(1, len(corpora[0].parts)):
        if rng.random() < 0.4:
            corpora[0].parts[window] = []  # a window without a block
    return corpora


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_deaths_at_any_moment_change_no_plan(seed: int, loaders: int) -> None:
    rng = random.Random(seed)
    corpora = make_corpora(rng)
    job = make_job([corpus.spec for corpus in corpora], BatchRule(4, 24))
    wanted = Feed(start(job), corpora, loaders, seed=seed).steps(STEPS)
    node = Node(job, corpora, loaders, rng)
    for plan in wanted:
        found = node.step()
        assert found.stream_digest == plan.stream_digest
        assert found.cursors_after() == plan.cursors_after()


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_nothing_is_kept_of_blocks_that_were_passed(seed: int) -> None:
    rng = random.Random(seed)
    corpora = make_corpora(rng)
    job = make_job([corpus.spec for corpus in corpora], BatchRule(4, 24))
    node = Node(job, corpora, 1, rng)
    for _ in range(STEPS):
        plan = node.step()
        blocks = {source: block_key for source, block_key, _, _ in plan.cursors_after()}
        for meta in node.kept.chunks():
            assert meta.block_key >= blocks.get(meta.source_index, 0)
