"""Two real exchange processes with real pools: what one offers is what the other has."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from msd_daemon.core.allocator import Allocator, Piece
from msd_daemon.services.exchange_port import ParcelKey
from tests.support.exchange_node import JOB, ExchangeNode, exchange_node
from tests.support.parcels import FIELDS, MEDIA, Source

pytestmark = pytest.mark.processes

PICKS = [(0, 1, 0, 7), (1, 0, 4, 100), (0, 0, 0, 300), (2, 1, 5, 20), (0, 2, 3, 10)]
"""(chunk, record, first token, tokens)."""


def fill(node: ExchangeNode) -> None:
    """Put three chunks of two sources in a pool, and leave its second half to parcels."""
    node.pool.put(Source(3, [300, 7, 40]))
    node.pool.put(Source(1, [5000, 3], token_bytes=4, has_fields=False))
    items = {0: [(0, 2, 4, 8)], 1: [(0, 6, 3, 5), (1, 10, 9, 2), (0, 30, 5, 4)]}
    node.pool.put(Source(3, [20, 60], items=items))
    half = node.segment.nbytes // 2
    assert node.pool.end <= half
    node.rooms = Allocator(node.segment.nbytes, [Piece(0, half)])


@contextlib.asynccontextmanager
async def two_nodes(**options: object) -> AsyncIterator[tuple[ExchangeNode, ExchangeNode]]:
    async with (
        exchange_node("a", fields=FIELDS, media=MEDIA, **options) as a,
        exchange_node("b", fields=FIELDS, media=MEDIA, **options) as b,
    ):
        for node in (a, b):
            fill(node)
            node.port.set_peers({"a": a.address(), "b": b.address()})
        yield a, b


async def test_a_parcel_goes_from_pool_to_pool() -> None:
    async with two_nodes() as (a, b):
        key = ParcelKey(JOB, 1, 0, "a", "b")
        a.port.offer(key, a.pool.fragments(PICKS))
        b.port.want(key)
        await b.until(lambda: key in b.came)
        assert b.contents(key) == a.expected(PICKS)
        await a.until(lambda: a.acked == [key])
