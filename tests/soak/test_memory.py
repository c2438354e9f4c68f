"""Memory of the loader's side over long runs: `make soak`. MSD_SOAK_STEPS shortens them.

Loader's side: the daemon and all its children (planner, fork servers, workers, constructors). Its
bytes are their own anonymous pages, each shared one counted in part by each process that has it, and
every segment once, whoever maps it. Beyond pool and rings, which are declared before start, stands
an overhead of processes that no number of steps, ranks or documents moves.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from msd_daemon.services.processes import memory_of
from tests.support.ledger import write_pair
from tests.support.node import Node, run_ranks, segments_of, text_job

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(3600)]

STEPS = int(os.environ.get("MSD_SOAK_STEPS", "20000"))
GROWTH_MAX_BYTES = 8 << 20
OVERHEAD_BYTES = 160 << 20
"""Interpreters and libraries of six processes, the bare planner and daemon among them."""
SOURCE_BYTES = 256 << 10
"""Open state of a plain or memory-mapped source in its loader, its index and its share of plans."""
DOCUMENT_TOKENS = 16 << 20
"""64 MiB of int32 in one document."""

JobOf = Callable[[Path], dict[str, Any]]
BATCH = {"rows": 8, "row_tokens": 256, "microbatch_rows": 4}


def loader_side(node: Node) -> dict[str, int]:
    """Return anonymous bytes by role, and those of all segments."""
    found = {"shared": 0}
    pids = []
    for process in (psutil.Process(node.process.pid), *node.children()):
        try:
            row, name = memory_of(process.pid), process.name()
        except psutil.NoSuchProcess:
            continue
        pids.append(process.pid)
        found[name] = found.get(name, 0) + row.get("pss_anon", 0)
    found["shared"] = sum(sizes_of(pids).values())
    return found


def sizes_of(pids: list[int]) -> dict[tuple[int, int], int]:
    """Return the resident bytes of every segment that these processes hold."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                facts = os.stat(entry.path)
            except OSError:
                continue
            sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    held = segments_of(pids)
    return {key: size for key, size in sizes.items() if key in held}


def plain(folder: Path) -> dict[str, Any]:
    return text_job(folder, texts={"sources": 4}, batch=BATCH)


def many_sources(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    sources = {}
    for number in range(300):
        name = f"s{number:03}"
        sizes = rng.integers(1, 300, 40).tolist()
        ids = rng.integers(1, 50_000, sum(sizes))
        write_pair(folder / name, ids, sizes, "<u2")
        sources[name] = str(folder / f"{name}.bin")
    return {
        "schema": 1, "tokenizer": {"vocabulary": 50_000}, "batch": BATCH, "sources": sources,
        "mixture": {"unit": "tokens", 0: {name: 1 + n % 7 for n, name in enumerate(sources)}},
    }  # fmt: skip


def huge_documents(folder: Path) -> dict[str, Any]:
    """Three shards, each one document of 64 MiB between little ones."""
    for shard in range(3):
        sizes = [90, DOCUMENT_TOKENS, 70, 30]
        ids = np.arange(sum(sizes)) % 50_000 + shard
        write_pair(folder / f"huge-{shard}", ids, sizes, "<i4")
    return {
        "schema": 1, "tokenizer": {"vocabulary": 60_000},
        "batch": {"rows": 16, "row_tokens": 4096, "microbatch_rows": 4},
        "sources": {"huge": str(folder / "huge-*.bin")},
    }  # fmt: skip


def huge_lines(folder: Path) -> dict[str, Any]:
    """Two shards, each with one line of 8 MiB, that the bytes tokenizer turns into as many ids."""
    for shard in range(2):
        lines = [json.dumps({"text": "ab" * size}) for size in (40, 4 << 20, 60, 3)]
        (folder / f"lines-{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "schema": 1, "tokenizer": {"bytes": True},
        "batch": {"rows": 16, "row_tokens": 4096, "microbatch_rows": 4},
        "sources": {"lines": {"paths": str(folder / "lines-*.jsonl"), "record_bytes_max": "16Mi"}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("job_of", "mesh", "is_slow", "pool", "beyond_bytes"),
    [
        (plain, {"dp": 1}, False, None, 0),
        (plain, {"dp": 2, "tp": 2}, True, None, 0),
        (many_sources, {"dp": 1}, False, None, 300 * SOURCE_BYTES),
        # A record is one piece until it lies in the pool, on each of two loader workers: 64 MiB,
        (huge_documents, {"dp": 1}, False, "200Mi", 2 * (64 << 20)),
        # and 8 MiB as a line, as text twice and as ids.
        (huge_lines, {"dp": 1}, False, "80Mi", 2 * 8 * (8 << 20)),
    ],
    ids=["plain", "slow readers", "300 sources", "huge documents", "huge lines"],
)
def test_loader_side_memory_is_flat_and_within_its_budget(
    start_node: Any,
    tmp_path: Path,
    job_of: JobOf,
    mesh: dict[str, int],
    is_slow: bool,
    pool: str | None,
    beyond_bytes: int,
) -> None:
    environ = {} if pool is None else {"MSD__MEMORY__POOL_BYTES": pool}
    node = start_node("--loader-workers", "2", environ=environ)
    rng = random.Random(1)
    seen: list[dict[str, int]] = []
    declared: list[int] = []

    def read(data: Any, step: Any) -> None:
        for batch in step:
            if is_slow and data.rank == 1:
                time.sleep(rng.uniform(0, 0.002))  # the slowness is the subject
            del batch
        if data.rank == 0 and step.number % max(STEPS // 40, 1) == 0:
            seen.append(loader_side(node))
            (job,) = node.request("status")["jobs"]
            declared.append(
                job["pool"]["capacity_bytes"] + sum(ring["bytes"] for ring in job["rings"])
            )

    run_ranks(node, job_of(tmp_path), mesh, STEPS, read_step=read, wait_s=3600)
    totals = [sum(row.values()) for row in seen]
    half = len(seen) // 2
    growth = max(totals[half:]) - max(totals[:half])  # of peaks: records are not alike
    mib = 1 << 20
    worst = max(range(len(seen)), key=totals.__getitem__)
    parts = ", ".join(f"{name} {size / mib:.1f}" for name, size in sorted(seen[worst].items()))
    print(
        f"{STEPS} steps: {max(totals) / mib:.1f} MiB at most ({parts}), pool and rings "
        f"{declared[-1] / mib:.1f}, growth {growth / mib:+.1f}, "
        f"last {totals[-1] / mib:.1f}"
    )
    slack = 4 * mib  # segments are rounded up to whole pages and alignments
    assert max(row["shared"] for row in seen) <= declared[-1] + slack
    assert max(totals) <= declared[-1] + OVERHEAD_BYTES + beyond_bytes
    assert growth < GROWTH_MAX_BYTES, totals
