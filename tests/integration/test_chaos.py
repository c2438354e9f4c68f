"""Kills, stops, full and slow disks, cut state files, from a seed: the ledger equals the oracle.

Loader workers, constructor, planner, daemon and trainers alike; ranks come back with another dp each
time. A handful of schedules with short stops in `make test`, 200 with stops of 10-30 s in
`make soak`. The seed is printed; MSD_TEST_SEED repeats it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.chaos import Chaos, draw_schedule
from tests.support.chaos_case import ChaosCase, make_chaos_case

pytestmark = pytest.mark.processes

STEPS = 240
SEED = int(os.environ.get("MSD_TEST_SEED") or random.SystemRandom().randrange(1 << 30))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ChaosCase:
    print(f"MSD_TEST_SEED={SEED}")
    return make_chaos_case(tmp_path_factory.mktemp("chaos"), STEPS)


def run_schedule(case: ChaosCase, folder: Path, key: str, stop_s: tuple[float, float]) -> None:
    rng = random.Random(f"{SEED}{key}")
    schedule = draw_schedule(rng, STEPS, stop_s)
    print(f"MSD_TEST_SEED={SEED} {key}:", "; ".join(map(str, schedule)))
    chaos = Chaos(folder, case.job, schedule, rng, STEPS)
    chaos.run()
    chaos.check(case.wanted)
    print(f"{key}: {chaos.attempts} attempts; {'; '.join(chaos.done)}; told: {chaos.told}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(5))
def test_the_ledger_equals_the_oracle_whatever_fails(
    case: ChaosCase, tmp_path: Path, number: int
) -> None:
    run_schedule(case, tmp_path, f"short {number}", (0.2, 1.5))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(200))
def test_long_stops_change_nothing_either(case: ChaosCase, tmp_path: Path, number: int) -> None:
    run_schedule(case, tmp_path, f"long {number}", (10.0, 30.0))
