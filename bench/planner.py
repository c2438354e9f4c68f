"""How long one core takes to plan a step: 306 sources, up to 65,536 samples for 4,096 ranks.

Each mesh is measured in a process of its own on one core, so that memory is its own: a real planner,
fed with records of a web-like length distribution. Every rank is a data-parallel group, the hardest
case. Time is from the call to the plan; writing it for the wire, whole and in slices of 8 ranks a
node, stands beside. Samples for a rank are the same at every size, so growth is work per rank.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from federation.model.job import (
    BatchRule,
    MixturePoint,
    MixtureSchedule,
    ResolvedJob,
    Shard,
    SourceSpec,
    TokenizerSpec,
)
from federation.model.place_tree import ClientPlaceTree
from federation.planning import dgraph, graph_compile, planner, sampling
from federation.planning.model_config import decoder_shape
from federation.planning.model_flops import decoder_cost
from federation.planning.plan_slice import slice_by_node
from federation.planning.planner import StepPlanner
from federation.planning.step_change import first_state
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.statistic_feed import BLOCK_RECORDS, StatisticFeed

SOURCES = 306
RANKS = (64, 256, 1024, 4096)
SAMPLES_A_RANK = 16
ROWS_A_RANK = 4
ROW_TOKENS = 4096
NODE_RANKS = 8
STEPS, STEPS_QUICK = 40, 10
WARM_STEPS = 6
STEPS_AHEAD = 3
LENGTH_SCALE = 1.16
"""Long documents become several samples; with it a rank has SAMPLES_A_RANK."""
SEED = 5
MIB = 1 << 20
MODEL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "hidden_act": "silu",
}

Stages = dict[str, list[float]]


def make_job(ranks: int) -> ResolvedJob:
    rng = np.random.default_rng(SEED)
    weights = rng.lognormal(0.0, 1.2, SOURCES)
    sources = tuple(
        SourceSpec(f"s{n:03}", "jsonl", "none", "seekable", (Shard("", 0, "0" * 32),), "0" * 32)
        for n in range(SOURCES)
    )
    shares = {source.name: float(w) for source, w in zip(sources, weights, strict=True)}
    mixture = MixtureSchedule("tokens", (MixturePoint(0, shares),))
    cost = decoder_cost(decoder_shape(MODEL))
    batch = BatchRule(rows=ranks * ROWS_A_RANK, row_tokens=ROW_TOKENS)
    return ResolvedJob("bench", SEED, sources, TokenizerSpec("bytes"), batch, mixture, cost)


def lengths_of_sources() -> list[SourceLengths]:
    """Web-like: log-normal, each source with a mean of its own, scaled to the wanted samples a rank."""
    rng = np.random.default_rng(SEED + 1)
    weights = rng.lognormal(0.0, 0.35, SOURCES)
    drawn = [
        np.clip(rng.lognormal(6.0, 1.1, 4000) * w, 8, 200_000).astype(np.int64) for w in weights
    ]
    wanted = ROWS_A_RANK * ROW_TOKENS / SAMPLES_A_RANK
    # Samples of one token mixture: the mean that counts is that of the samples drawn, by shares.
    mean = float(np.mean([lengths.mean() for lengths in drawn]))
    return [
        SourceLengths.of(
            np.maximum(lengths * (LENGTH_SCALE * wanted / mean), 2).astype(np.int64), 1 << 24
        )
        for lengths in drawn
    ]


@contextmanager
def timed(stages: Stages) -> Iterator[None]:
    """Note how long the stages of every step take."""
    undo: list[Callable[[], None]] = []

    def wrap(owner: Any, name: str, stage: str) -> None:
        inner = getattr(owner, name)

        def timed_call(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                stages[stage][-1] += time.perf_counter() - begun

        setattr(owner, name, timed_call)
        undo.append(lambda: setattr(owner, name, inner))

    wrap(sampling.StepSampler, "draw", "mix")
    wrap(dgraph, "pack", "pack")
    wrap(graph_compile, "row_costs", "cost")
    wrap(graph_compile, "place_balanced", "balance")
    wrap(graph_compile, "membership", "digest")
    wrap(planner, "change_of_step", "state")
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def measure(ranks: int, steps: int) -> dict[str, Any]:
    """Plan steps in this process and return the figures."""
    job = make_job(ranks)
    tree = ClientPlaceTree.from_mesh({"dp": ranks}, [rank // NODE_RANKS for rank in range(ranks)])
    whole = StepPlanner(job, tree, first_state(job))
    feed = StatisticFeed(lengths_of_sources(), SEED)
    ahead = Ahead(whole, feed, job.batch.rows)
    seconds: list[float] = []
    stages: Stages = defaultdict(list)
    samples: list[int] = []
    with timed(stages):
        for number in range(WARM_STEPS + steps):
            ahead.feed()
            for stage in ("mix", "pack", "cost", "balance", "digest", "state", "encode", "slices"):
                stages[stage].append(0.0)
            begun = time.perf_counter()
            plan = whole.plan_step()
            took = time.perf_counter() - begun
            assert isinstance(plan, planner.StepPlan), "the feed went ahead of the draw"
            begun = time.perf_counter()
            plan.encode()
            stages["encode"][-1] = time.perf_counter() - begun
            begun = time.perf_counter()
            nodes = sum(1 for part in slice_by_node(plan, tree) if part.plan.encode())
            stages["slices"][-1] = time.perf_counter() - begun
            assert nodes == -(-ranks // NODE_RANKS)
            if number >= WARM_STEPS:
                seconds.append(took)
                samples.append(len(plan.source))
    by_stage = {
        stage: 1e3 * statistics.median(taken[WARM_STEPS:]) for stage, taken in stages.items()
    }
    inside = sum(ms for stage, ms in by_stage.items() if stage not in ("encode", "slices"))
    p50 = 1e3 * statistics.median(seconds)
    return {
        "ranks": ranks,
        "samples": statistics.median(samples),
        "step_ms_p50": p50,
        "step_ms_p90": 1e3 * float(np.quantile(seconds, 0.9)),
        "rss_mib": peak_bytes() / MIB,
        "imbalance": plan.imbalance,
        "stages_ms": by_stage | {"compile": max(0.0, p50 - inside)},
    }


class Ahead:
    """Makes known what the next steps draw: the loaders' time, and the planner's between steps."""

    def __init__(self, whole: StepPlanner, feed: StatisticFeed, rows: int) -> None:
        self._whole, self._feed = whole, feed
        means = np.array([source.lengths.mean() for source in lengths_of_sources()])
        shares = np.array(whole.statistics().wanted_shares)
        self._wanted = (STEPS_AHEAD * rows * ROW_TOKENS * shares / means).astype(np.int64) + 64

    def feed(self) -> None:
        known = np.array(self._whole.statistics().known_fragments)
        missing = -(-np.maximum(self._wanted - known, 0) // BLOCK_RECORDS)
        for source in np.flatnonzero(missing).tolist():
            for _ in range(int(missing[source])):
                self._whole.add_chunk(self._feed.next_block(source))


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def run(*, is_quick: bool, say: Callable[..., None], only: str | None) -> dict[str, Any]:
    """Measure each mesh in a process of its own on one core."""
    steps = STEPS_QUICK if is_quick else STEPS
    found = []
    for ranks in RANKS:
        if only is not None and str(ranks) != only:
            continue
        say(f"{ranks} ranks ...")
        command = [sys.executable, "-m", "bench.planner", str(ranks), str(steps)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append(json.loads(output))
        last = found[-1]
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in last["stages_ms"].items())
        say(
            f"  {last['samples']:.0f} samples: {last['step_ms_p50']:.1f} ms a step, "
            f"{last['rss_mib']:.0f} MiB; ms by stage: {stages}"
        )
    largest = found[-1]
    figures = {key: largest[key] for key in ("step_ms_p50", "rss_mib", "samples", "stages_ms")}
    if len(found) > 1:
        figures["growth_exponent"] = exponent(found)
    return figures | {"meshes": found}


def exponent(found: list[dict[str, Any]]) -> float:
    """Slope of log time over log ranks from the smallest to the largest mesh; 1 is linear."""
    first, last = found[0], found[-1]
    ratio = last["step_ms_p50"] / first["step_ms_p50"]
    return math.log(ratio) / math.log(last["ranks"] / first["ranks"])


if __name__ == "__main__":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
