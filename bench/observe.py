"""What it costs to see what happens: looks, verdicts, history, snapshots, and words of ranks on their waits.

Twenty pairs of runs of the node bench's job alternate, with `daemon.observe` on and off; the first of a pair
changes with its number. CPU is that of every process of a run, per million tokens. `observe_cpu_ratio` is the mean of
the ratios less 1, with the 95 % interval of a t distribution over their logarithms. Because a ratio of two runs on a
machine with other work is a coarse measure, what looks cost is also counted by the daemon itself
(`observe_cpu_s` of its status: CPU time of its own thread around each look, and of the thread that writes
history), what a snapshot costs is taken over many of them, and what every batch pays is timed alone; their sum at
the run's own rates, with a scrape every 15 s, is `observe_cpu_ratio_counted`.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.corpus import make_tokenized
from bench.node import RANKS, SOURCES, job_of
from bench.processes import Daemon, Ranks, cpu_s, cpu_s_of
from msd_client.control import request
from msd_daemon.core.rank_waits import RankWaits
from msd_daemon.core.starved_time import StarvedTime

PAIRS = 20
SCRAPE_EVERY_S = 15.0
SNAPSHOTS = 40
CALLS = 200_000
# Two-sided 97.5 % quantiles of Student's t.
T_QUANTILES = {2: 4.303, 4: 2.776, 9: 2.262, 19: 2.093, 29: 2.045}
Say = Callable[..., None]


def run(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:  # noqa: ARG001
    pairs = 3 if is_quick else PAIRS
    with tempfile.TemporaryDirectory(prefix="msd-bench-data-") as name:
        folder = Path(name)
        prefixes = make_tokenized(folder / "mapped", SOURCES, 1_000_000 if is_quick else 4_000_000)
        job = job_of(folder / "job.yaml", [f"{prefix}.bin" for prefix in prefixes], 8, 4096, None)
        shape = [
            "--rows",
            "8",
            "--row-tokens",
            "4096",
            "--count",
            "800" if is_quick else "1600",
            "--warm",
            "12",
        ]
        runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(pairs):
            for is_on in (True, False) if number % 2 else (False, True):
                runs[is_on].append(measure(job, shape, is_on=is_on))
            on, off = runs[True][-1], runs[False][-1]
            say(
                f"pair {number}: {on['cpu']:.5f} and {off['cpu']:.5f} CPU s/Mtok, looks {1e3 * on['looks']:.2f} ms/s"
            )
    ratios = [on["cpu"] / off["cpu"] for on, off in zip(runs[True], runs[False], strict=True)]
    low, mean, high = interval(ratios)
    figures = {
        "observe_pairs": pairs,
        "observe_cpu_ratio": mean - 1,
        "observe_cpu_ratio_low": low - 1,
        "observe_cpu_ratio_high": high - 1,
        "looks_cpu_ms_per_s": 1e3 * middle(runs[True], "looks"),
        "snapshot_cpu_ms": 1e3 * middle(runs[True], "snapshot"),
        "hooks_us_per_batch": 1e6 * hooks_s(),
    }
    figures["observe_cpu_ratio_counted"] = (
        figures["looks_cpu_ms_per_s"] / 1e3
        + figures["snapshot_cpu_ms"] / 1e3 / SCRAPE_EVERY_S
        + figures["hooks_us_per_batch"] / 1e6 * middle(runs[True], "batches_per_s")
    ) / middle(runs[True], "cpus")
    return {key: round(value, 6) for key, value in figures.items()}


def measure(job: Path, shape: list[str], *, is_on: bool) -> dict[str, float]:
    """Run the job once; return CPU seconds a million tokens, CPUs in use, and what looks took a second."""
    daemon = Daemon("--loader-workers", "2", MSD__DAEMON__OBSERVE="true" if is_on else "false")
    ranks = Ranks("msd", RANKS, [*shape, "--job", str(job), "--socket", str(daemon.socket)])
    try:
        pids = [*ranks.pids, daemon.process.pid]
        ranks.wait_mark()
        start, looked, began = cpu_s(pids), looks_s(daemon), time.monotonic()
        ranks.go()
        tokens = ranks.wait_mark()
        took_s, spent, looked = (
            time.monotonic() - began,
            cpu_s(pids) - start,
            looks_s(daemon) - looked,
        )
        found = {
            "cpu": spent / tokens * 1e6,
            "cpus": spent / took_s,
            "looks": looked / took_s,
            "batches_per_s": tokens / (8 * 4096) / took_s,
        }
        if is_on:
            before = cpu_s_of(daemon.process.pid)
            for _ in range(SNAPSHOTS):
                request(daemon.socket, {"verb": "snapshot"})
            found["snapshot"] = (cpu_s_of(daemon.process.pid) - before) / SNAPSHOTS
        return found
    finally:
        ranks.end()
        daemon.end()


def looks_s(daemon: Daemon) -> float:
    found: dict[str, Any] = request(daemon.socket, {"verb": "status"})["daemon"]
    return float(found["observe_cpu_s"])


def hooks_s() -> float:
    """Return what each batch pays for being seen: the daemon's notes and the rank's own word."""
    waits, starved, waited = RankWaits(), StarvedTime(), dict[int, int]()
    began = time.thread_time()
    for number in range(CALLS):
        waits.released(number & 7, 1000, time.monotonic_ns())
        waits.served((1, 2))
        starved.plan_lacks(None, time.monotonic_ns())
        waited[number] = int(0.001 * 1e9)
        waited.pop(number, 0)
    return (time.thread_time() - began) / CALLS


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios between the ends of its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    freedom = len(logs) - 1
    quantile = T_QUANTILES[max((known for known in T_QUANTILES if known <= freedom), default=2)]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


def middle(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)
