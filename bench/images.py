"""Photos to packed batches: msd against a PyTorch DataLoader, samples a CPU second and memory.

The work: read JPEGs (0.28 megapixels, quality 85 to 90, 4:2:0) and captions from a WebDataset tar,
decode, resize (native, multiples of 28), cut Qwen2-VL's patches as bytes, pack into rows of
4,096 tokens, deliver to 8 data-parallel ranks that copy every byte of them once. CPU is user +
system of every process of the run between two pauses: ranks, DataLoader workers, daemon, loader
workers, constructors, planner. msd makes more in it: a global order, `best_fit`, masks, places of
placeholders. Runs alternate; medians of the runs and of the ratios are reported. DataLoaders have
2 workers a rank in these.

Memory is Pss_Anon + Pss_Shmem of all of them beyond eight idle ranks. That of a DataLoader grows
with its workers, each of which holds 2 batches ready and makes a third, so it is told for 2, 4 and 8
of them a rank; `mem_ratio_vs_torch` is that of 8, as many as a node's cores are shared among its
ranks. msd's does not depend on them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import image_decoders
from bench.image_corpus import make_tar
from bench.image_peer import BEGIN, END, PLACEHOLDER, list_tar, read_at
from bench.node import between_pauses, middle
from bench.processes import Daemon, Ranks, memory

RANKS = 8
ROW_TOKENS, ROW_PATCHES = 4096, 16384
WORKERS = 2
"""DataLoader workers a rank where CPU is measured."""
MEMORY_WORKERS = (4, 8)
"""And where memory alone is."""
LEAN = {"MSD__MEMORY__RING_SLOTS": "3", "MSD__PLANNER__HORIZON_STEPS": "2"}
"""For a loop that drops a batch before it takes the next: one step is read, one lies ready."""
MIB = 1 << 20
Say = Callable[..., None]


def run(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:
    """Return the figures; `only` takes one way of `image_decoders`, or msd."""
    with tempfile.TemporaryDirectory(prefix="msd-bench-images-") as name:
        folder = Path(name)
        tar = make_tar(folder / "photos-000.tar", 400 if is_quick else 1600)
        parts = decoder_figures(tar, say)
        fast = min((way for way in parts if way != "pillow"), key=lambda way: parts[way])
        say(f"the fastest antialiased way of a DataLoader: {fast}")
        ways = {"torch": "pillow", "fast": fast}
        if only is not None:
            ways = {only: only} if only != "msd" else {}
        figures = {f"{way}_decode_resize_ms": ms for way, ms in parts.items()}
        figures |= pairs(folder, tar, ways, is_quick=is_quick, say=say)
    return {key: round(value, 4) for key, value in figures.items()}


def decoder_figures(tar: Path, say: Say) -> dict[str, float]:
    with tar.open("rb") as file:
        contents = [read_at(file, *place.image) for place in list_tar(tar)[:64]]
    found = image_decoders.milliseconds(contents, 3)
    say(", ".join(f"{way} {ms:.2f} ms" for way, ms in found.items()))
    return found


def pairs(
    folder: Path, tar: Path, ways: dict[str, str], *, is_quick: bool, say: Say
) -> dict[str, float]:
    job = write_job(folder / "job.yaml", tar)
    idle = idle_memory()
    say(f"idle ranks: {idle / MIB:.0f} MiB")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("msd", *ways)}
    count = ["--warm", "3", "--count", "6" if is_quick else "16"]
    for _ in range(1 if is_quick else 3):
        for name, own in runs.items():
            one = measure_msd(job, count) if name == "msd" else measure_peer(ways[name], tar, count)
            own.append(one)
            say(
                f"{name}: {1e6 / one['cpu']:.0f} samples a CPU second, "
                f"{(one['memory'] - idle) / MIB:.0f} MiB beyond idle ranks; "
                f"us a sample by process {one['parts']}; MiB {one['memory_parts']}"
            )
    figures = {}
    for name, own in runs.items():
        figures[f"{name}_samples_per_cpu_s"] = middle(1e6 / one["cpu"] for one in own)
    for name in ways:
        both = zip(runs["msd"], runs[name], strict=True)
        figures[f"samples_per_cpu_s_ratio_vs_{name}"] = middle(b["cpu"] / a["cpu"] for a, b in both)
    beyond = {name: middle(one["memory"] - idle for one in own) for name, own in runs.items()}
    return figures | memory_figures(tar, beyond, idle, count, is_quick=is_quick, say=say)


def memory_figures(
    tar: Path,
    beyond: dict[str, float],
    idle: int,
    count: list[str],
    *,
    is_quick: bool,
    say: Say,
) -> dict[str, float]:
    """Return the memory beyond idle ranks, of DataLoaders with more workers by one run each."""
    figures = {"msd_mem_mib": beyond["msd"] / MIB}
    if "torch" not in beyond:
        return figures
    found = {WORKERS: beyond["torch"]}
    for workers in MEMORY_WORKERS[-1:] if is_quick else MEMORY_WORKERS:
        found[workers] = float(measure_peer("pillow", tar, count, workers)["memory"] - idle)
        say(f"torch with {workers} workers a rank: {found[workers] / MIB:.0f} MiB")
    for workers, size_bytes in found.items():
        figures[f"torch_mem_mib_{workers}_workers"] = size_bytes / MIB
        figures[f"mem_ratio_vs_torch_{workers}_workers"] = beyond["msd"] / size_bytes
    figures["mem_ratio_vs_torch"] = beyond["msd"] / found[MEMORY_WORKERS[-1]]
    return figures


def idle_memory() -> int:
    ranks = Ranks("idle", RANKS, [], module="bench.image_rank")
    ranks.wait_mark()
    total = memory(ranks.pids).anon_and_shmem
    ranks.end()
    return total


def measure_peer(
    way: str, tar: Path, arguments: list[str], workers: int = WORKERS
) -> dict[str, Any]:
    shape = ["--row-tokens", str(ROW_TOKENS), "--row-patches", str(ROW_PATCHES)]
    shape += ["--workers", str(workers)]
    ranks = Ranks(way, RANKS, [*arguments, *shape, "--tar", str(tar)], module="bench.image_rank")
    try:
        return between_pauses(ranks, ranks.pids)
    finally:
        ranks.end()


def measure_msd(job: Path, arguments: list[str]) -> dict[str, Any]:
    daemon = Daemon("--loader-workers", "2", **LEAN)
    own = ["--job", str(job), "--socket", str(daemon.socket)]
    ranks = Ranks("msd", RANKS, [*arguments, *own], module="bench.image_rank")
    try:
        return between_pauses(ranks, [*ranks.pids, daemon.process.pid])
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{daemon.log_text()}") from error
    finally:
        ranks.end()
        daemon.end()


def write_job(path: Path, tar: Path) -> Path:
    """Write the job: one source, one row a microbatch, one microbatch a rank and step."""
    job = {
        "schema": 1,
        "seed": 17,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {
            "rows": RANKS,
            "row_tokens": ROW_TOKENS,
            "microbatch_rows": 1,
            "microbatch_patches": ROW_PATCHES,
        },
        "image": ["decode", {"resize": "native"}, {"patchify": "qwen2_vl"}],
        "placeholder": {"image": {"token": PLACEHOLDER, "begin": BEGIN, "end": END}},
        "sources": {"photos": {"paths": str(tar), "image": "jpg", "text": "txt"}},
    }
    path.write_text(json.dumps(job))  # JSON is YAML
    return path
