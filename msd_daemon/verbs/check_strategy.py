"""What `msdctl check` says of a strategy of the user's own: a few made-up steps, in a child process.

The child loads the copy as the planner will and hands it graphs of lengths as text has them; what it
would raise at the first step it raises here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import msgpack
import numpy as np

from federation.model.job import ResolvedJob, decode_job, encode_job
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.planner import StepPlanner
from federation.planning.step_change import first_state
from federation.planning.strategies import strategy_error
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.statistic_feed import StatisticFeed, simulated_job
from federation.user_strategy import load_strategy
from msd_client.contract.errors import (
    InternalError,
    MsdError,
    decode_error,
    encode_error,
)

STEPS = 4
CHILD_S_MAX = 300.0
SAMPLES = 4096
RECORDS = 1 << 24
"""Of each source; no step draws so many."""


def check_strategy(job: ResolvedJob, mesh: Mapping[str, int] | None) -> str | None:
    """Return one line about a job's own strategy, None where it has a built-in one.

    Raises:
        StrategyError: It cannot be imported, raises, takes too long or gives no plan.
        MeshMismatchError: The mesh does not fit the batch.
    """
    if job.strategy_call is None:
        return None
    request = msgpack.packb({"job": encode_job(job), "mesh": list((mesh or {}).items())})
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=request,
            capture_output=True,
            timeout=CHILD_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"{STEPS} made-up steps take longer than {CHILD_S_MAX:g} s"
        raise strategy_error(job.strategy, 0, problem) from None
    if done.returncode:
        tail = " | ".join(done.stderr.decode(errors="replace").strip().splitlines()[-3:])
        problem = f"its process ends with {done.returncode} {tail}"
        raise strategy_error(job.strategy, 0, problem)
    answer = msgpack.unpackb(done.stdout)
    if answer is not None:
        raise decode_error(**answer)
    return f"{job.strategy}: planned {STEPS} made-up steps"


def try_strategy(job: ResolvedJob, mesh: Mapping[str, int]) -> None:
    """Plan a few steps of made-up lengths by a job's strategy.

    Raises:
        StrategyError: See check_strategy.
        MeshMismatchError: The mesh does not fit the batch.
    """
    tree = ClientPlaceTree.from_mesh(dict(mesh))
    endless = replace(simulated_job(job), steps=None, tokens=None, epochs=None)
    planner = StepPlanner(endless, tree, first_state(endless), load_strategy(job))
    lengths = _made_up_lengths(job.batch.at(0, 0).row_tokens)
    feed = StatisticFeed([lengths] * len(job.sources), job.seed)
    for _ in range(STEPS):
        outcome = feed.next_step(planner)
        assert isinstance(outcome, StepPlan), f"the stream ends: {outcome.reason}"


def _made_up_lengths(row_tokens: int) -> SourceLengths:
    """Return short and long texts, up to a row."""
    drawn = np.random.default_rng(0).lognormal(6, 1.5, SAMPLES)
    lengths = np.clip(drawn, row_tokens // 64 + 1, row_tokens).astype(np.int64)
    return SourceLengths.of(lengths, RECORDS)


def main() -> None:
    """Read a job from stdin, write the error or nothing to stdout."""
    request = msgpack.unpackb(sys.stdin.buffer.read(), strict_map_key=False)
    out, sys.stdout = sys.stdout, sys.stderr  # what the strategy prints is no answer
    answer = None
    try:
        try_strategy(decode_job(request["job"]), dict(request["mesh"]))
    except MsdError as error:
        answer = encode_error(error)
    except AssertionError as error:
        answer = encode_error(InternalError(f"a made-up step does not hold: {error}"))
    out.buffer.write(msgpack.packb(answer))
    out.flush()


if __name__ == "__main__":
    main()
