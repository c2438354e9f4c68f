"""Why a source does not come fast enough. Pure.

What its loader workers were at in the window (their marks), and how much CPU they had, tells reading
from transforming; deaths, the pool, the store's own word and the mixture go before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msd_daemon.core.looks import JobLook, SourceLook, WorkerLook
from msd_daemon.core.verdict_texts import listed, seconds, window_of

RECORD_NS = 2_000_000_000
"""A worker that is at one record for so long is told of with the record."""
WINDOW_NS = 10_000_000_000
"""A run of records that are handled at once may take longer than one."""
THROTTLED_S = 30.0
"""A store that asked for fewer requests within so many seconds is believed to be why."""
SHIFTED_NS = 300_000_000_000
"""A source whose share grew within so long is slow for that."""
MEASURED_RATIO = 0.2
"""Chunks that came in a window tell how its time divides where they took so much of it."""
BUSY_RATIO = 0.5
"""Of a worker's time on a CPU, or waiting for one: above it, it computes."""


@dataclass(frozen=True)
class Cause:
    """Why one source is slow."""

    cause: str
    stage: str
    what: str
    """Behind `source X: `."""
    evidence: tuple[str, ...]
    command: str
    since_ns: int = 0


@dataclass(frozen=True)
class _Work:
    """What the loader workers of a source did in a window."""

    busy_ratio: float
    """On a CPU or in its queue, of the busiest."""
    queued_ratio: float
    """Of that, in the queue."""
    reading: float
    computing: float
    user_code: float
    idle: float
    """Parts of the looks in which they were at that."""
    measured: tuple[float, float, float] | None = None
    """Parts of their time by the chunks' own word: CPU, the job's code, disk or network."""

    @property
    def evidence(self) -> str:
        """For people."""
        if self.measured is not None:
            cpu, user, wait = (100 * part for part in self.measured)
            return (
                f"its chunks of this time took {cpu:.0f} % CPU, {user:.0f} % the job's own code, "
                f"{wait:.0f} % waiting for disk or network"
            )
        parts = [f"{100 * self.busy_ratio:.0f} % on a CPU or waiting for one"]
        for value, name in (
            (self.reading, "reading"),
            (self.computing, "decoding and tokenizing"),
            (self.user_code, "in the user's code"),
            (self.idle, "without an order"),
        ):
            if value >= 0.1:
                parts.append(f"{100 * value:.0f} % {name}")
        return "its busiest loader worker: " + ", ".join(parts)


def source_cause(looks: Sequence[JobLook], source: SourceLook) -> Cause:
    """Return why a source is waited for.

    Args:
        looks: The newest last.
        source: As the newest has it.
    """
    now = looks[-1]
    workers = [w for w in now.workers if w.role == "loader" and w.number in source.workers]
    found = _bad_record(looks, source, workers) or _worker(looks, workers) or _memory(looks, source)
    if found is not None:
        return found
    found = _rate(looks, source)
    is_new = source.shifted_ns and now.at_ns - source.shifted_ns < SHIFTED_NS
    if is_new and found.cause != "store_throttled":
        found = replace(
            found,
            cause="mixture_changed",
            what=(
                f"its share grew from {100 * source.shifted_from:.0f} to "
                f"{100 * source.wanted:.0f} %, and it can't keep up ({found.what})"
            ),
            evidence=(
                f"the mixture changed {seconds(now.at_ns - source.shifted_ns)} ago",
                *found.evidence,
            ),
            command=f"msdctl sources {now.job}, or give it less: msdctl mixture {now.job}",
        )
    return found


def _bad_record(
    looks: Sequence[JobLook], source: SourceLook, workers: Sequence[WorkerLook]
) -> Cause | None:
    now, first = looks[-1], looks[0]
    name, text = now.last_quarantine
    if now.quarantined > first.quarantined and name == source.name:
        return Cause(
            "bad_record", "record", "a record ended its loader worker and is out of the way now",
            (text, f"{now.quarantined} records are in quarantine",
             (f"{now.worker_deaths - first.worker_deaths} workers were replaced in the last "
             f"{seconds(now.at_ns - first.at_ns)}")),
            f"msdctl bad {now.job}",
        )  # fmt: skip
    for worker in workers:
        long = now.at_ns - worker.since_ns if worker.since_ns else 0
        limit_ns = {"record": RECORD_NS, "window": WINDOW_NS}.get(worker.activity)
        is_long = limit_ns is not None and long >= limit_ns and worker.source == source.name
        if is_long and worker.process.state not in ("T", "t"):
            return Cause(
                    "bad_record", "record",
                    f"its loader worker has been at one place for {seconds(long)}",
                    (f"record {worker.place} of {worker.shard}", (f"pid {worker.process.pid}, state "
                     f"{worker.process.state}; limits.sample_s ends it")),
                    f"msdctl bad {now.job}", since_ns=worker.since_ns,
                )  # fmt: skip
    return None


def _worker(looks: Sequence[JobLook], workers: Sequence[WorkerLook]) -> Cause | None:
    now, first = looks[-1], looks[0]
    for worker in workers:
        if worker.process.state in ("T", "t"):
            return Cause(
                "worker_stuck", "worker",
                f"its loader worker {worker.number} is stopped by a signal or a debugger",
                ((f"pid {worker.process.pid} is in state {worker.process.state}; it is replaced "
                 "after daemon.late_s"),),
                f"kill -CONT {worker.process.pid}",
            )  # fmt: skip
    deaths = now.worker_deaths - first.worker_deaths
    if deaths > 0:
        return Cause(
            "worker_lost", "worker", f"its loader workers ended {deaths} times, and are replaced",
            tuple(filter(None, (now.last_death,))),
            "msdctl doctor, then the daemon's log: out of memory?",
        )  # fmt: skip
    return None


def _memory(looks: Sequence[JobLook], source: SourceLook) -> Cause | None:
    """Find workers that grow until they are replaced, or a pool without room for what comes next."""
    now = looks[-1]
    recycled = now.recycled - looks[0].recycled
    if recycled > 0:
        return Cause(
            "memory_full", "worker",
            "its loader workers grow beyond workers.memory_bytes and are replaced",
            ((f"{recycled} were replaced for their size in the last "
             f"{seconds(now.at_ns - looks[0].at_ns)}"),),
            "raise workers.memory_bytes in daemon.toml, or find what in its reader or code keeps memory",
        )  # fmt: skip
    window = _window(looks)
    refused = sum(look.pool_refused for look in window) / len(window)
    work = _work(looks, source)
    is_blocked = source.is_starved and not source.is_granted and now.pool_refused
    if not is_blocked and (refused < BUSY_RATIO or work.idle < BUSY_RATIO):
        return None
    mib = 1 << 20
    used = now.pool_bytes - now.pool_free_bytes
    return Cause(
        "memory_full", "pool", "the pool has no room for what it would read next",
        ((f"{used / mib:.0f} of {now.pool_bytes / mib:.0f} MiB are in use; room was refused at "
         f"{100 * refused:.0f} % of the looks"), work.evidence),
        "raise memory.pool_bytes (and memory.memory_bytes) in daemon.toml",
    )  # fmt: skip


def _rate(looks: Sequence[JobLook], source: SourceLook) -> Cause:
    """Tell a store from a disk from a CPU."""
    now = looks[-1]
    work = _work(looks, source)
    store = next((store for store in now.stores if store.host == source.host), None)
    if store is not None and source.host:
        ago_s = store.throttled_since_s
        if store.is_closed or (ago_s is not None and ago_s <= THROTTLED_S):
            return Cause(
                "store_throttled", "store", f"{source.host} asks for fewer requests",
                (f"throttled {0 if ago_s is None else ago_s:.0f} s ago; {store.slots} of "
                 f"{store.slots_max} requests may be open" + (", none now" if store.is_closed else ""),
                 work.evidence),
                "ask the store's owner for a higher rate, or set stores.cache_dir in daemon.toml",
            )  # fmt: skip
    kind = _kind(work)
    if kind == "user code":
        return Cause(
            "user_code", "transform", "the job's own code takes its time", (work.evidence,),
            f"msdctl sources {now.job}; profile the function that the job names",
        )  # fmt: skip
    if kind == "reading" and source.host:
        return Cause(
            "store_slow", "store", f"{source.host} answers slowly", (work.evidence,),
            "give it more requests at once: stores.requests_per_host in daemon.toml",
        )  # fmt: skip
    if kind == "reading":
        return Cause(
            "disk_slow", "read", "its files come slowly from their disk", (work.evidence,),
            "iostat -x 1; copy the source to a faster disk, or give it less of the mixture",
        )  # fmt: skip
    hosts = listed([str(number) for number in source.workers])
    queued = (
        f"; {100 * work.queued_ratio:.0f} % of that waiting for one of {now.cpus:g} CPUs"
        if work.queued_ratio >= 0.2
        else ""
    )
    return Cause(
        "cpu_bound", "transform", "decoding and tokenizing take all the CPU that it has",
        (work.evidence + queued, f"loader workers that read it: {hosts or 'none'}"),
        f"msdctl plan resources, then more workers: msdctl scale {source.name} N",
    )  # fmt: skip


# -- what workers did ------------------------------------------------------------------------------


def _window(looks: Sequence[JobLook]) -> Sequence[JobLook]:
    first, _ = window_of(looks)
    return [look for look in looks if look.at_ns >= first.at_ns]


def _work(looks: Sequence[JobLook], source: SourceLook) -> _Work:
    """Return what the workers of a source did in the window."""
    window = _window(looks)
    now, first, span_ns = window[-1], window[0], window[-1].at_ns - window[0].at_ns
    counts = {"reading": 0, "record": 0, "window": 0, "user code": 0, "": 0}
    total = 0
    for look in window:
        for worker in look.workers:
            if worker.role != "loader" or worker.number not in source.workers:
                continue
            activity = worker.activity if worker.source == source.name else ""
            if not worker.activity and worker.is_busy:
                activity = _unmarked(worker)
            counts[activity] = counts.get(activity, 0) + 1
            total += 1
    total = max(total, 1)
    busy, queued = _busiest(now, first, span_ns, source)
    return _Work(
        busy_ratio=busy,
        queued_ratio=queued / busy if busy else 0.0,
        reading=counts["reading"] / total,
        computing=(counts["record"] + counts["window"]) / total,
        user_code=counts["user code"] / total,
        idle=counts[""] / total,
        measured=_measured(now, first, source),
    )


def _measured(
    now: JobLook, first: JobLook, source: SourceLook
) -> tuple[float, float, float] | None:
    """Return how the time of the chunks that came in a window divides; None where they say too little."""
    new = next((it for it in now.sources if it.name == source.name), None)
    old = next((it for it in first.sources if it.name == source.name), None)
    if new is None or old is None:
        return None
    parts = (new.cpu_ns - old.cpu_ns, new.user_ns - old.user_ns, new.wait_ns - old.wait_ns)
    total = sum(parts)
    if total <= 0 or min(parts) < 0 or total < MEASURED_RATIO * (now.at_ns - first.at_ns):
        return None
    return (parts[0] / total, parts[1] / total, parts[2] / total)


def _kind(work: _Work) -> str:
    """Return what takes the time of a source's workers: reading, user code or computing."""
    if work.measured is not None:
        parts = dict(zip(("computing", "user code", "reading"), work.measured, strict=True))
        return max(parts, key=lambda name: parts[name])
    if work.user_code > max(work.reading, work.computing):
        return "user code"
    is_reading = work.reading >= max(work.computing, work.user_code) or not work.computing
    return "reading" if work.busy_ratio < BUSY_RATIO and is_reading else "computing"


def _unmarked(worker: WorkerLook) -> str:
    """Return what a worker is at that has an order and marks nothing."""
    return "window" if worker.process.state == "R" else "reading"


def _busiest(now: JobLook, first: JobLook, span_ns: int, source: SourceLook) -> tuple[float, float]:
    """Return which part of its time the busiest worker of a source had or wanted a CPU, and wanted."""
    was = {worker.process.pid: worker.process for worker in first.workers}
    found = (0.0, 0.0)
    for worker in now.workers:
        before = was.get(worker.process.pid)
        if worker.role != "loader" or worker.number not in source.workers or before is None:
            continue
        queued_ns = worker.process.queued_ns - before.queued_ns
        busy_ns = worker.process.cpu_ns - before.cpu_ns + queued_ns
        ratio = busy_ns / max(span_ns, 1)
        if ratio > found[0]:
            found = (ratio, queued_ns / max(span_ns, 1))
    return found


def busy_ratios(now: JobLook, first: JobLook) -> dict[str, float]:
    """Return, by role, which part of a window the busiest process had a CPU, or wanted one."""
    span_ns = max(now.at_ns - first.at_ns, 1)
    was = {worker.process.pid: worker.process for worker in first.workers}
    pairs = [
        (worker.role, was[worker.process.pid], worker.process)
        for worker in now.workers
        if worker.process.pid in was
    ]
    old, new = first.planner.process, now.planner.process
    if old is not None and new is not None and old.pid == new.pid:
        pairs.append(("planner", old, new))
    found: dict[str, float] = {}
    for role, before, after in pairs:
        busy_ns = after.cpu_ns - before.cpu_ns + after.queued_ns - before.queued_ns
        found[role] = max(found.get(role, 0.0), busy_ns / span_ns)
    return found
