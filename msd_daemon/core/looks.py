"""What is seen of a job at one moment: what the rules of core/verdict.py judge. Pure data.

Times are nanoseconds of the node's monotonic clock. CPU and waits are totals since a process began,
so that two looks give what happened between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """A process, as the kernel accounts for it."""

    pid: int
    """0 where it is in another pid namespace."""
    state: str = "S"
    """Of /proc/pid/stat: R, S, D, T, t, Z; empty where it is gone."""
    cpu_ns: int = 0
    """It ran so long, its children that ended included."""
    queued_ns: int = 0
    """It could have run, and no CPU was free."""


@dataclass(frozen=True, slots=True)
class WorkerLook:
    """A loader worker, a constructor, or what stands by."""

    role: str
    number: int
    process: ProcessLook
    is_busy: bool = False
    """It has something to do that it has not answered."""
    activity: str = ""
    """What a loader worker is at: `record`, `window`, `user code`, `reading`; empty: nothing."""
    source: str = ""
    """Of that."""
    shard: str = ""
    place: int = -1
    """Number of the record in the shard, -1 where none is known."""
    since_ns: int = 0
    """Since when it is at it."""


@dataclass(frozen=True, slots=True)
class RankLook:
    """A rank of the job on this node."""

    rank: int
    ring: int
    process: ProcessLook
    batches: int = 0
    """That it gave back, in this generation."""
    waited_ns: int = 0
    """That it waited for those, but for the first."""
    interval_ns: int = 0
    """From one that it gives back to the next, lately; 0 where that is not known yet."""
    released_ns: int = 0
    """When it gave one back last; 0: never."""
    waiting_since_ns: int = 0
    """It waits for its next batch since; 0 where it is not known to."""


@dataclass(frozen=True, slots=True)
class RingLook:
    """A ring of slots."""

    ring: int
    dp_group: int
    slots: int
    free: int
    filling: int
    published: int
    """Slots that readers have not all given back."""
    published_total: int
    readers: tuple[int, ...]
    """Ranks that read it, and have begun to."""
    debtor: int | None = None
    """Who gives the oldest of them back last."""
    debtor_since_ns: int = 0
    """When that slot was published."""
    is_behind_others: bool = False
    """Others gave that slot back already."""
    idle_readers: tuple[int, ...] = ()
    """Ranks that are to read it, and have not begun to."""
    published_ns: int = 0
    """When its last slot was published; 0: none was."""

    @property
    def is_full(self) -> bool:
        """No slot is free, nor being filled."""
        return not self.free and not self.filling


@dataclass(frozen=True, slots=True)
class SourceLook:
    """A source on this node."""

    name: str
    wanted: float = 0.0
    """Its share in the last plan."""
    shifted_from: float = 0.0
    """Its share before it grew much, where it did of late."""
    shifted_ns: int = 0
    """When it did; 0: it did not."""
    workers: tuple[int, ...] = ()
    """Loader workers that read it; empty where other nodes do, or nobody."""
    is_granted: bool = False
    """A worker was told to read its next chunk, and has room for that."""
    is_starved: bool = False
    """The draw, or a planned step, waits for its next records now."""
    starved_ns: int = 0
    """It was waited for so long, in this generation."""
    host: str = ""
    """Of the object store that it lies on; empty: files."""
    cpu_ns: int = 0
    user_ns: int = 0
    wait_ns: int = 0
    """What its chunks took so far, as they tell themselves: CPU, the job's own code, disk or network."""


@dataclass(frozen=True, slots=True)
class StoreLook:
    """What is known of the requests to the host of an object store."""

    host: str
    throttled_since_s: float | None = None
    """Seconds since it last asked for fewer requests; None: it did not."""
    is_closed: bool = False
    """No request may leave now: it said when to come again."""
    slots: int = 0
    slots_max: int = 0
    """Requests that may be open at once, now and at most."""


@dataclass(frozen=True, slots=True)
class PlannerLook:
    """The planner of this node, or the link to the cluster's."""

    process: ProcessLook | None
    """None where it is another node's, or there is none."""
    is_there: bool = True
    silence: str = ""
    """Why none is there."""
    since_ns: int = 0
    """Since when none is there, or it is stopped."""
    place: str = ""
    """Where the cluster's planner is, or all of them are; empty: it is this node's own."""


@dataclass(frozen=True, slots=True)
class PeerLook:
    """Another node, as the exchange sees it."""

    node: str
    is_up: bool = True
    reason: str = ""
    awaited: int = 0
    """Parcels that are wanted of it."""
    awaited_since_ns: int = 0
    """Since when the oldest of them is."""


@dataclass(frozen=True, slots=True)
class JobLook:
    """A job on this node at one moment."""

    at_ns: int
    job: str
    node: str
    state: str
    """Of the session: joining, starting, running, waiting for ranks, failed, stopped, closed."""
    waiting_for_ranks: tuple[int, ...] = ()
    error: str = ""
    """Why it failed."""
    is_stopped: bool = False
    """An operator ended it, here or on another node."""
    generation: int = 0
    is_ended: bool = False
    """Its stream is over."""
    begun_ns: int = 0
    """When the generation began."""
    steps_planned: int = 0
    step_released: int = 0
    sequences: int = 0
    """Slots that the plans that came will fill, a ring."""
    horizon_steps: int = 0
    """So many steps are planned ahead at most."""
    journal_stalled: str = ""
    rings: tuple[RingLook, ...] = ()
    ranks: tuple[RankLook, ...] = ()
    workers: tuple[WorkerLook, ...] = ()
    sources: tuple[SourceLook, ...] = ()
    stores: tuple[StoreLook, ...] = ()
    planner: PlannerLook = field(default_factory=lambda: PlannerLook(None))
    peers: tuple[PeerLook, ...] = ()
    other_nodes: int = 0
    """That take part in the generation."""
    pool_bytes: int = 0
    pool_free_bytes: int = 0
    pool_refused: bool = False
    """A source got no room for its next chunk."""
    worker_deaths: int = 0
    """Loader workers that were replaced so far."""
    last_death: str = ""
    """What is said of the last one."""
    recycled: int = 0
    """Loader workers that were replaced for their size so far."""
    quarantined: int = 0
    """Records put into quarantine so far."""
    last_quarantine: tuple[str, str] = ("", "")
    """Source, and what is said of the record that was put there last."""
    cpus: float = 1.0
    """CPUs that this node's processes may use."""

    @property
    def has_readers(self) -> bool:
        """True where ranks of this node read, or are to."""
        return any(ring.readers or ring.idle_readers for ring in self.rings)
