"""Long runs: `make soak`. MSD_SOAK_STEPS shortens them."""

from __future__ import annotations

import os

import psutil
import pytest

from msd_daemon.services.processes import memory_of
from tests.support.node import DEADLINES, text_job

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(3600)]

STEPS = int(os.environ.get("MSD_SOAK_STEPS", "20000"))
GROWTH_MAX_BYTES = 8 << 20


def loader_side_bytes(pid: int) -> int:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    rows = [memory_of(process.pid) for process in processes]
    return sum(row["pss_anon"] + row["pss_shmem"] for row in rows if row)


def test_loader_side_memory_does_not_grow(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path, batch={"rows": 8, "row_tokens": 256, "microbatch_rows": 8})
    seen: list[int] = []
    with node.connect(job, {"dp": 1}, 0, deadlines=DEADLINES) as data:
        for step in data.train:
            for _ in step:
                pass
            if step.number % max(STEPS // 20, 1) == 0:
                seen.append(loader_side_bytes(node.process.pid))
            if step.number >= STEPS:
                break
    warm = seen[len(seen) // 4]
    assert max(seen[len(seen) // 4 :]) - warm < GROWTH_MAX_BYTES, seen
