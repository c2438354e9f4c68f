"""In which order a loader worker takes the daemon's orders, and that values go with their tokens."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from federation.model.job import FieldRule
from msd_client.contract.codec import pack
from msd_client.contract.errors import ChunkCorruptError
from msd_daemon.shm.chunk_layout import ChunkView, single_bytes
from msd_daemon.workers.loader_main import LoaderWorker
from msd_daemon.workers.messages import GRANT, FromLoader, Grant, ToLoader, decode_chunk
from tests.support.sources import IN_ORDER, id_tokenizer, make_loader, make_spec


class Link:
    """Gives prepared orders, then ends; notes what was sent."""

    def __init__(self, orders: list[tuple[int, bytes]]) -> None:
        self.orders = orders
        self.sent: list[tuple[int, bytes]] = []

    def pending(self) -> bool:
        return bool(self.orders)

    def receive(self) -> tuple[int, bytes, list[int]]:
        if not self.orders:
            raise EOFError
        kind, body = self.orders.pop(0)
        return kind, body, []

    def send(self, kind: int, body: bytes, fds: tuple[int, ...] = ()) -> None:
        self.sent.append((int(kind), bytes(body)))


class Loader:
    """A source loader that only notes what it was told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def seek(self, block_key: int, index: int) -> None:
        self.calls.append((block_key, index))

    def next_chunk(self, payload_bytes_max: int) -> None:
        self.calls.append("next")


def test_grants_older_than_a_seek_go_back_unused():
    grants = {task: GRANT.pack(7, task, 1, 4096 * task, 4096) for task in (0, 1)}
    other = GRANT.pack(8, 0, 1, 0, 4096)
    seek = pack({"loader": 7, "block_key": 3, "index": 0})
    orders = [
        (int(ToLoader.GRANT), grants[0]),
        (int(ToLoader.GRANT), other),
        (int(ToLoader.SEEK), seek),
        (int(ToLoader.GRANT), grants[1]),
    ]
    link = Link(orders)
    worker = LoaderWorker(link)
    seven, eight = Loader(), Loader()
    worker._loaders = {7: seven, 8: eight}
    with contextlib.suppress(EOFError):
        worker.serve()
    # A chunk for the old grant would have been of the new place, and refused: its records lost.
    assert seven.calls == [(3, 0), "next"]
    assert link.sent[0] == (int(FromLoader.DRY), grants[0])
    assert eight.calls == ["next"]


FIELDS = (
    FieldRule("advantage", "adv", "token", "float64"),
    FieldRule("reward", "reward", "segment", "int32"),
)


@pytest.fixture
def worker(tmp_path: Path) -> LoaderWorker:
    """Return a worker with a pool of 64 KiB and one loader of records 1, 2, ... 30 tokens long."""
    path = tmp_path / "a.jsonl"
    rows = [
        {"ids": [n] * n, "adv": [n + k / 100 for k in range(n)], "reward": -n} for n in range(1, 31)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = make_spec([path], shuffle=IN_ORDER, tokens_field="ids")
    worker = LoaderWorker(Link([]))
    worker._pool = memoryview(bytearray(1 << 16))
    worker._job = SimpleNamespace(
        fields=FIELDS,
        media=(),
        has_masks=False,
        sources=[spec] * 4,
        tokenizer=SimpleNamespace(vocabulary_count=1 << 20),
    )
    loader = make_loader(spec, tokenizer=id_tokenizer(), fields=FIELDS)
    worker._loaders = {7: loader}
    return worker


def chunk_at(worker: LoaderWorker, offset: int) -> ChunkView:
    assert worker._pool is not None
    return ChunkView(worker._pool[offset:])


def order_copies(worker: LoaderWorker, copies: list[list[int]]) -> None:
    worker._handle(int(ToLoader.COPY), pack({"task": 1, "copies": copies}), [])


def test_fetched_records_carry_their_values(worker: LoaderWorker) -> None:
    order = {
        "loader": 7, "task": 1, "generation": 1, "block_key": 0, "indices": [9, 2],
        "offset": 4096, "bytes": 100,
    }  # fmt: skip
    worker._handle(int(ToLoader.FETCH), pack(order), [])
    kind, body = worker._link.sent[-1]
    assert kind == FromLoader.TOO_SMALL  # it says how much it needs, values counted
    needed = Grant(*GRANT.unpack(body)).size_bytes
    assert needed > 13 * (4 + 8)
    worker._handle(int(ToLoader.FETCH), pack(order | {"bytes": needed}), [])
    notice = decode_chunk(worker._link.sent[-1][1])
    assert (notice.used_bytes, notice.lengths.tolist()) == (needed, [10, 3])
    advantage, reward = chunk_at(worker, 4096).values(FIELDS)
    assert advantage.tolist() == [10 + k / 100 for k in range(10)] + [3, 3.01, 3.02]
    assert reward.tolist() == [-10, -3]


def test_a_copied_part_of_a_record_has_its_part_of_the_values(worker: LoaderWorker) -> None:
    worker._handle(int(ToLoader.GRANT), GRANT.pack(7, 1, 1, 0, 1 << 14), [])
    worker._make_chunk(worker._grants.popleft())
    used = decode_chunk(worker._link.sent[-1][1]).used_bytes
    size = single_bytes(5, 4, FIELDS)
    order_copies(worker, [[0, used, 19, 12, 5, 1 << 14, size], [0, used, 0, 0, 1, 1 << 15, size]])
    copied = chunk_at(worker, 1 << 14)
    assert copied.record(0).tolist() == [20] * 5
    advantage, reward = copied.values(FIELDS)
    assert advantage.tolist() == [20 + k / 100 for k in range(12, 17)]
    assert reward.tolist() == [-20]
    assert [array.tolist() for array in chunk_at(worker, 1 << 15).values(FIELDS)] == [[1], [-1]]
    order_copies(worker, [[1 << 14, size, 0, 3, 2, 1 << 13, single_bytes(2, 4, FIELDS)]])
    assert chunk_at(worker, 1 << 13).values(FIELDS)[0].tolist() == [20.15, 20.16]


def test_a_piece_without_room_for_the_values_is_refused(worker: LoaderWorker) -> None:
    worker._handle(int(ToLoader.GRANT), GRANT.pack(7, 1, 1, 0, 1 << 14), [])
    worker._make_chunk(worker._grants.popleft())
    used = decode_chunk(worker._link.sent[-1][1]).used_bytes
    with pytest.raises(ChunkCorruptError, match="the pool lent"):
        order_copies(worker, [[0, used, 19, 0, 20, 1 << 14, single_bytes(20, 4)]])


def test_a_chunk_without_fields_is_copied_without(worker: LoaderWorker, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdef")
    worker._loaders = {7: make_loader(make_spec([tmp_path / "a.txt"]), fields=FIELDS)}
    worker._handle(int(ToLoader.GRANT), GRANT.pack(7, 1, 1, 0, 1 << 14), [])
    worker._make_chunk(worker._grants.popleft())
    used = decode_chunk(worker._link.sent[-1][1]).used_bytes
    order_copies(worker, [[0, used, 0, 2, 3, 1 << 14, single_bytes(3, 4, FIELDS)]])
    copied = chunk_at(worker, 1 << 14)
    assert bytes(copied.record(0).tolist()) == b"cde"
    assert copied.values(FIELDS) == ()
