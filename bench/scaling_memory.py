"""Memory of 306 parquet sources on one node: msd with 2 and 8 ranks, and a PyTorch DataLoader.

The sources are files of their own, links to 12 different contents (about 6 MiB of text in row groups of
3): what counts is what is open, not what is on disk. Memory is Pss_Anon + Pss_Shmem of all processes beyond
the same number of idle ranks that imported torch and msd_client, once every source is open and all is read
ahead. Of the DataLoader one worker of one rank is measured and multiplied by 2 workers x 8 ranks: all of
them would not fit this machine. The budget is what `msdctl plan resources` says before anything starts.
Of msd the median of three runs each, in turn, is taken: what the allocator keeps differs from run to run.
A few more sources of weight 0 stand in the job: no process may have one of their files open.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.corpus import make_parquet
from bench.node import make_tokenizer
from bench.processes import Daemon, Ranks, memory, tree_of, wait_idle

SOURCES = 306
OFF_SOURCES = 8
"""Of weight 0."""
CONTENTS = 12
CONTENT_BYTES = 6 << 20
RANKS = (2, 8)
TORCH_WORKERS = 2
ROWS_A_RANK, ROW_TOKENS = 4, 2048
WARM_STEPS, STEPS = 16, 8
MIB = 1 << 20
Say = Callable[..., None]


def run(*, is_quick: bool, say: Say) -> dict[str, float]:
    """Return the figures of memory."""
    with tempfile.TemporaryDirectory(prefix="msd-bench-data-") as name:
        return memory_figures(Path(name), is_quick=is_quick, say=say)


def memory_figures(folder: Path, *, is_quick: bool, say: Say) -> dict[str, float]:
    sources = 64 if is_quick else SOURCES
    paths = make_sources(folder, sources + OFF_SOURCES)
    tokenizer = make_tokenizer(folder / "tokenizer.json")
    job = job_of(folder / "job.yaml", paths[:sources], paths[sources:], tokenizer)
    idle = {ranks: idle_bytes(ranks) for ranks in (1, *RANKS)}
    say(f"idle ranks, MiB: {', '.join(f'{n}: {size / MIB:.0f}' for n, size in idle.items())}")
    runs: dict[int, list[int]] = {ranks: [] for ranks in RANKS}
    for _ in range(1 if is_quick else 3):
        for ranks in RANKS:
            found = measure_msd(job, ranks, paths[sources:])
            runs[ranks].append(found["bytes"] - idle[ranks])
            say(
                f"msd, {ranks} ranks: {runs[ranks][-1] / MIB:.0f} MiB beyond idle; {found['parts']}"
            )
            assert not found["off"], f"sources of weight 0 are open: {found['off']}"
    used = {ranks: statistics.median(sizes) for ranks, sizes in runs.items()}
    budget = planned_bytes(job, RANKS[-1])
    say(f"planned for {RANKS[-1]} ranks: {budget / MIB:.0f} MiB")
    worker = measure_torch_worker(paths[:sources], tokenizer) - idle[1]
    torch_bytes = worker * TORCH_WORKERS * RANKS[-1]
    say(
        f"DataLoader: {worker / MIB:.0f} MiB a worker, {torch_bytes / MIB:.0f} MiB in all (multiplied)"
    )
    return {
        "mem_mib_306x8": round(used[8] / MIB, 1),
        "mem_mib_306x2": round(used[2] / MIB, 1),
        "mem_growth_2_to_8": round(used[8] / used[2], 4),
        "mem_budget_mib": round(budget / MIB, 1),
        "mem_of_budget": round(used[8] / budget, 4),
        "mem_mib_torch_worker": round(worker / MIB, 1),
        "mem_mib_torch": round(torch_bytes / MIB, 1),
        "mem_ratio_vs_torch": round(used[8] / torch_bytes, 5),
        "mem_sources": sources,
    }


def make_sources(folder: Path, count: int) -> list[Path]:
    """Return paths of so many parquet files that share few contents."""
    contents = make_parquet(folder / "contents", CONTENTS, CONTENT_BYTES)
    links = folder / "sources"
    links.mkdir()
    paths = []
    for number in range(count):
        path = links / f"s{number:03d}.parquet"
        os.link(contents[number % CONTENTS], path)
        paths.append(path)
    return paths


def job_of(path: Path, on: list[Path], off: list[Path], tokenizer: Path) -> Path:
    """Write a job whose step is the same on any number of ranks."""
    names = {file.stem: str(file) for file in (*on, *off)}
    weights = {file.stem: 1 for file in on} | {file.stem: 0 for file in off}
    rows = ROWS_A_RANK * RANKS[-1]
    batch = {"rows": rows, "row_tokens": ROW_TOKENS, "microbatch_rows": ROWS_A_RANK}
    job: dict[str, Any] = {
        "schema": 1,
        "seed": 17,
        "batch": batch,
        "sources": names,
        "mixture": {"unit": "tokens", "0": weights},
        "tokenizer": {"file": str(tokenizer)},
    }
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def idle_bytes(count: int) -> int:
    ranks = Ranks("idle", count, [])
    ranks.wait_mark()
    total = memory(ranks.pids).anon_and_shmem
    ranks.end()
    return total


def measure_msd(job: Path, count: int, off: list[Path]) -> dict[str, Any]:
    """Return bytes of ranks and daemon together once all is read ahead, and open files of weight 0."""
    daemon = Daemon("--loader-workers", "2")
    microbatches = (
        RANKS[-1] // count
    )  # of a rank's step: it is the same steps on any number of ranks
    warm, more = str(WARM_STEPS * microbatches), str(STEPS * microbatches)
    shape = ["--job", str(job), "--socket", str(daemon.socket), "--warm", warm, "--count", more]
    ranks = Ranks("msd", count, shape)
    try:
        ranks.wait_mark()
        ranks.go()
        ranks.wait_mark()
        roots = [*ranks.pids, daemon.process.pid]
        wait_idle(roots)
        used = memory(roots)
        names = {process.pid: process.name() for process in tree_of(roots)}
        parts: dict[str, float] = {}
        for pid, size in used.by_pid.items():
            role = "rank" if pid in ranks.pids else names.get(pid, "?")
            parts[role] = round(parts.get(role, 0.0) + size / MIB, 1)
        return {"bytes": used.anon_and_shmem, "parts": parts, "off": open_files(names, off)}
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{daemon.log_text()}") from error
    finally:
        ranks.end()
        daemon.end()


def open_files(pids: dict[int, str], paths: list[Path]) -> list[str]:
    """Return which of these files some process has open or mapped."""
    found = set()
    wanted = {str(path) for path in paths}
    for pid in pids:
        try:
            held = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it ended just now
        found |= wanted & (held | {line[73:].strip() for line in maps.splitlines()})
    return sorted(found)


def measure_torch_worker(paths: list[Path], tokenizer: Path) -> int:
    """Return bytes of one rank with one worker, all of whose sources were drawn from."""
    rows = len(paths) * 8  # by chance a few are not drawn once: that is in the DataLoader's favour
    arguments = [
        "--rows", str(ROWS_A_RANK), "--row-tokens", str(ROW_TOKENS), "--tokenizer", str(tokenizer),
        "--sources", json.dumps([str(path) for path in paths]), "--workers", "1",
        "--warm", "1", "--count", str(rows // ROWS_A_RANK),
    ]  # fmt: skip
    ranks = Ranks("torch", 1, arguments)
    try:
        ranks.wait_mark()
        ranks.go()
        ranks.wait_mark()
        wait_idle(ranks.pids)
        return memory(ranks.pids).anon_and_shmem
    finally:
        ranks.end()


def planned_bytes(job: Path, ranks: int) -> int:
    """Return the memory that `msdctl plan resources` tells beforehand."""
    from msd_daemon.verbs.plan import run as plan_resources

    with tempfile.TemporaryDirectory(prefix="msd-bench-state-") as state:
        os.environ["MSD__DAEMON__STATE_DIR"] = state
        try:
            found = plan_resources(str(job), {"dp": ranks}, 10**9, None, None, 2)
        finally:
            del os.environ["MSD__DAEMON__STATE_DIR"]
    return found.points[0].table.memory_bytes
