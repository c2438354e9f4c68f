"""The profiles of a job's sources on this node: loaded before it starts, kept from what its loaders tell.

Files are read and written in threads. Sources that the schedule draws from later and that were never
measured are probed once by a process of low priority, so that their loaders can be there in time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from federation.model.job import ResolvedJob
from federation.model.source_profile import (
    RECORDS_TRUSTED,
    SourceProfile,
    profile_fingerprint,
)
from federation.planning.resource_table import Budgets
from msd_client.contract.state import StreamState
from msd_client.machine_memory import usable_memory_bytes
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.loader_costs import LoaderCosts, ReadCost
from msd_daemon.core.pace_watch import PaceWatch
from msd_daemon.core.resource_needs import shares_of_state, weighted_sources
from msd_daemon.core.start_table import StartTable, start_table
from msd_daemon.services.source_probe import SourceProbe
from msd_daemon.sources.profile_store import ProfileStore

log = logging.getLogger(__name__)

SAVE_NS = 60 * 1_000_000_000
WORKERS_KEY = "workers.loader_workers"


class ProfileKeeper:
    """Of one job.

    Args:
        job: The resolved job.
        mesh: Returns that of its ranks: axes in order, with sizes.
        config: The daemon's.
        costs: What its loaders tell; what was known before is put in.
    """

    def __init__(
        self,
        job: ResolvedJob,
        mesh: Callable[[], Sequence[tuple[str, int]]],
        config: DaemonConfig,
        costs: LoaderCosts,
    ) -> None:
        self._job = job
        self._mesh = mesh
        self._config = config
        self._costs = costs
        self._store = ProfileStore(Path(config.state_dir))
        self._fingerprints: list[str] = []
        self._known: list[SourceProfile | None] = []
        self._saved: dict[int, tuple[int, int, ReadCost]] = {}
        self._saved_ns = 0
        self._probe: SourceProbe | None = None
        self._probing: asyncio.Task[None] | None = None
        self._pace_ns = 0
        """Of a step of the ranks, as they took them in an earlier run without a wait; 0: not known."""
        self._pace = PaceWatch()
        self.table: StartTable | None = None
        """By which the workers began; None: by the configuration alone."""

    async def load(self) -> None:
        """Take what is known of the sources from the store; once."""
        if not self._known:
            self._fingerprints, self._known, self._pace_ns = await asyncio.to_thread(self._load)
            for source, profile in enumerate(self._known):
                self._tell(source, profile)

    def _load(self) -> tuple[list[str], list[SourceProfile | None], int]:
        fingerprints = [profile_fingerprint(self._job, n) for n in range(len(self._job.sources))]
        pace_ns = self._store.load_pace(self._pace_key)
        return fingerprints, self._store.load_all(fingerprints), pace_ns

    @property
    def _pace_key(self) -> str:
        """Name the job and the mesh whose ranks take steps at a pace."""
        mesh = " ".join(f"{axis}{size}" for axis, size in self._mesh())
        return hashlib.sha256(f"{self._job.digest()} {mesh}".encode()).hexdigest()[:32]

    def _tell(self, source: int, profile: SourceProfile | None) -> None:
        if profile is not None:
            cost = ReadCost(profile.cpu_ns, profile.user_ns, profile.wait_ns, profile.read_bytes)
            self._costs.know(source, profile.records, profile.tokens, cost)

    async def plan_start(self, state: StreamState, shared_bytes: int) -> StartTable | None:
        """Return with which workers the job begins, None where not all of it was measured.

        Args:
            state: Where it goes on.
            shared_bytes: Of its pool and rings.
        """
        await self.load()
        shares = shares_of_state(self._job, state)
        if any(share and self._known[n] is None for n, share in enumerate(shares)):
            return None
        self.table = await asyncio.to_thread(
            start_table,
            self._job,
            shares,
            self._known,
            self._budgets(shared_bytes),
            self._pace_ns,
        )
        if self.table is not None:
            table = self.table.table
            log.info(
                "job %s: %d loaders by the sources' profiles: %s",
                self._job.name, self.table.workers, table.workers_reason,
            )  # fmt: skip
        return self.table

    def _budgets(self, shared_bytes: int) -> Budgets:
        config = self._config
        fixed = config.loader_workers if config.origins.get(WORKERS_KEY) != "default" else 0
        return Budgets(
            cpus_milli=1000 * len(os.sched_getaffinity(0)),
            memory_bytes=usable_memory_bytes(),
            shared_bytes=shared_bytes,
            # Without a pace the fastest is planned for, and that with no more than the default.
            workers_max=config.loader_workers_max if self._pace_ns else config.loader_workers,
            workers_fixed=fixed,
        )

    def probe_unknown(self, state: StreamState) -> None:
        """Measure, in the background, what is drawn later and was never measured.

        What is drawn at once tells by itself.

        Args:
            state: Where the job goes on.
        """
        shares = shares_of_state(self._job, state)
        missing = [
            number
            for number in weighted_sources(self._job)
            if self._known[number] is None and not shares[number]
        ]
        if missing and self._probe is None:
            self._probe = SourceProbe(self._job, missing, self._config)
            loop = asyncio.get_running_loop()
            self._probing = loop.create_task(self._probe_all(self._probe))

    @property
    def probe_pid(self) -> int | None:
        """Of the process that measures, while there is one."""
        return None if self._probe is None else self._probe.pid

    async def _probe_all(self, probe: SourceProbe) -> None:
        found = await probe.run()
        for source, profile in found.items():
            if not profile.is_measured:
                continue
            self._known[source] = await asyncio.to_thread(self._store.add, profile)
            self._tell(source, profile)
        log.info(
            "job %s: %d sources were measured before they are drawn", self._job.name, len(found)
        )

    def tick(self, now_ns: int, steps_s: float, is_hungry: bool) -> None:
        """Keep what was counted, now and then.

        Args:
            now_ns: Monotonic.
            steps_s: Steps a second that the ranks take, as far as it was seen; 0: not yet.
            is_hungry: One of them waits for records now.
        """
        self._pace.look(steps_s, is_hungry)
        if now_ns - self._saved_ns >= SAVE_NS:
            if self._saved_ns:
                self.save()
            self._saved_ns = now_ns

    def save(self) -> None:
        """Have what was counted since the last time kept; a thread writes it."""
        news = self._news() if self._fingerprints else []
        pace_ns = self._pace.step_ns
        if news or pace_ns:
            asyncio.get_running_loop().run_in_executor(
                None, _write, self._store, news, self._pace_key, pace_ns
            )

    def _news(self) -> list[SourceProfile]:
        found = []
        for source, fingerprint in enumerate(self._fingerprints):
            records, tokens, cost = now = self._costs.counted(source)
            old_records, old_tokens, old = self._saved.get(source, (0, 0, ReadCost()))
            if records - old_records < RECORDS_TRUSTED or tokens <= old_tokens:
                continue
            self._saved[source] = now
            found.append(
                SourceProfile(
                    fingerprint=fingerprint,
                    origin="live",
                    records=records - old_records,
                    samples=records - old_records,
                    tokens=tokens - old_tokens,
                    read_bytes=cost.read_bytes - old.read_bytes,
                    chunk_bytes=0,
                    cpu_ns=cost.cpu_ns - old.cpu_ns,
                    user_ns=cost.user_ns - old.user_ns,
                    wait_ns=cost.wait_ns - old.wait_ns,
                    open_bytes=0,
                )
            )
        return found

    def close(self) -> None:
        """Keep what was counted, and measure no more."""
        if self._probing is not None:
            self._probing.cancel()
        self.save()

    def figures(self) -> list[dict[str, Any] | None]:
        """Return the stored profile of each source, for msdctl."""
        known = self._known or [None] * len(self._job.sources)
        return [None if profile is None else profile.figures() for profile in known]


def _write(store: ProfileStore, news: Sequence[SourceProfile], pace_key: str, pace_ns: int) -> None:
    for profile in news:
        store.add(profile)
    if pace_ns:
        store.save_pace(pace_key, pace_ns)
