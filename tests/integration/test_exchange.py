"""Two real exchange processes with real pools: what one offers is what the other has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import zmq

from msd_client.contract.errors import ChunkCorruptError, ConfigError
from msd_daemon.core.allocator import Allocator, Piece
from msd_daemon.services.exchange_port import CurveKeys, ParcelKey, PeerAddress
from tests.support.exchange_node import JOB, ExchangeNode, exchange_node
from tests.support.parcels import FIELDS, MEDIA, Source

pytestmark = pytest.mark.processes

PICKS = [(0, 1, 0, 7), (1, 0, 4, 100), (0, 0, 0, 300), (2, 1, 5, 20), (0, 2, 3, 10)]
"""(chunk, record, first token, tokens)."""
LARGE_TOKENS = 50_000
LARGE = [(3, record, 0, LARGE_TOKENS) for record in range(6)]
"""A parcel of many frames of 64 KiB."""
SMALL_FRAMES = {"frame_bytes": 64 << 10, "window_bytes": 256 << 10}


def fill(node: ExchangeNode) -> None:
    """Put four chunks of two sources in a pool, and leave its second half to parcels."""
    node.pool.put(Source(3, [300, 7, 40]))
    node.pool.put(Source(1, [5000, 3], token_bytes=4, has_fields=False))
    items = {0: [(0, 2, 4, 8)], 1: [(0, 6, 3, 5), (1, 10, 9, 2), (0, 30, 5, 4)]}
    node.pool.put(Source(3, [20, 60], items=items))
    node.pool.put(Source(2, [LARGE_TOKENS] * 6))
    half = node.segment.nbytes // 2
    assert node.pool.end <= half
    node.rooms = Allocator(node.segment.nbytes, [Piece(0, half)])


def key_of(step: int, generation: int = 1, producer: str = "a", consumer: str = "b") -> ParcelKey:
    return ParcelKey(JOB, generation, step, producer, consumer)


@contextlib.asynccontextmanager
async def two_nodes(
    *, is_encrypted: bool = False, **options: int
) -> AsyncIterator[tuple[ExchangeNode, ExchangeNode]]:
    keys = [CurveKeys(*zmq.curve_keypair()) if is_encrypted else None for _ in range(2)]
    shapes = {"fields": FIELDS, "media": MEDIA, "pool_bytes": 32 << 20}
    async with (
        exchange_node("a", keys=keys[0], **shapes, **options) as a,
        exchange_node("b", keys=keys[1], **shapes, **options) as b,
    ):
        for node in (a, b):
            fill(node)
            node.port.set_peers({"a": a.address, "b": b.address})
        yield a, b


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_parcels_go_from_pool_to_pool_both_ways(is_encrypted: bool) -> None:
    async with two_nodes(is_encrypted=is_encrypted, **SMALL_FRAMES) as (a, b):
        picks = [PICKS, LARGE, PICKS[:1], PICKS + LARGE]
        for step, pick in enumerate(picks):
            a.port.offer(key_of(step), a.pool.fragments(pick))
            b.port.want(key_of(step))
            b.port.offer(key_of(step, producer="b", consumer="a"), b.pool.fragments(pick))
            a.port.want(key_of(step, producer="b", consumer="a"))
        for giver, taker in ((a, b), (b, a)):
            await taker.until(lambda taker=taker: len(taker.came) == len(picks))
            for key in taker.came:
                assert taker.contents(key) == giver.expected(picks[key.step])
            await giver.until(lambda giver=giver: len(giver.acked) == len(picks))
            assert sorted(giver.acked) == sorted(taker.came)
            await giver.until(lambda n=taker.name, giver=giver: giver.peers.get(n) == (True, ""))


async def test_plain_frames_go_over_links_and_encrypted_ones_never() -> None:
    for is_encrypted in (False, True):
        async with two_nodes(is_encrypted=is_encrypted, **SMALL_FRAMES) as (a, b):
            step, wanted_bytes = 0, 0
            async with asyncio.timeout(60):
                while a.port.statistics().linked_bytes < (1 if wanted_bytes == 0 else wanted_bytes):
                    a.port.offer(key_of(step), a.pool.fragments(LARGE))
                    b.port.want(key_of(step))
                    await b.until(lambda step=step: key_of(step) in b.came)
                    assert b.contents(key_of(step)) == a.expected(LARGE)
                    b.rooms.give_back(b.lent.pop(key_of(step)))
                    step += 1
                    if is_encrypted and a.port.statistics().given_bytes > 10 * b.sizes[key_of(0)]:
                        break
                    if not wanted_bytes:  # of a few whole parcels
                        wanted_bytes = 3 * b.sizes[key_of(0)]
            told = a.port.statistics()
            assert (told.linked_bytes > 0) is not is_encrypted
            assert told.linked_bytes <= told.given_bytes
            assert b.port.statistics().spoiled_parcels == 0


async def test_an_exchange_that_speaks_no_tcp_listens_on_none(tmp_path: Path) -> None:
    shapes = {"fields": FIELDS, "media": MEDIA, "pool_bytes": 32 << 20}
    async with (
        exchange_node("a", listen=f"ipc://{tmp_path}/a", **shapes) as a,
        exchange_node("b", listen=f"ipc://{tmp_path}/b", **shapes) as b,
    ):
        for node in (a, b):
            fill(node)
            node.port.set_peers({"a": a.address, "b": b.address})
            assert psutil.Process(node.port.pid).net_connections("inet") == []
        a.port.offer(key_of(0), a.pool.fragments(PICKS))
        b.port.want(key_of(0))
        await b.until(lambda: key_of(0) in b.came)
        assert b.contents(key_of(0)) == a.expected(PICKS)


async def test_processes_may_die_at_any_moment() -> None:
    rng = random.Random(5)
    async with two_nodes(**SMALL_FRAMES) as (a, b):
        steps = 12
        for step in range(steps):
            a.port.offer(key_of(step), a.pool.fragments(LARGE if step % 2 else PICKS))
            b.port.want(key_of(step))
        deaths = 0
        while len(b.came) < steps or len(a.acked) < steps:
            victim = rng.choice([a, b])
            pid = victim.port.pid
            if deaths < 8 and pid is not None:
                deaths += 1
                os.kill(pid, signal.SIGKILL)
                await victim.until(lambda v=victim, pid=pid: v.port.pid not in (None, pid))
            before = len(b.came) + len(a.acked)
            with contextlib.suppress(TimeoutError):  # a death may come between, with nothing new
                await b.until(lambda n=before: len(b.came) + len(a.acked) > n, rng.random())
        for step in range(steps):
            assert b.contents(key_of(step)) == a.expected(LARGE if step % 2 else PICKS)
        assert sorted(a.acked) == [key_of(step) for step in range(steps)]
        assert deaths == 8


async def test_a_process_that_stands_still_is_told_of_and_waited_for() -> None:
    async with two_nodes(**SMALL_FRAMES) as (a, b):
        a.port.offer(key_of(0), a.pool.fragments(PICKS))
        b.port.want(key_of(0))
        await b.until(lambda: len(b.came) == 1)
        assert a.port.pid is not None
        process = psutil.Process(a.port.pid)
        process.suspend()
        try:
            a.port.offer(key_of(1), a.pool.fragments(LARGE))
            b.port.want(key_of(1))
            await b.until(lambda: not b.peers["a"][0])
            assert len(b.came) == 1
        finally:
            process.resume()
        await b.until(lambda: len(b.came) == 2 and b.peers["a"][0])
        assert b.contents(key_of(1)) == a.expected(LARGE)


async def test_what_is_withdrawn_or_dropped_is_neither_read_nor_written_any_more() -> None:
    async with two_nodes(**SMALL_FRAMES) as (a, b):
        for step in range(6):
            a.port.offer(key_of(step), a.pool.fragments(LARGE))
            b.port.want(key_of(step))
        await b.until(lambda: bool(b.sizes))
        await b.port.withdraw(key_of(1))
        await b.port.drop_generation(JOB, 1)
        await a.port.drop_generation(JOB, 1)
        came = len(b.came)
        half = b.segment.nbytes // 2
        b.mapping.view[half:] = b"\x5a" * half  # the rooms are the owner's again
        a.mapping.view[: a.pool.end] = bytes(a.pool.end)
        a.port.offer(key_of(7), a.pool.fragments(PICKS))  # too late
        b.port.want(key_of(7))
        b.rooms = Allocator(b.segment.nbytes, [Piece(0, half)])
        a.pool.chunks.clear()
        a.pool.end = 0
        fill(a)
        a.port.offer(key_of(0, generation=2), a.pool.fragments(PICKS))
        b.port.want(key_of(0, generation=2))
        await b.until(lambda: len(b.came) > came)
        assert b.contents(key_of(0, generation=2)) == a.expected(PICKS)
        (parts,) = b.came[key_of(0, generation=2)]
        end = parts[-1].offset_bytes + parts[-1].used_bytes
        assert bytes(b.mapping.view[end:]) == b"\x5a" * (b.segment.nbytes - end)
        assert len(b.came) == came + 1


async def test_room_is_asked_for_and_given_by_the_owner() -> None:
    async with two_nodes() as (a, b):
        b.rooms = None
        b.port.want(key_of(0))
        a.port.offer(key_of(0), a.pool.fragments(PICKS))
        await b.until(lambda: bool(b.sizes))
        assert not b.came
        offset = b.segment.nbytes // 2
        b.port.room(key_of(0), offset, b.sizes[key_of(0)])
        await b.until(lambda: bool(b.came))
        (parts,) = b.came[key_of(0)]
        assert parts[0].offset_bytes == offset
        assert parts[-1].offset_bytes + parts[-1].used_bytes == offset + b.sizes[key_of(0)]


async def test_what_a_consumer_has_already_is_told_before_it_is_offered_or_after() -> None:
    async with two_nodes() as (a, b):
        a.port.offer(key_of(0), a.pool.fragments(PICKS))
        b.port.decline(key_of(0))
        await a.until(lambda: a.acked == [key_of(0)])
        b.port.decline(key_of(1))
        await a.until(lambda: key_of(1) in a.declined)  # also told of 0, where it was said twice
        assert b.port.pid is not None
        os.kill(b.port.pid, signal.SIGKILL)  # what it said and was not noted is said again
        b.port.decline(key_of(2))
        await a.until(lambda: key_of(2) in a.declined)
        a.port.offer(key_of(3), a.pool.fragments(PICKS))
        b.port.want(key_of(3))
        await b.until(lambda: list(b.came) == [key_of(3)])


async def test_a_parcel_that_cannot_be_given_is_told_at_both_ends() -> None:
    async with two_nodes() as (a, b):
        b.port.want(key_of(0))
        a.port.offer(key_of(0), a.pool.fragments([(0, 1, 0, 8)]))  # one token too many
        await a.until(lambda: bool(a.failed))
        await b.until(lambda: bool(b.failed))
        for node in (a, b):
            ((key, error),) = node.failed
            assert key == key_of(0)
            assert isinstance(error, ChunkCorruptError)
            assert "tokens 0 to 8 of record 1" in error.message
        assert "node a" in b.failed[0][1].message


async def test_a_peer_with_another_key_is_named_and_gets_nothing() -> None:
    async with two_nodes(is_encrypted=True) as (a, b):
        a.port.offer(key_of(0), a.pool.fragments(PICKS))
        await b.until(lambda: b.peers.get("a") == (True, ""))
        # b is no peer of a's any more: its link still stands, and what it says counts for nothing.
        a.port.set_peers({})
        await a.until(lambda: a.peers.get("b") == (False, "it is no peer any more"))
        b.port.want(key_of(0))
        await b.until(lambda: not b.peers["a"][0])
        assert not b.sizes
        stranger = CurveKeys(*zmq.curve_keypair())
        a.port.set_peers({"b": PeerAddress(b.port.endpoint, stranger.public)})
        await b.until(lambda: ("a", False, "it refuses this node's key") in b.told)
        await a.until(lambda: a.peers["b"][0] is False)
        assert not b.sizes


async def test_an_address_that_is_taken_is_refused_with_the_remedy() -> None:
    async with exchange_node("a") as a:
        with pytest.raises(
            ConfigError, match=r"cannot listen on .*: Address already in use.*listen"
        ):
            async with exchange_node("b", listen=a.port.endpoint):
                pass


async def test_statistics_tell_what_was_moved() -> None:
    async with two_nodes() as (a, b):
        a.port.offer(key_of(0), a.pool.fragments(LARGE))
        b.port.want(key_of(0))
        await b.until(lambda: bool(b.came))
        async with asyncio.timeout(20):
            while not (b.port.statistics().taken_parcels and a.port.statistics().given_parcels):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # told once a second, without an event
        seen = b.port.statistics()
        assert seen.taken_bytes == b.sizes[key_of(0)]
        assert a.port.statistics().given_bytes >= b.sizes[key_of(0)]
        assert (seen.spoiled_parcels, seen.refused_messages) == (0, 0)
