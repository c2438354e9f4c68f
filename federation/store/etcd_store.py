"""The store on etcd: leases, the leader's key, records; the term is that key's create revision."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

from federation.journal_place import JournalPlace
from federation.store import etcd_client
from federation.store.etcd_client import EtcdClient, EtcdError, EtcdTls, KeyValue
from federation.store.etcd_journal import EtcdPlace
from federation.store.etcd_writer import Delete, EtcdWriter, Put, plan_store_error
from federation.store.plan_store import (
    LEASE_S,
    Leader,
    LeaseRenewal,
    RecordKind,
    check_record,
    monotonic_ns,
)
from msd_client.contract.errors import JournalDamagedError, PlanStoreError

log = logging.getLogger(__name__)

JOURNALS_KEPT = 16
"""Of jobs that are not open, beside those that are; etcd's room is small."""
COMPACT_NS = 300 * 10**9
"""Between compactions; what was overwritten is kept for that long, as Kubernetes does."""

_JOURNALS = "journals"
"""Beside the kinds of records: by job, at which revision its journal was begun or gone on with last."""


class EtcdStore:
    """A `PlanStore` on an etcd cluster.

    Args:
        endpoints: `host:port` of its members.
        prefix: Of all keys of this cluster of planners.
        cache_dir: Local folder where open journals lie as files, made anew from etcd.
        tls: None speaks plain HTTP.
        lease_s: Length of a lease; etcd makes short ones longer (2 s with its default election
            time-out).
    """

    def __init__(
        self,
        endpoints: list[str],
        prefix: str,
        cache_dir: Path,
        *,
        tls: EtcdTls | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._endpoints = endpoints
        self._tls = tls
        self._cache_dir = cache_dir
        self._prefix = f"{prefix}/"
        self._what = f"plan store etcd://{','.join(endpoints)}/{prefix}"
        self.leader_key = f"{prefix}/leader".encode()
        self._lease_s = float(math.ceil(lease_s))
        self._lease = 0
        self._term = 0
        self._client = self._connected()
        self._writer = EtcdWriter(self._client, self, f"{self._prefix}records/", self._what)

    def _connected(self) -> EtcdClient:
        return EtcdClient(self._endpoints, tls=self._tls)

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def term(self) -> int:
        return self._term

    # -- leadership ------------------------------------------------------------------------------

    def campaign(self, name: str, endpoint: str) -> int | None:
        with self._told():
            found = self._client.get(self.leader_key)
            if found is not None and found.create_revision == self._term:
                self.resign()  # of a term that was given up while etcd did not answer
            elif found is not None:
                return None
            lease = self._client.grant(int(self._lease_s))
            body = json.dumps({"name": name, "endpoint": endpoint}).encode()
            try:
                term = self._try_to_lead(lease, body)
            except EtcdError:
                self._revoke(lease)
                raise
            if term is None:
                self._revoke(lease)
                return None
        self._lease, self._term = lease, term
        self._writer = EtcdWriter(self._client, self, f"{self._prefix}records/", self._what)
        return term

    def _try_to_lead(self, lease: int, body: bytes) -> int | None:
        """Return the revision at which the leader's key was made, None where another one has it."""
        answer = self._client.txn(
            [etcd_client.created_at(self.leader_key, 0)],
            [etcd_client.put(self.leader_key, body, lease)],
        )
        return answer.revision if answer.succeeded else None

    def _revoke(self, lease: int) -> None:
        with contextlib.suppress(EtcdError):  # it runs out by itself
            self._client.revoke(lease)

    def renewal(self) -> LeaseRenewal:
        return _EtcdRenewal(self._connected(), self._what, self.leader_key, self._term, self._lease)

    def resign(self) -> None:
        with contextlib.suppress(EtcdError):
            self._client.txn(
                [etcd_client.created_at(self.leader_key, self._term)],
                [etcd_client.delete(self.leader_key)],
            )
        if self._lease:
            self._revoke(self._lease)
            self._lease = 0

    def leader(self) -> Leader | None:
        with self._told():
            found = self._client.get(self.leader_key)
        return None if found is None else self._leader_of(found)

    def _leader_of(self, found: KeyValue) -> Leader:
        try:
            body = json.loads(found.value)
            return Leader(found.create_revision, str(body["name"]), str(body["endpoint"]))
        except (ValueError, KeyError, TypeError) as error:
            raise PlanStoreError(
                f"{self._what}: {found.key.decode()} holds {found.value[:80]!r}, which no planner "
                "wrote: delete it, or use another prefix"
            ) from error

    # -- records and journals --------------------------------------------------------------------

    def put(self, kind: RecordKind, name: str, body: bytes) -> None:
        check_record(kind, name, body)
        self._writer.write([Put(_record_name(kind, name), body, is_new=False)])

    def drop(self, kind: RecordKind, name: str) -> None:
        self._writer.write([Delete(_record_name(kind, name))])

    def records(self, kind: RecordKind) -> dict[str, bytes]:
        begin = f"{kind}/"
        try:
            found = {
                unquote(name.removeprefix(begin)): body
                for name, body in self._writer.names()
                if name.startswith(begin)
            }
        except JournalDamagedError as error:
            raise PlanStoreError(error.message) from error
        return dict(sorted(found.items()))

    def journal(self, job_id: str) -> JournalPlace:
        name = quote(job_id, safe="")
        path = self._cache_dir / "jobs" / name / "journal.db"
        return EtcdPlace(
            self._client, self, self._journal_prefix(name), path, partial(self._note_journal, name)
        )

    def _journal_prefix(self, name: str) -> str:
        return f"{self._prefix}journals/{name}/"

    def _note_journal(self, name: str) -> None:
        """Note that a journal is used; let go of those whose jobs ended long ago."""
        with self._told():
            used = f"{self._client.revision():016x}".encode()
        try:
            held = dict(self._writer.names())
        except JournalDamagedError as error:
            raise PlanStoreError(error.message) from error
        noted = f"{_JOURNALS}/{name}"
        self._writer.write([Put(noted, used, is_new=noted not in held)])
        ended = [
            (revision, key)
            for key, revision in held.items()
            if key.startswith(f"{_JOURNALS}/") and key != noted
            and f"jobs/{key.removeprefix(f'{_JOURNALS}/')}" not in held
        ]  # fmt: skip
        for _, key in sorted(ended)[: max(0, len(ended) - JOURNALS_KEPT)]:
            log.warning("%s: the journal of %s is let go of, its job ended", self._what, key)
            prefix = self._journal_prefix(key.removeprefix(f"{_JOURNALS}/"))
            EtcdWriter(self._client, self, prefix, f"journal {prefix}").forget()
            self._writer.write([Delete(key)])

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except EtcdError as error:
            raise plan_store_error(self._what, error) from error


class _EtcdRenewal:
    """Renews a lease, looks whether its key is still there, and compacts now and then."""

    def __init__(
        self, client: EtcdClient, what: str, leader_key: bytes, term: int, lease: int
    ) -> None:
        self._client = client
        self._what = what
        self._leader_key = leader_key
        self._term = term
        self._lease = lease
        self._compact_ns = monotonic_ns() + COMPACT_NS
        self._compact_to = term

    def renew(self) -> bool:
        try:
            if not self._client.keep_alive(self._lease):
                return False
            found = self._client.get(self._leader_key)
        except EtcdError as error:
            if error.is_missing:
                return False
            raise plan_store_error(self._what, error) from error
        if found is None or found.create_revision != self._term:
            return False
        if monotonic_ns() >= self._compact_ns:
            self._compact()
        return True

    def _compact(self) -> None:
        """Let go of what was overwritten before the last time; others may do so too."""
        self._compact_ns = monotonic_ns() + COMPACT_NS
        with contextlib.suppress(EtcdError):
            self._client.compact(self._compact_to)
        with contextlib.suppress(EtcdError):
            self._compact_to = self._client.revision()

    def close(self) -> None:
        self._client.close()


def _record_name(kind: RecordKind, name: str) -> str:
    return f"{kind}/{quote(name, safe='')}"
