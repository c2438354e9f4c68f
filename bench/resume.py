"""A restore in mid-stream against a fresh start: 300 sources, of all order classes, four ranks.

States stand deep in an epoch of every source, several epochs in; the 64 steps before them are planned
and served by a real daemon, which journals them and leaves the carried fragments that a stream has.
Fresh starts and restores alternate on one daemon that has no job in between; the time is that of
`connect` to the first batch of the last rank. Indexes are there, as after any pass over the sources.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msd_client
from bench.processes import Daemon
from bench.resume_corpus import Positions, build_indexes, make_sources
from msd_client.contract.state import StreamState
from msd_client.control import request
from msd_daemon.given_job import given_job

SOURCES, LARGE = 300, 8
RANKS = 4
STEPS_BEFORE = 64
DEPTHS = {1_000: (0, 0.2), 10_000: (1, 0.4), 100_000: (2, 0.5), 1_000_000: (3, 0.7)}
"""By step: the epoch of every source, and the share of it that is behind the cursor."""
Say = Callable[..., None]
State = dict[str, bytes] | None


def run(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:
    del only
    with tempfile.TemporaryDirectory(prefix="msd-bench-data-") as name:
        folder = Path(name)
        job = write_job(folder, 60 if is_quick else SOURCES, 2 if is_quick else LARGE)
        state_dir = folder / "state"
        resolved = given_job(job, None, "bench")
        build_indexes(resolved, state_dir / "index")
        say(f"{len(resolved.sources)} sources with indexes")
        daemon = Daemon(
            "--loader-workers", "2", "--state-dir", str(state_dir),
            MSD__DEADLINES__RESTART_GRACE_S="0",
        )  # fmt: skip
        try:
            figures = measure(
                daemon, job, Positions(resolved, state_dir / "index"), 3 if is_quick else 7, say
            )
        except BaseException:
            say(daemon.log_text()[-4000:])
            raise
        finally:
            daemon.end()
    return figures


def write_job(folder: Path, sources: int, large: int) -> Path:
    sections = make_sources(folder / "data", sources, large)
    job = {
        "schema": 1,
        "name": "resume",
        "seed": 17,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 16 * RANKS, "row_tokens": 4096, "microbatch_rows": 4},
        "sources": sections,
        "mixture": {"unit": "tokens", "0": {s: 1 + n % 5 for n, s in enumerate(sections)}},
    }
    path = folder / "resume.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def measure(
    daemon: Daemon, job: Path, positions: Positions, pairs: int, say: Say
) -> dict[str, float]:
    states: dict[int, dict[str, bytes]] = {}
    for step, (epoch, share) in DEPTHS.items():
        injected = positions.state(step - STEPS_BEFORE, epoch, share)
        states[step] = read(daemon, job, {"msd": injected.encode()}, STEPS_BEFORE)[1]
        made = StreamState.decode(states[step]["msd"])
        assert made.step == step
        say(
            f"step {step}: epoch {epoch}, {len(states[step]['msd'])} bytes of state, "
            f"{made.carried.shape[1]} carried fragments"
        )
    fresh: list[float] = []
    restored: dict[int, list[float]] = {step: [] for step in states}
    for number in range(pairs):
        fresh.append(read(daemon, job, None, 1)[0])
        restored[1_000_000].append(read(daemon, job, states[1_000_000], 1)[0])
        say(
            f"pair {number}: fresh {fresh[-1]:.3f} s, step 1,000,000 {restored[1_000_000][-1]:.3f} s"
        )
    for step, state in states.items():
        while len(restored[step]) < min(pairs, 5):
            restored[step].append(read(daemon, job, state, 1)[0])
    medians = {step: statistics.median(times) for step, times in restored.items()}
    for step, median in medians.items():
        say(f"restore at step {step:,}: first batch after {median:.3f} s")
    ratios = [b / a for a, b in zip(fresh, restored[1_000_000], strict=False)]
    return {
        "state_bytes": len(states[1_000_000]["msd"]),
        "first_batch_ratio": round(statistics.median(ratios), 3),
        "first_batch_s_fresh": round(statistics.median(fresh), 3),
        **{f"first_batch_s_{step}": round(median, 3) for step, median in medians.items()},
    }


def read(daemon: Daemon, job: Path, state: State, steps: int) -> tuple[float, dict[str, bytes]]:
    """Read some steps on all ranks; return seconds to the first batch of the last, and the state."""
    firsts = [0.0] * RANKS
    ends: list[dict[str, bytes]] = [{}] * RANKS
    errors: list[BaseException] = []
    os.sync()  # what was written before is no part of what is measured
    begun = time.perf_counter()

    def rank_main(rank: int) -> None:
        try:
            with msd_client.connect(
                str(job), mesh={"dp": RANKS}, rank=rank, daemon=daemon.socket, as_="numpy"
            ) as data:
                if state is not None:
                    data.train.load_state_dict(state)
                for step in itertools.islice(data.train, steps):
                    for _ in step:
                        firsts[rank] = firsts[rank] or time.perf_counter()
                ends[rank] = data.train.state_dict()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    wait_empty(daemon)
    return max(firsts) - begun, ends[0]


def wait_empty(daemon: Daemon) -> None:
    """Wait until the job and its workers are gone."""
    while request(daemon.socket, {"verb": "jobs"})["jobs"]:
        time.sleep(0.01)
