"""A planner gives the same plans by the C kernel and by its Python twins."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from federation.model.job import BatchRule, CostSpec
from federation.planning import kernel
from tests.support.metadata import Feed, make_job, make_spec, random_corpus, start

ROOT = Path(__file__).resolve().parents[4]
CASES = [
    (packing, objective, mesh)
    for packing in ("best_fit", "best_fit_even", "varlen")
    for objective, mesh in (
        ("step", {"dp": 8}),
        ("microbatch", {"dp": 4}),
        ("pipeline", {"pp": 3, "dp": 4}),
    )
]


def plans_digest() -> str:
    digest = hashlib.sha256()
    for packing, objective, mesh in CASES:
        job = make_job(
            [make_spec("web", 4), make_spec("code", 2)],
            BatchRule(32, 128, packing=packing, step_tokens=4000 * (packing == "varlen")),
            cost=CostSpec("transformer", 50, 1),
            balance_objective=objective,
        )
        corpora = [
            random_corpus(spec, seed, lambda rng: rng.randint(1, 90))
            for seed, spec in enumerate(job.sources)
        ]
        for plan in Feed(start(job, mesh), corpora).steps(6):
            digest.update(plan.stream_digest.encode())
            for column in (plan.row_dp, plan.row_microbatch, plan.row_slot):
                digest.update(np.ascontiguousarray(column, np.int64).tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(kernel.KERNEL != "c", reason="the C kernel was not built")
def test_plans_are_the_same_without_the_kernel():
    code = (
        "from federation.planning import kernel; assert kernel.KERNEL == 'python';"
        "from tests.unit.federation.planning.test_planning_kernel import plans_digest;"
        "print(plans_digest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"MSD_PLANNING": "python", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == plans_digest()
