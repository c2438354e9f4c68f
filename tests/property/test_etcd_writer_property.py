"""Fenced writes to a real etcd whose requests and answers get lost or come late, and planners that end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.store import etcd_client, etcd_writer
from federation.store.etcd_client import EtcdClient, EtcdError
from federation.store.etcd_writer import Change, Delete, EtcdWriter, Put
from msd_client.contract.errors import LeadershipLostError, PlanStoreError
from tests.support.etcd import EtcdCluster

NAMES = [f"t/{number:02x}" for number in range(12)]
FATES = ("done", "done", "done", "lost", "answer lost", "late", "refused")


class FaultyClient(EtcdClient):
    """Loses requests and answers of transactions, or does them after others."""

    def __init__(self, endpoints: list[str], rng: random.Random) -> None:
        super().__init__(endpoints)
        self._rng = rng
        self._late: list[tuple[int, bytes]] = []
        self.is_faulty = True
        self.left: int | None = None
        """Transactions that still get through; None: no end of them."""

    def _ask(self, endpoint: str, path: str, data: bytes) -> dict[str, Any]:
        if path != "/v3/kv/txn" or not self.is_faulty:
            return super()._ask(endpoint, path, data)
        late, self._late = self._late, []
        for waits, old in late:
            if waits > 1:
                self._late.append((waits - 1, old))
            else:
                super()._ask(endpoint, path, old)
        if self.left is not None:
            if self.left == 0:
                raise EtcdError("cut off", is_open=True)
            self.left -= 1
        fate = self._rng.choice(FATES)
        if fate == "refused":
            raise EtcdError("connection refused")
        if fate == "late":
            self._late.append((self._rng.randint(1, 9), data))
        if fate in ("lost", "late"):
            raise EtcdError("time-out", is_open=True)
        answer = super()._ask(endpoint, path, data)
        if fate == "answer lost":
            raise EtcdError("time-out", is_open=True)
        return answer


class Term:
    """The leader's key, made anew for each term."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self.leader_key = f"{prefix}leader".encode()
        self.term = 0
        self._client = client

    def begin(self) -> None:
        ops = [etcd_client.delete(self.leader_key)]
        self._client.txn([], ops)
        self.term = self._client.txn([], [etcd_client.put(self.leader_key, b"me")]).revision


@contextmanager
def small_limits() -> Iterator[None]:
    """Have transactions be so small that most writes take several, and tries be few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(etcd_writer, "VALUE_BYTES_MAX", 64)
        patch.setattr(etcd_writer, "TXN_BYTES_MAX", 256)
        patch.setattr(etcd_writer, "TXN_OPS_MAX", 4)
        patch.setattr(etcd_writer, "SETTLE_S", 0.02)
        patch.setattr(etcd_writer, "RETRY_S", 0.0)
        yield


def some_changes(
    rng: random.Random, held: dict[str, bytes]
) -> tuple[list[Change], dict[str, bytes]]:
    """Return changes and what is held behind them."""
    after = dict(held)
    changes: list[Change] = []
    names = sorted(rng.sample(NAMES, rng.randint(1, len(NAMES))))
    if rng.random() < 0.3:
        first, last = names[0], names[rng.randrange(len(names))]
        changes.append(Delete(first, last))
        names = [name for name in names if name > last]
        for name in list(after):
            if first <= name <= last:
                del after[name]
    for name in names:
        if rng.random() < 0.25:
            changes.append(Delete(name))
            after.pop(name, None)
            continue
        value = rng.randbytes(rng.choice([0, 1, 40, 150, 700]))
        changes.append(Put(name, value, is_new=name not in held))
        after[name] = value
    return changes, after


def read(client: EtcdClient, term: Term, prefix: str) -> dict[str, bytes]:
    """Return what a successor finds."""
    client.is_faulty = False  # type: ignore[attr-defined]
    writer = EtcdWriter(client, term, prefix, "test")
    writer.recover()
    client.is_faulty = True  # type: ignore[attr-defined]
    return dict(writer.names())


@given(seed=st.integers(0, 2**32 - 1), writes=st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_a_write_is_done_once_and_whole_or_told_not_to_be(
    etcd: EtcdCluster, seed: int, writes: int
) -> None:
    rng = random.Random(seed)
    prefix = f"{uuid4().hex}/"
    client = FaultyClient(etcd.endpoints, rng)
    client.is_faulty = False
    term = Term(client, prefix)
    term.begin()
    writer = EtcdWriter(client, term, prefix, "test")
    writer.recover()
    held: dict[str, bytes] = {}
    client.is_faulty = True
    with small_limits():
        for _ in range(writes):
            changes, after = some_changes(rng, held)
            client.left = rng.choice([None, None, rng.randint(0, 12)])
            try:
                writer.write(changes)
                held = after
            except PlanStoreError:
                client.left = None
            except LeadershipLostError:
                client.left = None
                client.is_faulty = False
                term.begin()
                found = read(client, term, prefix)
                assert found in (held, after)
                held = found
                writer = EtcdWriter(client, term, prefix, "test")
                client.is_faulty = False
                writer.recover()
                client.is_faulty = True
            client.left = None
        assert read(client, term, prefix) == held
    client.close()


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_a_former_term_changes_nothing_however_late_its_requests_come(
    etcd: EtcdCluster, seed: int
) -> None:
    rng = random.Random(seed)
    prefix = f"{uuid4().hex}/"
    plain = EtcdClient(etcd.endpoints)
    old_client = FaultyClient(etcd.endpoints, rng)
    old, new = Term(plain, prefix), Term(plain, prefix)
    old.begin()
    with small_limits():
        writer = EtcdWriter(old_client, old, prefix, "old")
        held: dict[str, bytes] = {}
        changes, after = some_changes(rng, held)
        with suppress(PlanStoreError, LeadershipLostError):
            writer.write(changes)
        new.begin()
        successor = EtcdWriter(plain, new, prefix, "new")
        successor.recover()
        found = dict(successor.names())
        assert found in (held, after)
        for _ in range(3):
            with pytest.raises((LeadershipLostError, PlanStoreError)):
                writer.write(some_changes(rng, found)[0])
        assert dict(successor.names()) == found
        later, wanted = some_changes(rng, found)
        successor.write(later)
        assert dict(successor.names()) == wanted
    plain.close()
    old_client.close()
