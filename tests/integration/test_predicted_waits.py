"""`msdctl plan resources` before, a real run behind: whether ranks wait, for which source, at which stage.

Each case is planned and run under the same settings. The trainer's computing is a pause of the step's
time. What then happens is told by the rank (its data wait), by which source is awaited while it waits,
and by what that source's loaders spent their time on. Capacities are three times above or below what is
asked for, at least.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import BudgetError
from tests.support.bad_disk import BadDisk
from tests.support.faulty_proxy import Fault, FaultyServer, Seen, running_server, serve_objects
from tests.support.node import Node, running_node
from tests.support.sources import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

RUN_S = 4.0
WAITS_SHARE = 0.3
"""Of the time of the later half of the run, that a rank waits for data."""
BATCH = {"rows": 16, "row_tokens": 512, "microbatch_rows": 2}
RECORD_BYTES = 256
SAMPLES_A_STEP = BATCH["rows"] * BATCH["row_tokens"] // RECORD_BYTES


@dataclass
class Case:
    """A job, how fast its ranks are, and what is expected."""

    expected: tuple[bool, str, str]
    """Do they wait, for which source, at which stage."""
    step_s: float
    sources: dict[str, Any]
    weights: dict[str, float]
    settings: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Of `plan resources`, beside the settings."""
    begin: Callable[[], None] = lambda: None
    """Called once job and daemon are there."""


def lines(count: int, name: str = "") -> bytes:
    texts = (f"{name} {n} ".ljust(RECORD_BYTES - 1, "x") for n in range(count))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write(folder: Path, name: str, count: int = 20_000, **more: Any) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    path.write_bytes(lines(count, name))
    return {"paths": str(path), "shuffle": {"block_bytes": "64Ki"}} | more


def sleeping(folder: Path, seconds: float) -> dict[str, Any]:
    """Return a transform that takes so long: a sleep stands for computing."""
    (folder / "own.py").write_text(
        "import time\n\n\ndef fn(sample, rng, seconds):\n    time.sleep(seconds)\n    return sample\n"
    )
    return {"transform": {"call": "own:fn", "options": {"seconds": seconds}}}


def balanced(folder: Path, _: ExitStack) -> Case:
    names = {name: write(folder, name) for name in ("a", "b")}
    return Case((False, "", ""), 0.2, names, {"a": 1, "b": 1})


def user_code(folder: Path, _: ExitStack) -> Case:
    """One worker, and 16 samples a step that take 20 ms each: 0.32 s for a step of 0.05."""
    sources = {
        "own": write(folder, "own", **sleeping(folder, 0.02)),
        "plain": write(folder, "plain"),
    }
    settings = {"MSD__WORKERS__LOADER_WORKERS": "1"}
    return Case((True, "own", "transform"), 0.05, sources, {"own": 1, "plain": 1}, settings)


def split_user_code(folder: Path, _: ExitStack) -> Case:
    """The same on four workers, for slower ranks: each part has a quarter of 0.64 s, a step takes 0.6."""
    sources = {"own": write(folder, "own", **sleeping(folder, 0.02))}
    settings = {"MSD__WORKERS__LOADER_WORKERS": "4"}
    return Case((False, "", ""), 0.6, sources, {"own": 1}, settings, ("--cpus", "8"))


def one_lane(folder: Path, _: ExitStack) -> Case:
    """A stream of one lane is read by one loader, though there are four workers."""
    import zstandard

    path = folder / "lane.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(lines(20_000)))
    source = {"paths": str(path), "shuffle": {"interleave": 1}, **sleeping(folder, 0.02)}
    settings = {"MSD__WORKERS__LOADER_WORKERS": "4"}
    options = ("--cpus", "8")
    return Case((True, "lane", "transform"), 0.1, {"lane": source}, {"lane": 1}, settings, options)


def filtered(folder: Path, _: ExitStack) -> Case:
    """One record in 200 is kept: each costs 200 times what reading it does."""
    path = folder / "dear.jsonl"
    rows = ({"text": f"{n} ".ljust(RECORD_BYTES - 1, "x"), "q": n % 200} for n in range(60_000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"MSD__WORKERS__LOADER_WORKERS": "1"}
    source = {"paths": str(path), "where": "q == 0"}
    return Case((True, "dear", "decode"), 0.005, {"dear": source}, {"dear": 1}, settings)


def slow_disk(folder: Path, stack: ExitStack) -> Case:
    """A disk that does one read at a time, each of 30 ms."""
    del stack
    slow = folder / "slow"
    slow.mkdir()
    disk = BadDisk(slow, folder / "orders")
    small = {"shuffle": {"block_bytes": "4Ki"}}
    sources = {"disk": write(slow, "disk") | small, "plain": write(folder, "plain")}
    settings = {"MSD__WORKERS__LOADER_WORKERS": "2", **disk.environ}
    case = Case((True, "disk", "read"), 0.02, sources, {"disk": 1, "plain": 1}, settings)
    case.begin = lambda: disk.begin("slow_reads")
    return case


@contextmanager
def store(choose: Callable[[Seen], Fault | None]) -> Iterator[FaultyServer]:
    with running_server(serve_objects({"far.jsonl": lines(60_000, "far")})) as server:
        server.choose = choose
        yield server


def throttled_store(folder: Path, stack: ExitStack) -> Case:
    """A store that answers one request at a time, each in 50 ms, of 16 KiB."""
    queue, pause = threading.Lock(), threading.Event()

    def choose(_: Seen) -> None:
        with queue:
            pause.wait(0.05)

    server = stack.enter_context(store(choose))
    small = {"shuffle": {"block_bytes": "16Ki"}}
    sources = {"far": {"paths": f"{server.url}/far.jsonl"} | small, "plain": write(folder, "plain")}
    return Case((True, "far", "read"), 0.01, sources, {"far": 3, "plain": 1}, STORE_SETTINGS)


def far_store(folder: Path, stack: ExitStack) -> Case:
    """One that takes 20 ms for each request, for ranks that ask for little."""
    pause = threading.Event()

    def choose(_: Seen) -> None:
        pause.wait(0.02)

    server = stack.enter_context(store(choose))
    sources = {"far": f"{server.url}/far.jsonl", "plain": write(folder, "plain")}
    return Case((False, "", ""), 0.4, sources, {"far": 1, "plain": 1}, STORE_SETTINGS)


STORE_SETTINGS = {
    "MSD__WORKERS__LOADER_WORKERS": "2",
    "MSD__STORES__BLOCK_BYTES": "16Ki",
    "MSD__STORES__REQUEST_BYTES": "16Ki",
    "MSD__STORES__MEMORY_BYTES": "1Mi",
}


def little_memory(folder: Path, _: ExitStack) -> Case:
    settings = {"MSD__MEMORY__MEMORY_BYTES": "8Mi"}
    sources = {"a": write(folder, "a")}
    return Case((True, "", "memory"), 0.2, sources, {"a": 1}, settings)


SHORT = [balanced, user_code, little_memory]
LONG = [split_user_code, one_lane, filtered, slow_disk, throttled_store, far_store]


@pytest.mark.parametrize(
    "make",
    [*SHORT, *(pytest.param(make, marks=pytest.mark.soak) for make in LONG)],
    ids=lambda make: make.__name__,
)
def test_what_is_predicted_is_what_happens(make: Callable[[Path, ExitStack], Case], tmp_path: Path):
    with ExitStack() as stack:
        case = make(tmp_path, stack)
        job = tmp_path / "job.yaml"
        job.write_text(
            json.dumps(
                {
                    "name": "job", "seed": 3, "tokenizer": {"bytes": True}, "batch": BATCH,
                    "sources": case.sources, "mixture": {"unit": "tokens", "0": case.weights},
                }
            )
        )  # fmt: skip
        folder = tmp_path / "node"
        folder.mkdir(mode=0o750)
        environ = {**case.settings, "MSD__DAEMON__STATE_DIR": str(folder / "state")}
        case.begin()
        predicted, said = predict(job, case, environ)
        assert predicted == case.expected, said
        node = stack.enter_context(running_node(folder, environ=case.settings))
        seen, told = what_happens(node, job, case)
        assert seen == predicted, f"{told}\n{said}\n{node.log[-4000:]}"


def predict(job: Path, case: Case, environ: Mapping[str, str]) -> tuple[tuple[bool, str, str], str]:
    """Return the verdict of `msdctl plan resources`, and all that it said."""
    done = subprocess.run(
        [
            sys.executable, "-m", "msd_client.msdctl.main", "plan", "resources", str(job),
            "--step-time", str(case.step_s), *case.options, "--json",
        ],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    return (verdict["waits"], verdict["source"] or "", verdict["stage"] or ""), done.stdout


def what_happens(node: Node, job: Path, case: Case) -> tuple[tuple[bool, str, str], Any]:
    """Return whether a rank waits, for what, at which stage; and figures."""
    waits: list[tuple[float, float]] = []
    """Time of each step's arrival, and how long was waited for it."""
    is_over, pause = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            with node.connect(str(job), {"dp": 1}, 0) as data:
                for step in data.train:
                    for batch in step:
                        del batch
                    waits.append((time.monotonic(), step.stats["wait_s"]))
                    if is_over.is_set():
                        return
                    pause.wait(case.step_s)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    awaited: Counter[str] = Counter()
    page: list[dict[str, Any]] = []
    end = None
    while thread.is_alive() and (end is None or time.monotonic() < end):
        if waits and end is None:
            end = time.monotonic() + RUN_S
        if waits:
            page = node.request("sources", job="job")["sources"]
            awaited.update(it["name"] for it in page if it["live"]["is_awaited"])
        pause.wait(0.05)
    is_over.set()
    thread.join(60)
    if errors:
        assert isinstance(errors[0], BudgetError), errors[0]
        return (True, "", "memory"), errors[0]
    middle = waits[0][0] + RUN_S / 2
    later = [wait for at, wait in waits if at >= middle]
    share = sum(later) / (waits[-1][0] - middle) if later else 1.0
    told = (share, awaited, [it["live"] for it in page])
    if share < WAITS_SHARE:
        return (False, "", ""), told
    ((name, _),) = awaited.most_common(1)
    live = next(it["live"] for it in page if it["name"] == name)
    spent = {"read": live["read_wait_s"], "transform": live["user_s"], "decode": live["cpu_s"]}
    return (True, name, max(spent, key=lambda stage: spent[stage])), told
