"""The time of a pipeline under one forward, one backward, in numpy: the twin of the C kernel's."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def makespans(costs: Int64Array, stages: int, found: Int64Array) -> None:
    """Tell when the last pass of each pipeline ends.

    1F1B (Narayanan et al. 2019, PipeDream-Flush): stage s runs stages - 1 - s forward passes ahead,
    then one forward and one backward pass in turn, then the backward passes that are left. A pass
    waits for the same microbatch's pass of the stage before it (behind it, for backward ones). A
    backward pass takes twice as long as a forward pass; what goes between stages takes no time.

    Args:
        costs: Of each microbatch in each stage, in order. Shape (pipelines, stages, microbatches).
        stages: Stages of a pipeline.
        found: Receives the end of each. Shape (pipelines,).
    """
    pipelines, _, count = costs.shape
    ends = np.zeros((2, stages, count, pipelines), np.int64)
    free = np.zeros((stages, pipelines), np.int64)
    columns = np.ascontiguousarray(costs.transpose(1, 2, 0))
    for stage, is_backward, microbatch in _passes(stages, count):
        if not is_backward:
            ready = ends[0, stage - 1, microbatch] if stage else free[0]
            duration = columns[stage, microbatch]
        else:
            is_last = stage + 1 == stages
            ready = ends[0, stage, microbatch] if is_last else ends[1, stage + 1, microbatch]
            duration = 2 * columns[stage, microbatch]
        free[stage] = np.maximum(free[stage], ready) + duration
        ends[int(is_backward), stage, microbatch] = free[stage]
    found[:] = free.max(axis=0)


@lru_cache(maxsize=16)
def _passes(stages: int, count: int) -> tuple[tuple[int, bool, int], ...]:
    """Return (stage, is backward, microbatch) of all passes, each behind those it waits for."""
    queues = [_stage_passes(min(stages - 1 - stage, count), count) for stage in range(stages)]
    places = [0] * stages
    done: set[tuple[int, bool, int]] = set()
    order: list[tuple[int, bool, int]] = []
    while len(order) < 2 * stages * count:
        for stage, queue in enumerate(queues):
            while places[stage] < len(queue):
                is_backward, microbatch = queue[places[stage]]
                if is_backward:
                    is_last = stage + 1 == stages
                    needs = (stage, False, microbatch) if is_last else (stage + 1, True, microbatch)
                else:
                    needs = (stage - 1, False, microbatch)
                if (is_backward or stage) and needs not in done:
                    break
                done.add((stage, is_backward, microbatch))
                order.append((stage, is_backward, microbatch))
                places[stage] += 1
    return tuple(order)


def _stage_passes(ahead: int, count: int) -> list[tuple[bool, int]]:
    found = [(False, microbatch) for microbatch in range(ahead)]
    for microbatch in range(count - ahead):
        found += [(False, ahead + microbatch), (True, microbatch)]
    return found + [(True, microbatch) for microbatch in range(count - ahead, count)]
