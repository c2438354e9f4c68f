"""kill -9 of the loader worker of a heavy source under steady load: the longest gap a rank sees.

A source takes 20 ms of CPU a sample, in a transform; one loader worker reads it at a fifth of what
it can. One rank takes a step of two samples every 200 ms. Its loader worker is killed again and again, with a
hot shadow behind it (`critical: true`), with a spare alone, and with neither. A gap is the time
between two steps as the rank sees them; beyond the 99th percentile of gaps while nothing died.

`smallest`: one step planned ahead, the least there is. `default`: as daemons come. Memory is
private and shared bytes by share (Pss_Anon + Pss_Shmem) of the daemon's processes, users' included.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil

from bench.processes import ROOT, Daemon, memory
from msd_client.control import request

MIB = 1 << 20
SAMPLE_S = 0.02
PERIOD_S = 0.2
ROWS = 2
SETTLE_S = 5.2
"""Between two kills: longer than a worker has to serve for the next death to be a new one."""
WINDOW_S = 2.5
"""In which a death is felt."""
VOCABULARY = 120_000
"""Of a tokenizer as models have it: loading it takes a new process its time."""
LEVELS = ("hot", "warm", "none")
READ_AHEAD: dict[str, dict[str, str]] = {
    "smallest": {"MSD__PLANNER__HORIZON_STEPS": "1"},
    "default": {},
}
BURN = """
import time


def burn(sample, rng):
    end = time.thread_time() + {seconds}
    while time.thread_time() < end:
        pass
    return sample
"""
Say = Callable[..., None]


def run(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:
    figures: dict[str, float] = {}
    kills = 2 if is_quick else 6
    ways = ["smallest"] if is_quick else list(READ_AHEAD)
    with tempfile.TemporaryDirectory(prefix="msd-bench-recover-") as name:
        folder = Path(name)
        write_source(folder)
        for way in ways:
            if only not in (None, way):
                continue
            suffix = "" if way == "smallest" else "_default"
            for level in LEVELS:
                found = measure(folder, level, READ_AHEAD[way], kills)
                say(
                    f"{way} read-ahead, {level}: normal gap p99 {found['p99']:.0f} ms, beyond it: median "
                    f"{found['median']:.0f} ms, worst {found['worst']:.0f} ms of {found['all']}; "
                    f"{found['mib']:.0f} MiB"
                )
                figures[f"gap_ms_{level}{suffix}"] = found["worst"]
                figures[f"gap_median_ms_{level}{suffix}"] = found["median"]
                figures[f"normal_p99_ms_{level}{suffix}"] = found["p99"]
                figures[f"pss_mib_{level}{suffix}"] = found["mib"]
    return {key: round(value, 1) for key, value in figures.items()}


def write_source(folder: Path) -> None:
    rng = random.Random(3)
    words = [f"word{number:x}" for number in range(VOCABULARY)]
    make_tokenizer(folder / "tokenizer.json", words)
    with (folder / "heavy.jsonl").open("w") as lines:
        for _ in range(20_000):
            text = " ".join(rng.choices(words, k=200))
            lines.write(json.dumps({"text": text}) + "\n")
    (folder / "burner.py").write_text(BURN.format(seconds=SAMPLE_S))


def make_tokenizer(path: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def job_of(folder: Path, level: str) -> Path:
    path = folder / f"{level}.yaml"
    source: dict[str, Any] = {"paths": "heavy.jsonl", "transform": {"call": "burner:burn"}}
    if level == "hot":
        source["critical"] = True
    path.write_text(
        json.dumps(
            {
                "schema": 1,
                "name": f"recover-{level}",
                "seed": 5,
                "tokenizer": {"file": "tokenizer.json"},
                "batch": {"rows": ROWS, "row_tokens": 256, "packing": "padded"},
                "sources": {"heavy": source},
            }
        )
    )
    return path


def measure(folder: Path, level: str, settings: dict[str, str], kills: int) -> dict[str, Any]:
    """Return gaps of one level in ms, and memory."""
    spares = "0" if level == "none" else "1"
    daemon = Daemon("--loader-workers", "1", MSD__WORKERS__SPARES=spares, **settings)
    try:
        with Rank(job_of(folder, level), daemon.socket) as rank:
            wait_standby(daemon, level, rank)
            used = memory([daemon.process.pid]).anon_and_shmem / MIB
            since = time.monotonic()
            normal = rank.gaps(since, until=since + (2.5 if kills < 4 else 10.0))
            beyond = []
            p99 = percentile(normal, 99)
            killed = 0.0
            for _ in range(kills):
                rank.check()
                wait_s = max(killed + SETTLE_S - time.monotonic(), 0.0)
                time.sleep(wait_s + random.uniform(0, PERIOD_S))  # anywhere in a step
                killed = time.monotonic()
                os.kill(loader_pid(daemon), signal.SIGKILL)
                found = rank.gaps(since=killed, until=killed + WINDOW_S)
                beyond.append(max(found) - p99)
                wait_standby(daemon, level, rank)
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(f"{error}\n{daemon.log_text()[-4000:]}") from error
    finally:
        daemon.end()
    clipped = [max(gap, 0.0) for gap in beyond]
    return {
        "p99": p99,
        "median": statistics.median(clipped),
        "worst": max(clipped),
        "all": [round(gap) for gap in beyond],
        "mib": used,
    }


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def workers(daemon: Daemon) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    jobs = request(daemon.socket, {"verb": "status"})["jobs"]
    return (jobs[0]["workers"], jobs[0]["standby"]) if jobs else ([], {})


def loader_pid(daemon: Daemon) -> int:
    return next(row["pid"] for row in workers(daemon)[0] if row["role"] == "loader")


def wait_standby(daemon: Daemon, level: str, rank: Rank) -> None:
    """Wait until who stands by at this level is there, ready, and the rank had some steps."""
    wanted = {"hot": {"loader", "shadow", "spare"}, "warm": {"loader", "spare"}, "none": {"loader"}}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        rank.check()
        rows, standby = workers(daemon)
        roles = {row["role"] for row in rows} & {"loader", "shadow", "spare"}
        is_ready = level != "hot" or bool(standby.get("shadow_bytes"))
        if roles == wanted[level] and is_ready and rank.steps > 5:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{level}: {roles} of {wanted[level]}, {standby}")


class Rank:
    """A rank process; a thread keeps when its steps came."""

    def __init__(self, job: Path, socket: Path) -> None:
        command = [
            sys.executable, "-m", "bench.recover_rank", "--rank", "0", "--ranks", "1", "--job", str(job),
            "--socket", str(socket), "--period-s", str(PERIOD_S),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
        self._came: list[float] = []
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self._thread.join()
        self.process.wait()

    @property
    def steps(self) -> int:
        return len(self._came)

    def check(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the rank ended: status {self.process.returncode}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._came.append(json.loads(line)["came"])

    def gaps(self, since: float, until: float) -> list[float]:
        """Wait until a time and a step behind it; return the gaps in ms that reach into the span."""
        while not self._came or self._came[-1] < until:
            self.check()
            time.sleep(0.02)
        return [
            (after - before) * 1000
            for before, after in self._pairs()
            if after >= since and before < until
        ]

    def _pairs(self) -> Iterator[tuple[float, float]]:
        came = list(self._came)
        return itertools.pairwise(came)
