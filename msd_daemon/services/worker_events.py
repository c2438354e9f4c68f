"""What the workers of a job tell its owner."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from msd_client.contract.errors import MsdError
from msd_daemon.workers.bad_notice import BadNotice
from msd_daemon.workers.messages import ChunkNotice, Grant


class ShadowChunk(NamedTuple):
    """What a shadow has ready, with what is to be told of it once it is published."""

    notice: ChunkNotice
    bad: BadNotice | None


class WorkerEvents(Protocol):
    """What the owner of the workers hears."""

    def chunk_published(self, notice: ChunkNotice) -> None:
        """A chunk lies in the pool."""

    def grant_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """A piece came back unused."""

    def shadow_ready(self, chunk: ShadowChunk) -> None:
        """A shadow has a chunk ready."""

    def shadow_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """A shadow's piece came back unused."""

    def loader_failed(self, error: MsdError) -> None:
        """A source loader can't go on."""

    def bad_records(self, notice: BadNotice) -> None:
        """A chunk that comes next holds bad records."""

    def shard_lost(self, told: dict[str, Any]) -> None:
        """A worker waits until a loss is noted, and known to all workers (FromLoader.LOST)."""

    def quarantine_orders(self) -> list[dict[str, Any]]:
        """Return what a new loader worker has to be told of records that it must not touch."""
        ...

    def copied(self, task: int) -> None:
        """Carried fragments were copied."""

    def slot_filled(
        self,
        ring: int,
        slot: int,
        sequence: int,
        generation: int,
        payload_bytes: int,
    ) -> None:
        """A constructor filled a slot."""

    def build_failed(self, error: MsdError) -> None:
        """A constructor could not fill a slot."""

    def worker_lost(self, role: str, number: int, pid: int, status: int) -> None:
        """A worker ended without being asked to; `number` of a spare is -1."""

    def fenced_ended(self, pid: int) -> None:
        """A worker that was sent away is gone: nobody writes in its name any more."""
