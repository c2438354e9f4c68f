"""Fenced writes of one planner's term to a part of etcd's keys: all or none, each done once.

A write is one transaction that compares the leader key's create revision (the term) and the part's
`head`, which every write moves on. A write whose answer was lost is settled by reading `head`. What
is too large for a transaction is laid down first, then committed by `head`, then put in its places:
a redo log, which `recover` finishes.
"""

from __future__ import annotations

import errno
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from federation.store import etcd_client
from federation.store.etcd_client import EtcdClient, EtcdError, KeyValue
from msd_client.contract.codec import pack, unpack
from msd_client.contract.errors import (
    InternalError,
    JournalDamagedError,
    LeadershipLostError,
    MsdError,
    PlanStoreError,
    ProtocolError,
)

VALUE_BYTES_MAX = 512 << 10
"""Of one key; more goes into several."""
TXN_BYTES_MAX = 1 << 20
"""etcd refuses requests above 1.5 MiB."""
TXN_OPS_MAX = 100
"""etcd refuses more than 128."""
SETTLE_S = 3.0
"""So long a write whose answer was lost is tried again: etcd chooses another leader within 2.2 s."""
RETRY_S = 0.05
PARTS_MAX = 255

_END = b":"
"""Ends a name, so that no name is the beginning of another's keys."""


class Put(NamedTuple):
    """Write a value of any size under a name."""

    name: str
    value: bytes
    is_new: bool = True
    """Nothing lies there; False lets go of parts of a longer value before it."""


class Delete(NamedTuple):
    """Let go of a name, or of all names from it up to and with `last`."""

    name: str
    last: str | None = None


Change = Put | Delete
T = TypeVar("T")


class Term(Protocol):
    """The term that is held."""

    @property
    def term(self) -> int:
        """Create revision of the leader's key."""
        ...

    @property
    def leader_key(self) -> bytes:
        """The leader's key."""
        ...


class EtcdWriter:
    """Writes the names below a prefix.

    Args:
        client: Of the calling thread.
        term: Whose writes these are.
        prefix: Of all keys; ends in a slash.
        what: For messages.
    """

    def __init__(self, client: EtcdClient, term: Term, prefix: str, what: str) -> None:
        self._client = client
        self._term = term
        self._all = prefix.encode()
        self._names = f"{prefix}rows/".encode()
        self._staged = f"{prefix}staged/".encode()
        self._head = f"{prefix}head".encode()
        self._head_revision: int | None = None
        """None until it was read."""
        self._what = what

    def recover(self) -> None:
        """Finish a write that a planner before this one had begun; let go of what it did not commit.

        Raises:
            LeadershipLostError: The term is over.
            PlanStoreError: etcd does not answer.
        """
        head = self._asked(partial(self._client.get, self._head))
        self._head_revision = 0 if head is None else head.mod_revision
        write_id, parts = _read_head(head)
        if parts:
            self._apply_staged(write_id, parts)
        else:
            self._commit([etcd_client.delete(self._staged, _end(self._staged))], "", 0)

    def names(self) -> Iterator[tuple[str, bytes]]:
        """Yield what is kept, by name, in order of names.

        Raises:
            JournalDamagedError: A value is not whole; it is named.
            PlanStoreError: etcd does not answer.
        """
        held: tuple[str, int, list[bytes]] | None = None
        start: bytes | None = self._names
        end, revision = _end(self._names), 0
        while start is not None:
            page = self._asked(partial(self._client.page, start, end, revision))
            start, revision = page.rest, page.revision
            for found in page.found:
                name, _, part = found.key[len(self._names) :].partition(_END)
                if part and held is not None and held[0] == name.decode():
                    held[2].append(found.value)
                    continue
                if held is not None:
                    yield self._joined(*held)
                held = (name.decode(), found.value[0] if found.value else 0, [found.value[1:]])
        if held is not None:
            yield self._joined(*held)

    def _joined(self, name: str, count: int, parts: list[bytes]) -> tuple[str, bytes]:
        try:
            if count != len(parts):
                raise ProtocolError(f"{len(parts)} of its {count} parts are there")
            return name, zlib.decompress(b"".join(parts))
        except (zlib.error, ProtocolError) as error:
            raise JournalDamagedError(f"{self._what}: {name} is damaged: {error}") from error

    def write(self, changes: list[Change]) -> None:
        """Make changes durable, all or none; a name occurs in one of them alone.

        Raises:
            LeadershipLostError: The term is over: nothing is written. Or it is not known whether this
                was, and this planner has to begin anew from what is.
            PlanStoreError: Nothing is written, try again.
        """
        if self._head_revision is None:
            self.recover()
        ops = [(op, size) for change in changes for op, size in self._ops_of(change)]
        batches = _batches(ops)
        write_id = uuid.uuid4().hex
        if len(batches) == 1:
            self._commit(batches[0], write_id, 0)
            return
        staged = zlib.compress(pack([[kind, *rest] for kind, *rest in map(_plain, changes)]), 1)
        parts = [staged[at : at + VALUE_BYTES_MAX] for at in range(0, len(staged), VALUE_BYTES_MAX)]
        for number, part in enumerate(parts):
            self._commit([etcd_client.put(self._staged_key(write_id, number), part)], "", 0)
        self._commit([], write_id, len(parts))
        self._apply(batches)

    def forget(self) -> None:
        """Let go of all names, and of what keeps them.

        Raises:
            LeadershipLostError: The term is over, or it is not known whether this was done.
            PlanStoreError: Nothing is changed, try again.
        """
        self.recover()
        self._commit([etcd_client.delete(self._all, _end(self._all))], None, 0)
        self._head_revision = None

    def _apply_staged(self, write_id: str, count: int) -> None:
        keys = [self._staged_key(write_id, number) for number in range(count)]
        parts = [self._asked(partial(self._client.get, key)) for key in keys]
        try:
            staged = zlib.decompress(b"".join(part.value for part in parts if part is not None))
            changes = [_change(*plain) for plain in unpack(staged, bytes_max=len(staged))]
        except (TypeError, zlib.error, MsdError) as error:
            raise JournalDamagedError(
                f"{self._what}: a write that was committed is damaged ({error}): delete the keys "
                f"below {self._names.decode()}"
            ) from error
        self._apply(_batches([it for change in changes for it in self._ops_of(change)]))

    def _apply(self, batches: list[list[dict[str, Any]]]) -> None:
        """Put a committed write in its places; whoever recovers does it again where this stops."""
        try:
            for ops in batches:
                self._commit(ops, None, 0)
            self._commit([etcd_client.delete(self._staged, _end(self._staged))], "", 0)
        except PlanStoreError as error:
            raise self._lost(f"a write is durable and not yet in its places ({error})") from error

    def _commit(self, ops: list[dict[str, Any]], write_id: str | None, parts: int) -> None:
        """Do one transaction, once, and move `head` on; `write_id` None leaves it, and repeats.

        Raises:
            LeadershipLostError: The term is over, or the outcome is not known.
            PlanStoreError: It was not done.
        """
        assert self._head_revision is not None
        mark = pack([write_id or uuid.uuid4().hex, parts])
        compare = [
            etcd_client.created_at(self._term.leader_key, self._term.term),
            etcd_client.written_at(self._head, self._head_revision),
        ]
        move = [] if write_id is None else [etcd_client.put(self._head, mark)]
        look = [etcd_client.get(self._term.leader_key), etcd_client.get(self._head)]
        deadline = time.monotonic() + SETTLE_S
        is_open = False
        while True:
            try:
                answer = self._client.txn(compare, [*ops, *move], look)
                break
            except EtcdError as error:
                is_open = is_open or error.is_open
                if not is_open or time.monotonic() >= deadline:
                    self._give_up(error, is_open=is_open)
                time.sleep(RETRY_S)
        if answer.succeeded:
            if write_id is not None:
                self._head_revision = answer.revision
            return
        leader, head = (found[0] if found else None for found in answer.ranges)
        if is_open and head is not None and head.value == mark:
            self._head_revision = head.mod_revision  # an earlier try did it, its answer was lost
            return
        if leader is None or leader.create_revision != self._term.term:
            raise self._lost("another planner leads, or nobody: nothing was written")
        raise InternalError(f"{self._what} was written by something else than its planner")

    def _give_up(self, error: EtcdError, *, is_open: bool) -> NoReturn:
        if is_open:
            raise self._lost(f"whether a write was done is not known ({error})") from error
        raise plan_store_error(self._what, error) from error

    def _lost(self, why: str) -> LeadershipLostError:
        self._head_revision = None
        return LeadershipLostError(
            f"{self._what}, term {self._term.term}: {why}; this planner stands by from here on",
            seen=self._term.term,
        )

    def _asked(self, ask: Callable[[], T]) -> T:
        """Return what a read gives, tried again for a while.

        Raises:
            PlanStoreError: etcd does not answer.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                return ask()
            except EtcdError as error:
                if time.monotonic() >= deadline:
                    raise plan_store_error(self._what, error) from error
                time.sleep(RETRY_S)

    def _ops_of(self, change: Change) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the operations of a change and the bytes of each."""
        key = self._names + change.name.encode() + _END
        if isinstance(change, Delete):
            last = change.name if change.last is None else change.last
            end = self._names + last.encode() + bytes([_END[0] + 1])
            if change.last is not None:
                key = key.removesuffix(_END)  # of a table, say: its names go on where this one ends
            yield etcd_client.delete(key, end), len(key) + len(end)
            return
        body = zlib.compress(change.value, 1)
        parts = [body[at : at + VALUE_BYTES_MAX] for at in range(0, len(body), VALUE_BYTES_MAX)]
        if len(parts) > PARTS_MAX:
            raise PlanStoreError(
                f"{self._what}: {change.name} has {len(body)} bytes compressed, at most "
                f"{PARTS_MAX * VALUE_BYTES_MAX} go into etcd: make the job's state smaller",
                seen=len(body),
                limit=PARTS_MAX * VALUE_BYTES_MAX,
            )
        if not change.is_new:
            unused = key + b"%04x" % len(parts)
            yield etcd_client.delete(unused, key + b"\xff"), 2 * len(key)
        yield etcd_client.put(key, bytes([len(parts)]) + parts[0]), len(key) + len(parts[0])
        for number, part in enumerate(parts[1:], 1):
            yield etcd_client.put(key + b"%04x" % number, part), len(key) + len(part)

    def _staged_key(self, write_id: str, number: int) -> bytes:
        return self._staged + f"{write_id}/{number:08x}".encode()


def plan_store_error(what: str, error: EtcdError) -> PlanStoreError:
    """Return the typed error of what etcd says."""
    remedy = "look at its members (etcdctl endpoint health)"
    if error.errno == errno.ENOSPC:
        remedy = "compact and defragment it, or raise its quota, then etcdctl alarm disarm"
    return PlanStoreError(f"{what}: etcd: {error}: {remedy}")


def _read_head(head: KeyValue | None) -> tuple[str, int]:
    if head is None:
        return "", 0
    write_id, parts = unpack(head.value)
    return str(write_id), int(parts)


def _batches(ops: list[tuple[dict[str, Any], int]]) -> list[list[dict[str, Any]]]:
    """Return operations in order, in batches that a transaction takes each."""
    batches: list[list[dict[str, Any]]] = [[]]
    held_bytes = 0
    for op, size in ops:
        is_full = len(batches[-1]) >= TXN_OPS_MAX or held_bytes + size > TXN_BYTES_MAX
        if batches[-1] and is_full:
            batches.append([])
            held_bytes = 0
        batches[-1].append(op)
        held_bytes += size
    return batches


def _plain(change: Change) -> list[Any]:
    return ["delete" if isinstance(change, Delete) else "put", *change]


def _change(kind: str, *values: Any) -> Change:
    return Delete(*values) if kind == "delete" else Put(*values)


def _end(prefix: bytes) -> bytes:
    return etcd_client.prefix_end(prefix)
