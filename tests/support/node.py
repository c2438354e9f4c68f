"""A real daemon for a test, and ranks that read from it: as threads for speed, each with its own
connection, or as processes where that is the point."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import msd_client
from msd_client.contract.errors import DaemonUnavailableError, DeadlineError
from msd_client.control import request
from msd_client.joined_job import Data
from msd_client.step import Step
from tests.support.shm_names import expect_no_names_left, shm_names
from tests.support.sources import ROOT

SEGMENT_NAMES = ("/dev/shm/msd-", "/memfd:msd:")
NO_GRACE = {"MSD__DEADLINES__RESTART_GRACE_S": "0"}
"""Jobs end with their last rank, unless a test says otherwise."""
AT_REST = (
    ["msd-fork_server"],
    ["msd-fork_server", "msd-planner"],
    ["msd-exchange", "msd-fork_server"],
)
DEADLINES = {"first_batch_s": 60.0, "next_batch_s": 30.0, "join_s": 40.0}


@dataclass
class Node:
    """A running daemon of the test's own."""

    process: subprocess.Popen[bytes]
    socket: Path
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "daemon.log").read_text(errors="replace")

    def request(self, verb: str, **fields: Any) -> dict[str, Any]:
        return request(self.socket, {"verb": verb, **fields})

    def is_answering(self) -> bool:
        """True where this very daemon answers, not one that left its socket behind."""
        try:
            return bool(self.request("ping")["pid"] == self.process.pid)
        except (DaemonUnavailableError, DeadlineError):
            return False

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def fork_server(self) -> psutil.Process:
        """Return the daemon's own, without which it ends."""
        (pid,) = (
            row["pid"]
            for row in self.request("status")["daemon"]["processes"]
            if row["role"] == "fork_server"
        )
        return psutil.Process(pid)

    def child(self, name: str) -> psutil.Process:
        """Return a living child by process name, like `msd-loader`; wait where it is replaced now."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            for child in self.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child)
                        return True
            return False

        wait_until(is_there, f"a child {name}")
        return found[0]

    def descriptors(self) -> int:
        """Return how many files the daemon has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def open_files(self) -> list[str]:
        """Return what these files are, for messages."""
        found = []
        for name in os.listdir(f"/proc/{self.process.pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(f"{name}: {os.readlink(f'/proc/{self.process.pid}/fd/{name}')}")
        return sorted(found, key=lambda it: int(it.partition(":")[0]))

    def is_at_rest(self) -> bool:
        """True where no job is left: no worker of one, no segment."""
        if self.request("jobs")["jobs"]:
            return False
        try:
            children = [child for child in self.children() if not is_over(child)]
            if sorted(child.name() for child in children) not in AT_REST:
                return False
        except psutil.NoSuchProcess:
            return False  # one is leaving just now
        return not segments_of([self.process.pid, *(child.pid for child in children)])

    def holdings(self) -> str:
        """Return what the daemon and its children hold now, for messages."""
        pids = {child.pid: child.name() for child in self.children() if not is_over(child)}
        jobs = self.request("jobs")["jobs"]
        held = segments_of([self.process.pid, *pids])
        return f"jobs {jobs}, children {pids}, segments {held}, files {self.open_files()}"

    def connect(self, job: Any, mesh: Mapping[str, int], rank: int, **options: Any) -> Data:
        options = {"as_": "numpy", "deadlines": DEADLINES, **options}
        return msd_client.connect(job, mesh=mesh, rank=rank, daemon=self.socket, **options)


@contextlib.contextmanager
def running_node(
    folder: Path,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> Iterator[Node]:
    """Start a daemon in `folder`; at the end stop it and see that it leaves nothing behind.

    `prefix` is a command that executes the daemon's in its own place, like unshare.
    """
    folder.mkdir(mode=0o750, exist_ok=True)
    before = shm_names()
    with (folder / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *prefix, sys.executable, "-m", "msd_daemon", "--socket", str(folder / "d.sock"),
                "--runtime-dir", str(folder), "--state-dir", str(folder / "state"), *arguments,
            ],
            cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **NO_GRACE, **(environ or {})},
        )  # fmt: skip
    node = Node(process, folder / "d.sock", folder)
    try:
        wait_until(lambda: node.is_answering() or process.poll() is not None, "the daemon")
        assert process.poll() is None, node.log
        yield node
    finally:
        children = [] if process.poll() is not None else node.children()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise
        wait_until(lambda: all(map(is_over, children)), f"{children} to end", 10)
        expect_no_names_left(before)


def is_over(process: psutil.Process) -> bool:
    """True where a process ended; one whose adoptive parent has yet to reap it counts."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def segments_of(pids: Iterable[int]) -> dict[tuple[int, int], str]:
    """Return the segments of msd that processes hold, mapped or open: (device, inode) to name."""
    found: dict[tuple[int, int], str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line[73:].strip()
                if name.startswith(SEGMENT_NAMES):
                    major, minor = line.split()[3].split(":")
                    device = os.makedev(int(major, 16), int(minor, 16))
                    found[device, int(line.split()[4])] = name
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(entry.path)
                    if name.startswith(SEGMENT_NAMES):
                        facts = os.stat(entry.path)
                        found[facts.st_dev, facts.st_ino] = name
    return found


def own_segments() -> set[tuple[int, int]]:
    """Return the segments of msd that this process holds: a test before may have left some."""
    gc.collect()
    return set(segments_of([os.getpid()]))


def wait_until(
    is_done: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 20.0
) -> None:
    """Wait for a condition; `what` says what is missing."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited {timeout_s} s for {what if isinstance(what, str) else what()}"
            )
        time.sleep(0.01)


@dataclass
class RankRecord:
    """What one rank was given, copied out."""

    steps: list[int] = field(default_factory=list)
    rows: dict[int, list[bytes]] = field(default_factory=dict)
    """By step: tokens of each row."""
    labels: dict[int, list[bytes]] = field(default_factory=dict)
    valid_tokens: dict[int, int] = field(default_factory=dict)
    states: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """By number of completed steps."""
    stats: list[dict[str, Any]] = field(default_factory=list)
    filled: int = 0
    cells: int = 0


OnStep = Callable[[Data, Step, RankRecord], None]
ReadStep = Callable[[Data, Step], None]


def run_ranks(
    node: Node,
    job: Any,
    mesh: Mapping[str, int],
    steps: int | None,
    *,
    state: dict[str, bytes] | None = None,
    keep_states: bool = False,
    on_step: OnStep | None = None,
    read_step: ReadStep | None = None,
    at_end: Callable[[Data], None] | None = None,
    wait_s: float = 120,
    **options: Any,
) -> list[RankRecord]:
    """Let every rank of a mesh read `steps` steps (None: to the end); return what each got.

    `read_step` reads steps in its own way; the records are then empty. `at_end` runs before a rank
    leaves.

    Raises:
        BaseException: The first error of a rank.
    """
    count = int(np.prod(list(mesh.values()), dtype=np.int64))
    records = [RankRecord() for _ in range(count)]
    errors: list[BaseException] = []

    def read(rank: int) -> None:
        try:
            with node.connect(job, mesh, rank, **options) as data:
                if state is not None:
                    data.train.load_state_dict(state)
                if read_step is not None:
                    for step in itertools.islice(data.train, steps):
                        read_step(data, step)
                else:
                    read_steps(data, records[rank], steps, keep_states=keep_states, on_step=on_step)
                if at_end is not None:
                    at_end(data)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(wait_s)
        assert not thread.is_alive(), node.log
    if errors:
        errors[0].add_note(node.log[-12000:])
        raise errors[0]
    return records


def read_steps(
    data: Data, record: RankRecord, steps: int | None, *, keep_states: bool, on_step: OnStep | None
) -> None:
    for step in data.train:
        rows, labels = [], []
        for batch in step:
            tokens = np.asarray(batch.tokens)
            rows += [row.tobytes() for row in tokens]
            labels += [row.tobytes() for row in np.asarray(batch.labels)]
            record.filled += tokens.size - padding_of(batch)
            record.cells += tokens.size
            del batch, tokens
        record.steps.append(step.number)
        record.rows[step.number] = rows
        record.labels[step.number] = labels
        record.valid_tokens[step.number] = step.valid_tokens
        record.stats.append(step.stats)
        if keep_states:
            record.states[step.number + 1] = data.train.state_dict()
        if on_step is not None:
            on_step(data, step, record)
        if steps is not None and len(record.steps) >= steps:
            return


def padding_of(batch: Any) -> int:
    """Return the padding tokens of a batch."""
    lengths = np.diff(np.asarray(batch.cu_seqlens))
    return int(lengths[np.asarray(batch.segment_source) < 0].sum())


def global_rows(records: list[RankRecord], groups: list[int]) -> dict[int, list[bytes]]:
    """Return each step's rows as a sorted multiset over DP groups; peers of a group must agree."""
    steps: dict[int, list[bytes]] = {}
    for number in records[0].steps:
        by_group: dict[int, list[bytes]] = {}
        for record, group in zip(records, groups, strict=True):
            rows = record.rows[number]
            assert by_group.setdefault(group, rows) == rows, f"peers of group {group} differ"
        steps[number] = sorted(row for rows in by_group.values() for row in rows)
    return steps


def write_job(path: Path, job: Mapping[str, Any]) -> Path:
    """Write a job file (JSON is YAML)."""
    path.write_text(json.dumps(job))
    return path


def write_texts(
    folder: Path, *, sources: int = 3, documents: int = 300, seed: int = 5
) -> dict[str, str]:
    """Write small text sources of several formats; return name to path."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    made: dict[str, str] = {}
    for number in range(sources):
        texts = [
            f"<{number}:{doc}>"
            + "abcdefghij" * int(rng.integers(0, 40))
            + "." * int(rng.integers(0, 9))
            for doc in range(documents)
        ]
        lines = "".join(
            json.dumps({"id": f"{number}-{n}", "text": text}) + "\n" for n, text in enumerate(texts)
        )
        kind = number % 4
        name = f"s{number}"
        if kind == 0:
            path = folder / f"{name}.jsonl"
            path.write_text(lines)
        elif kind == 1:
            path = folder / f"{name}.jsonl.zst"
            path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
        elif kind == 2:
            path = folder / f"{name}.parquet"
            ids = [f"{number}-{n}" for n in range(documents)]
            pq.write_table(pa.table({"id": ids, "text": texts}), path, row_group_size=64)
        else:
            path = folder / f"{name}.jsonl.gz"
            path.write_bytes(gzip.compress(lines.encode()))
        made[name] = str(path)
    return made


def text_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a small job over `write_texts` with the bytes tokenizer."""
    files = write_texts(folder / "texts", **changes.pop("texts", {}))
    job: dict[str, Any] = {
        "schema": 1,
        "name": "small",
        "seed": 3,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 16, "row_tokens": 256, "microbatch_rows": 2},
        "sources": files,
        "mixture": {"unit": "tokens", 0: {name: number + 1 for number, name in enumerate(files)}},
    }
    batch = changes.pop("batch", {})
    job.update(changes)
    job["batch"] = {**job["batch"], **batch}
    return job
