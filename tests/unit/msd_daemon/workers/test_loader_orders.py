"""In which order a loader worker takes the daemon's orders."""

from __future__ import annotations

import contextlib
from typing import Any

from msd_client.contract.codec import pack
from msd_daemon.workers.loader_main import LoaderWorker
from msd_daemon.workers.messages import GRANT, FromLoader, ToLoader


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
