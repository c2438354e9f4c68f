"""Scaling against fixed assignments: how long ranks wait as the mixture flips between sources.

24 sources whose cost a sample spans 100 x: a sleep in a transform stands for CPU, so that 16 loader
workers can be had on 2 cores. The mixture flips every so many steps between light and heavy sources, by
a schedule, then once without notice to a few sources alone. Two ranks take a step at a fixed rate: what a
step comes later than it was due is data wait. The same run is made with the scaler, and with fixed
assignments of the same workers: as many source loaders as the scaler had at most, dealt by what the
sources cost at the mean of the announced schedule (`mean`), by the most that each costs in it (`peak`), and
evenly (`even`). `wait_ratio_vs_fixed` is against the best of these. With `all`, printed beside, every
source is read by every worker: 384 source loaders, each with its open state.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import scaling_memory
from bench.processes import ROOT, Daemon
from msd_client.control import request

SOURCES = 24
WORKERS = 16
SAMPLE_S = (0.001, 0.1)
SAMPLE_TOKENS = 1024
ROW_TOKENS = 4096
ROWS = 8
RANKS = 2
SAMPLES_A_STEP = ROWS * ROW_TOKENS // SAMPLE_TOKENS
LOAD = 0.75
"""Of the workers' time, in the phase that takes most."""
DOMINANT = 0.95
SURPRISE = (14, 15, 16)
"""Sources that the mixture turns to without notice."""
NOTICE_STEPS = 20
"""Steps that are planned already cannot turn: the turn is said so many before, the rank says so every
so many."""
SLEEPER = """
import time


def sleep(sample, rng):
    time.sleep(sample["seconds"])
    return sample
"""
Say = Callable[..., None]
Shares = list[float]


def costs_s() -> list[float]:
    """Return seconds a sample of each source, evenly spaced by ratio."""
    low, high = SAMPLE_S
    return [low * (high / low) ** (number / (SOURCES - 1)) for number in range(SOURCES)]


def phase(numbers: list[int]) -> Shares:
    """Return shares where some sources have nearly all."""
    rest = [n for n in range(SOURCES) if n not in numbers]
    shares = [0.0] * SOURCES
    for number in numbers:
        shares[number] = DOMINANT / len(numbers)
    for number in rest:
        shares[number] = (1 - DOMINANT) / len(rest)
    return shares


LIGHT = phase(list(range(SOURCES // 2)))
HEAVY = phase(list(range(SOURCES // 2, SOURCES)))
UNANNOUNCED = phase(list(SURPRISE))


def step_work_s(shares: Shares) -> float:
    """Return the work of a step, in seconds of one worker."""
    return SAMPLES_A_STEP * sum(s * c for s, c in zip(shares, costs_s(), strict=True))


@dataclass
class Run:
    """What the ranks of a run saw."""

    waits_s: list[list[float]] = field(default_factory=list)
    """By rank: how much later than due each step came."""
    gaps_s: list[list[float]] = field(default_factory=list)
    loaders_max: int = 0
    moves: int = 0
    seconds: float = 0.0

    @property
    def wait_s(self) -> float:
        return sum(map(sum, self.waits_s)) / len(self.waits_s)


@dataclass(frozen=True)
class Plan:
    """Steps of the run."""

    phase_steps: int
    phases: int
    period_s: float

    @property
    def surprise_at(self) -> int:
        return self.phase_steps * self.phases

    @property
    def steps(self) -> int:
        return self.phase_steps * (self.phases + 1)


def run(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    if only in (None, "memory"):
        figures |= scaling_memory.run(is_quick=is_quick, say=say)
    if only != "memory":
        figures |= scaling_figures(is_quick=is_quick, say=say, only=only)
    return figures


def scaling_figures(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:
    work_s = max(map(step_work_s, (LIGHT, HEAVY, UNANNOUNCED)))
    plan = Plan(60 if is_quick else 200, 2 if is_quick else 4, work_s / (WORKERS * LOAD))
    say(f"a step every {plan.period_s * 1000:.0f} ms, {plan.steps} steps a run")
    with tempfile.TemporaryDirectory(prefix="msd-bench-scaling-") as name:
        folder = Path(name)
        job = write_job(folder, plan)
        runs = {}
        scaled = runs["scaled"] = measure(job, plan, None)
        tell(say, "scaled", scaled, plan)
        budget = max(scaled.loaders_max, SOURCES)
        ways = {way: deal_of(way, budget) for way in ("mean", "peak", "even", "all")}
        for way, deal in ways.items():
            if only in (None, way):
                runs[way] = measure(job, plan, deal)
                tell(say, way, runs[way], plan)
    return figures_of(runs, plan)


def figures_of(runs: Mapping[str, Run], plan: Plan) -> dict[str, float]:
    scaled = runs["scaled"]
    figures = {f"wait_s_{way}": found.wait_s for way, found in runs.items()}
    figures |= {f"source_loaders_{way}": found.loaders_max for way, found in runs.items()}
    fixed = [found.wait_s for way, found in runs.items() if way in ("mean", "peak", "even")]
    if fixed:
        figures["wait_ratio_vs_fixed"] = scaled.wait_s / max(min(fixed), 1e-9)
    if "all" in runs:
        figures["wait_ratio_vs_all"] = scaled.wait_s / max(runs["all"].wait_s, 1e-9)
    figures["steady_p99_ms"] = steady_p99_s(scaled, plan) * 1000
    figures["flip_gap_ms"] = flip_gap_s(scaled, plan) * 1000
    figures["flip_gap_ratio"] = flip_gap_s(scaled, plan) / steady_p99_s(scaled, plan)
    figures["moves"] = scaled.moves
    return {key: round(value, 3) for key, value in figures.items()}


def flips(plan: Plan) -> list[int]:
    return [plan.phase_steps * number for number in range(1, plan.phases)]


def steady_p99_s(run: Run, plan: Plan) -> float:
    """Return the 99th percentile of gaps of any rank in the second half of each known phase."""
    half = plan.phase_steps // 2
    steady = [
        gap
        for gaps in run.gaps_s
        for step, gap in enumerate(gaps)
        if step < plan.surprise_at and step % plan.phase_steps >= half
    ]
    return statistics.quantiles(steady, n=100)[98]


def flip_gap_s(run: Run, plan: Plan) -> float:
    """Return the longest gap of any rank in the first half of a phase behind a known flip."""
    half = plan.phase_steps // 2
    return max(
        gap for gaps in run.gaps_s for flip in flips(plan) for gap in gaps[flip : flip + half]
    )


def tell(say: Say, way: str, found: Run, plan: Plan) -> None:
    by_phase = [
        sum(sum(waits[at : at + plan.phase_steps]) for waits in found.waits_s) / len(found.waits_s)
        for at in range(0, plan.steps, plan.phase_steps)
    ]
    shown = ", ".join(f"{wait:.1f}" for wait in by_phase)
    say(
        f"{way}: {found.wait_s:.1f} s of data wait a rank (by phase {shown}), {found.loaders_max} source "
        f"loaders at most, {found.moves} moves, longest gap behind a known flip "
        f"{flip_gap_s(found, plan) * 1000:.0f} ms, steady p99 {steady_p99_s(found, plan) * 1000:.0f} ms"
    )


# ---- fixed assignments -----------------------------------------------------------------------------


def deal_of(way: str, budget: int) -> dict[str, list[int]]:
    """Return the workers of each source's partitions: so many partitions in all, `all` aside."""
    if way == "all":
        return {name_of(n): list(range(WORKERS)) for n in range(SOURCES)}
    loads = [[share * cost for share, cost in zip(shares, costs_s(), strict=True)]
             for shares in (LIGHT, HEAVY)]  # fmt: skip
    if way == "mean":
        wanted = [sum(pair) / 2 for pair in zip(*loads, strict=True)]
    elif way == "peak":
        wanted = [max(pair) for pair in zip(*loads, strict=True)]
    else:
        wanted = [1.0] * SOURCES
    counts = [1] * SOURCES
    while sum(counts) < budget:
        open_to = [n for n in range(SOURCES) if counts[n] < WORKERS]
        counts[max(open_to, key=lambda n: wanted[n] / counts[n])] += 1
    return placed(wanted, counts)


def placed(wanted: Shares, counts: list[int]) -> dict[str, list[int]]:
    """Return partitions dealt largest first, each to the worker that has least."""
    taken, dealt = [0.0] * WORKERS, {}
    for number in sorted(range(SOURCES), key=lambda n: -wanted[n] / counts[n]):
        own: list[int] = []
        for _ in range(counts[number]):
            worker = min((w for w in range(WORKERS) if w not in own), key=lambda w: taken[w])
            taken[worker] += wanted[number] / counts[number]
            own.append(worker)
        dealt[name_of(number)] = own
    return dealt


# ---- the runs --------------------------------------------------------------------------------------


def name_of(number: int) -> str:
    return f"s{number:02d}"


def named(shares: Shares) -> dict[str, float]:
    return {name_of(number): share for number, share in enumerate(shares)}


def write_job(folder: Path, plan: Plan) -> Path:
    (folder / "sleeper.py").write_text(SLEEPER)
    sources = {}
    for number, seconds in enumerate(costs_s()):
        path = folder / f"{name_of(number)}.jsonl"
        text = "x" * (SAMPLE_TOKENS - 1)
        line = json.dumps({"text": text, "seconds": seconds}) + "\n"
        path.write_text(line * 2000)
        sources[name_of(number)] = {
            "paths": path.name,
            "transform": {"call": "sleeper:sleep"},
            "shuffle": {"block_bytes": 16384, "window_records": 16},
        }
    mixture: dict[Any, Any] = {"unit": "tokens"}
    for number in range(plan.phases):
        mixture[number * plan.phase_steps] = named(HEAVY if number % 2 else LIGHT)
    job = folder / "job.yaml"
    job.write_text(
        json.dumps(
            {
                "schema": 1,
                "name": "scaling",
                "seed": 5,
                "tokenizer": {"bytes": True, "eos": "end"},
                "batch": {"rows": ROWS, "row_tokens": ROW_TOKENS, "microbatch_rows": ROWS // RANKS},
                "sources": sources,
                "mixture": mixture,
            }
        )
    )
    return job


def measure(job: Path, plan: Plan, deal: dict[str, list[int]] | None) -> Run:
    """Run once; `deal` None: with the scaler."""
    arguments = ["--loader-workers", str(WORKERS)]
    settings = {"MSD__WORKERS__SCALING": "true" if deal is None else "false"}
    daemon = Daemon(*arguments, **settings)
    begun = time.monotonic()
    ranks: list[subprocess.Popen[str]] = []
    try:
        ranks = [start_rank(job, daemon.socket, rank, plan) for rank in range(RANKS)]
        found = watch(daemon, ranks, plan, deal)
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(f"{error}\n{daemon.log_text()[-4000:]}") from error
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        daemon.end()
    found.seconds = time.monotonic() - begun
    return found


def start_rank(job: Path, socket: Path, rank: int, plan: Plan) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "bench.scaling_rank", "--rank", str(rank), "--ranks", str(RANKS),
        "--job", str(job), "--socket", str(socket), "--period-s", str(plan.period_s),
        "--steps", str(plan.steps),
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def watch(
    daemon: Daemon,
    ranks: list[subprocess.Popen[str]],
    plan: Plan,
    deal: dict[str, list[int]] | None,
) -> Run:
    """Deal once all have begun, turn the mixture without notice, gather what ranks saw."""
    found = Run()
    for process in ranks:
        said(process)
    for source, workers in (deal or {}).items():
        body = {"source": source, "partitions": len(workers), "loaders": workers}
        request(daemon.socket, {"verb": "scale", **body})
    for process in ranks:
        tell_rank(process)
    while "waits" not in (told := said(ranks[0])):
        scaling = request(daemon.socket, {"verb": "status"})["jobs"][0]["scaling"]
        counts = [entry["partitions"] for entry in scaling["sources"]]
        found.loaders_max = max(found.loaders_max, sum(counts))
        found.moves = scaling["moves"]
        if told["step"] == plan.surprise_at - NOTICE_STEPS:
            turn = {"weights": named(UNANNOUNCED), "at": plan.surprise_at}
            request(daemon.socket, {"verb": "mixture", **turn})
    for process in ranks:
        told = told if process is ranks[0] else said(process)
        found.waits_s.append(told["waits"])
        found.gaps_s.append(told["gaps"])
    return found


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a rank says next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended: status {process.wait()}")
    words: dict[str, Any] = json.loads(line)
    return words


def tell_rank(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
