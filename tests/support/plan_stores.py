"""Both kinds of store, for tests that hold for each, and a leader in a process of its own."""

from __future__ import annotations

import itertools
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

from federation.journal import StepRecord
from federation.journal_place import JournalPlace, LocalPlace
from federation.store.open_store import open_store
from federation.store.plan_store import PlanStore
from tests.support.etcd import EtcdCluster

LEASE_S = 2.0
KINDS = ("sqlite", "etcd")
T = TypeVar("T")

_LEADER = """
import sys
from pathlib import Path
from tests.support.plan_stores import append_for_ever
append_for_ever(sys.argv[1], Path(sys.argv[2]))
"""


class Stores:
    """Opens one store as several planners do."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url = url
        self._folder = folder
        self._stack = stack
        self._numbers = itertools.count()

    def open(self) -> PlanStore:
        """Return another planner's way to the store."""
        store = open_store(self.url, self.cache(), lease_s=LEASE_S)
        self._stack.callback(store.close)
        return store

    def cache(self) -> Path:
        return self._folder / f"cache-{next(self._numbers)}"

    def leader_process(self) -> LeaderProcess:
        """Return a planner of its own process that leads and appends steps."""
        process = LeaderProcess(self.url, self.cache())
        self._stack.callback(process.close)
        return process


class KnownPlace(NamedTuple):
    """A job's journal, and the file that it, or a copy of it, is in."""

    place: JournalPlace
    path: Path


class Places:
    """Gives journals of a kind, all empty: `file` as a daemon's own planner has, or a store's."""

    def __init__(self, kind: str, cluster: EtcdCluster | None, stack: ExitStack) -> None:
        self.kind = kind
        self._cluster = cluster
        self._stack = stack

    def make(self, folder: Path) -> KnownPlace:
        """Return the place of a journal that belongs to a folder and nothing else."""
        if self.kind == "file":
            path = folder / "journal.db"
            return KnownPlace(LocalPlace(path), path)
        if self.kind == "sqlite":
            store = open_store(f"sqlite://{folder}/plan.db", folder, lease_s=60)
        else:
            assert self._cluster is not None
            store = open_store(self._cluster.url(f"p{uuid4().hex}"), folder, lease_s=60)
        self._stack.callback(store.close)
        lead(store)
        return KnownPlace(store.journal("job"), folder / "jobs" / "job" / "journal.db")


def tables_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of a journal's file, by table."""
    with closing(sqlite3.connect(path)) as db:
        names = [
            name
            for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if not name.startswith("sqlite_")
        ]
        return {name: sorted(db.execute(f"SELECT * FROM {name}").fetchall()) for name in names}


@contextmanager
def stores(kind: str, folder: Path, cluster: EtcdCluster | None) -> Iterator[Stores]:
    """Give an empty store of a kind."""
    with ExitStack() as stack:
        if kind == "sqlite":
            url = f"sqlite://{folder}/plan.db"
        else:
            assert cluster is not None
            url = cluster.url(folder.name.replace("[", "_").replace("]", "_"))
        yield Stores(url, folder, stack)


def record(step: int, delta: bytes = b"d") -> StepRecord:
    return StepRecord(step, delta, f"{step:032x}")


def lead(store: PlanStore, name: str = "test") -> int:
    """Campaign until the store lets this planner lead."""
    return wait_for(lambda: store.campaign(name, "tcp://127.0.0.1:1"))


def wait_for(ask: Callable[[], T | None]) -> T:
    """Ask until there is an answer; the test's time-out bounds it."""
    while True:
        found = ask()
        if found is not None:
            return found


class LeaderProcess:
    """Leads and appends one step after the other, saying which are durable."""

    def __init__(self, url: str, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LEADER, url, str(cache)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self.said: list[str] = []

    def hear(self, count: int) -> None:
        """Wait until it said some more lines."""
        assert self._process.stdout is not None
        for _ in range(count):
            line = self._process.stdout.readline()
            assert line, self.said
            self.said.append(line.strip())

    def hear_end(self) -> None:
        """Take all that it says until it ends."""
        assert self._process.stdout is not None
        self.said += [line.strip() for line in self._process.stdout]
        self._process.wait()

    def steps(self) -> list[int]:
        """Return the steps that it said are durable."""
        return [int(line) for line in self.said if line.isdigit()]

    def kill(self) -> None:
        self._process.kill()
        self.hear_end()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def append_for_ever(url: str, cache: Path) -> None:
    """Lead, and append steps until the term is over; the main of `LeaderProcess`."""
    from federation.store.leadership import Leadership
    from msd_client.contract.errors import LeadershipLostError

    store = open_store(url, cache, lease_s=LEASE_S)
    leadership = Leadership(store, "appender", "tcp://127.0.0.1:2")
    term = wait_for(leadership.campaign)
    print(f"leads {term}", flush=True)
    try:
        journal = store.journal("job").open_or_begin(1000)
        generation = journal.open_generation(0, b"zero")
        store.put("jobs", "job", str(generation).encode())
        step = 0
        while True:
            if leadership.look():
                journal.append_steps(generation, term, [record(step)], None)
                print(step, flush=True)
                step += 1
    except LeadershipLostError as error:
        print(f"lost: {error.message}", flush=True)
    leadership.close()
