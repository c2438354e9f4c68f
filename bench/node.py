"""One node: CPU a token and memory, msd against a PyTorch DataLoader on the same files and ranks.

Pairs of runs alternate; the median of each figure and of the ratios is reported. CPU is user + system
of every process of the run (ranks, workers, daemon, planner) between two pauses, per million tokens
delivered to the four DP groups together; the main figure has microbatches of 32,768 tokens, four of
them a step and rank (524,288 tokens a step). Memory is Pss_Anon + Pss_Shmem of all of them beyond four idle
ranks that imported torch and msd_client, taken at the end of the run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench.corpus import make_parquet, make_tokenized
from bench.processes import Daemon, Ranks, cpu_s, cpu_s_of, memory, tree_of, wait_idle

SOURCES = 32
RANKS = 4
MIB = 1 << 20
Say = Callable[..., None]


def run(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="msd-bench-data-") as name:
        folder = Path(name)
        idle = idle_memory()
        say(f"idle ranks: {idle / MIB:.0f} MiB")
        if only in (None, "cpu", "mapped"):
            figures |= mapped_figures(folder, idle, is_quick=is_quick, say=say)
        if only in (None, "parquet"):
            figures |= parquet_figures(folder, idle, is_quick=is_quick, say=say)
    return {key: round(value, 5) for key, value in figures.items()}


def idle_memory() -> int:
    ranks = Ranks("idle", RANKS, [])
    ranks.wait_mark()
    total = memory(ranks.pids).anon_and_shmem
    ranks.end()
    return total


def mapped_figures(folder: Path, idle: int, *, is_quick: bool, say: Say) -> dict[str, float]:
    tokens_each = 1_000_000 if is_quick else 4_000_000
    prefixes = make_tokenized(folder / "mapped", SOURCES, tokens_each)
    rows, row_tokens = 8, 4096
    job = job_of(folder / "mapped.yaml", [f"{p}.bin" for p in prefixes], rows, row_tokens, None)
    count = 48 if is_quick else 160
    peer, ours = [], []
    shape = [
        "--rows",
        str(rows),
        "--row-tokens",
        str(row_tokens),
        "--count",
        str(count),
        "--warm",
        "12",
    ]
    for number in range(2 if is_quick else 5):
        peer.append(measure_torch([*shape, "--sources", json.dumps([str(p) for p in prefixes])]))
        ours.append(measure_msd(job, shape))
        say(f"run {number}: cpu_s/Mtok DataLoader {peer[-1]['cpu']:.4f}, msd {ours[-1]['cpu']:.4f}")
        say(
            f"  beyond idle, MiB: DataLoader {(peer[-1]['memory'] - idle) / MIB:.0f}, msd {(ours[-1]['memory'] - idle) / MIB:.0f}"
        )
        say(
            f"  file pages, MiB: DataLoader {peer[-1]['file'] / MIB:.0f}, msd {ours[-1]['file'] / MIB:.0f}"
        )
        say(f"  msd by process, ms/Mtok: {ours[-1]['parts']}")
        say(f"  msd by process, MiB: {ours[-1]['memory_parts']}")
    others = other_sizes(folder, prefixes, is_quick=is_quick, say=say)
    return {
        "cpu_s_per_mtok": middle(run["cpu"] for run in ours),
        "torch_cpu_s_per_mtok": middle(run["cpu"] for run in peer),
        "cpu_ratio_vs_torch": middle(a["cpu"] / b["cpu"] for a, b in zip(ours, peer, strict=True)),
        "mem_mib_mapped": (middle(run["memory"] for run in ours) - idle) / MIB,
        "mem_mib_torch_mapped": (middle(run["memory"] for run in peer) - idle) / MIB,
        **others,
    }


def other_sizes(
    folder: Path, prefixes: list[Path], *, is_quick: bool, say: Say
) -> dict[str, float]:
    """Print what other microbatches cost; not part of the comparison."""
    if is_quick:
        return {}
    found = {}
    for rows, row_tokens, accumulation in ((8, 4096, 1), (8, 8192, 4), (2, 4096, 4)):
        files = [f"{p}.bin" for p in prefixes]
        job = job_of(folder / f"s{rows}.yaml", files, rows, row_tokens, None, accumulation)
        shape = [
            "--rows",
            str(rows),
            "--row-tokens",
            str(row_tokens),
            "--count",
            "200",
            "--warm",
            "12",
        ]
        ours = measure_msd(job, shape)
        size = f"{rows * row_tokens}_x{accumulation}"
        say(
            f"microbatches of {rows * row_tokens} tokens, {accumulation} a step: {ours['cpu']:.4f} cpu_s/Mtok"
        )
        found[f"cpu_s_per_mtok_{size}"] = ours["cpu"]
    return found


def parquet_figures(folder: Path, idle: int, *, is_quick: bool, say: Say) -> dict[str, float]:
    paths = make_parquet(folder / "parquet", SOURCES, (4 << 20) if is_quick else (24 << 20))
    tokenizer = make_tokenizer(folder / "tokenizer.json")
    rows, row_tokens = 4, 8192
    job = job_of(folder / "parquet.yaml", [str(p) for p in paths], rows, row_tokens, tokenizer)
    shape = [
        "--rows",
        str(rows),
        "--row-tokens",
        str(row_tokens),
        "--count",
        "6" if is_quick else "24",
        "--warm",
        "4",
    ]
    ours, peer = [], []
    for _ in range(1 if is_quick else 3):
        peer.append(
            measure_torch(
                [
                    *shape,
                    "--tokenizer",
                    str(tokenizer),
                    "--sources",
                    json.dumps([str(p) for p in paths]),
                ]
            )
        )
        ours.append(measure_msd(job, shape))
        say(
            f"parquet beyond idle, MiB: DataLoader {(peer[-1]['memory'] - idle) / MIB:.0f}, msd {(ours[-1]['memory'] - idle) / MIB:.0f}"
        )
        say(
            f"  file pages, MiB: DataLoader {peer[-1]['file'] / MIB:.0f}, msd {ours[-1]['file'] / MIB:.0f}"
        )
        say(f"  msd by process, MiB: {ours[-1]['memory_parts']}")
    return {
        "mem_mib_parquet": (middle(run["memory"] for run in ours) - idle) / MIB,
        "mem_mib_torch_parquet": (middle(run["memory"] for run in peer) - idle) / MIB,
        "mem_ratio_vs_torch_parquet": middle(
            (a["memory"] - idle) / (b["memory"] - idle) for a, b in zip(ours, peer, strict=True)
        ),
    }


def job_of(
    path: Path,
    files: list[str],
    rows: int,
    row_tokens: int,
    tokenizer: Path | None,
    accumulation: int = 4,
) -> Path:
    """Write a job: `accumulation` microbatches of `rows` rows a rank and step."""
    sources = {f"s{number:02d}": file for number, file in enumerate(files)}
    job: dict[str, Any] = {
        "schema": 1,
        "seed": 17,
        "batch": {
            "rows": RANKS * rows * accumulation,
            "row_tokens": row_tokens,
            "microbatch_rows": rows,
        },
        "sources": sources,
        "mixture": {"unit": "tokens", "0": dict.fromkeys(sources, 1)},
        "tokenizer": {"file": str(tokenizer)} if tokenizer else {"vocabulary": 50304},
    }
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def make_tokenizer(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"word{n:x}" for n in range(4096)]
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def measure_torch(arguments: list[str]) -> dict[str, Any]:
    ranks = Ranks("torch", RANKS, arguments)
    try:
        return between_pauses(ranks, ranks.pids)
    finally:
        ranks.end()


def measure_msd(job: Path, arguments: list[str]) -> dict[str, Any]:
    daemon = Daemon("--loader-workers", "2")
    ranks = Ranks("msd", RANKS, [*arguments, "--job", str(job), "--socket", str(daemon.socket)])
    try:
        return between_pauses(ranks, [*ranks.pids, daemon.process.pid])
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{daemon.log_text()}") from error
    finally:
        ranks.end()
        daemon.end()


def between_pauses(ranks: Ranks, pids: list[int], *, is_settled: bool = False) -> dict[str, Any]:
    """Measure from one pause of the ranks to the next.

    Args:
        ranks: They pause.
        pids: Roots of all processes that count.
        is_settled: Memory is taken once all have read ahead as far as they do.
    """
    ranks.wait_mark()
    names = {p.pid: p.name() for p in tree_of(pids)}
    before = {pid: cpu_s_of(pid) for pid in names}
    start = cpu_s(pids)
    ranks.go()
    tokens = ranks.wait_mark()
    spent = cpu_s(pids) - start
    if is_settled:
        wait_idle(pids)
    used = memory(pids)
    parts: dict[str, float] = {}
    memory_parts: dict[str, float] = {}
    for pid, name in names.items():
        if psutil.pid_exists(pid):
            role = "rank" if pid in ranks.pids else name
            parts[role] = round(
                parts.get(role, 0.0) + (cpu_s_of(pid) - before[pid]) / tokens * 1e9, 2
            )
            memory_parts[role] = round(
                memory_parts.get(role, 0.0) + used.by_pid.get(pid, 0) / MIB, 1
            )
    return {
        "cpu": spent / tokens * 1e6,
        "memory": used.anon_and_shmem,
        "file": used.file,
        "parts": parts,
        "memory_parts": memory_parts,
    }


def middle(values: Any) -> float:
    return statistics.median(list(values))
