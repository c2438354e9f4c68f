"""What `msdctl check` says of a strategy of the user's own: a few made-up steps, in a child process.

The child loads the copy as the planner will and hands it graphs of lengths as text has them; what it
would raise at the first step it raises here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import msgpack
import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule, ResolvedJob, decode_job, encode_job
from federation.model.mixture import MixtureTimeline
from federation.model.place_tree import ClientPlaceTree
from federation.planning.delay import Delay
from federation.planning.dgraph import DGraph
from federation.planning.extra_rows import ExtraRows
from federation.planning.step_pool import INDEX, LENGTH, SOURCE, Pool
from federation.planning.strategies import strategy_error
from federation.user_strategy import load_strategy
from msd_client.contract.errors import (
    ConfigError,
    InternalError,
    MsdError,
    StrategyError,
    UsageError,
    decode_error,
    encode_error,
)

STEPS = 4
CHILD_S_MAX = 300.0
FRAGMENT_ROWS = 6


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
    """
    strategy = load_strategy(job)
    assert strategy is not None
    names = [source.name for source in job.sources]
    extras = ExtraRows.of(job)
    tree = ClientPlaceTree.from_mesh(dict(mesh))
    for step in range(STEPS):
        rule = job.batch.at(step, 0)
        tree.microbatch_count(rule)
        graph = DGraph(
            _MadeUp(rule, extras, len(names), step),
            tree,
            rule,
            schedule=MixtureTimeline(job.mixture, names),
            cost_model=job.cost,
            objective=job.balance_objective,
            source_ids=np.arange(len(names)),
            extras=extras,
        )
        try:
            strategy(graph, step).plan()
        except StrategyError:
            raise
        except (ConfigError, UsageError) as error:
            raise strategy_error(job.strategy, step, error.message) from error


class _MadeUp:
    """Draws what is more than enough for a step; short and long texts from every source."""

    def __init__(self, rule: BatchRule, extras: ExtraRows, source_count: int, step: int) -> None:
        self._rule, self._extras, self._source_count, self._step = rule, extras, source_count, step

    def draw(self, schedule: MixtureTimeline, delay: Delay | None = None) -> Pool:  # noqa: ARG002
        """Return a pool that fills the step's rows."""
        rule = self._rule
        rng = np.random.Generator(np.random.Philox(key=self._step))
        lengths: list[int] = []
        wanted = rule.rows * (rule.row_tokens + 1)
        total = 0
        while total < wanted or len(lengths) < rule.rows:
            length = int(np.clip(rng.lognormal(6, 1.5), rule.row_tokens // 64 + 1, rule.row_tokens))
            lengths.append(length)
            total += length
        count = len(lengths)
        fragments: npt.NDArray[np.int64] = np.zeros(
            (FRAGMENT_ROWS + self._extras.count, count), np.int64
        )
        fragments[SOURCE] = np.arange(count) % self._source_count
        fragments[INDEX] = np.arange(count)
        fragments[LENGTH] = lengths
        fragments[FRAGMENT_ROWS - 1] = self._step
        names = self._extras.names
        if "begins" in names:
            fragments[FRAGMENT_ROWS + names.index("begins")] = 1
        if "trained" in names:
            fragments[FRAGMENT_ROWS + names.index("trained")] = 2 * np.array(lengths) + 1
        return Pool(
            fragments,
            0,
            units_max=self._extras.units_max,
            has_begins=self._extras.has_begins,
        )


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
