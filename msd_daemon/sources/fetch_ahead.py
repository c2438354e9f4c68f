"""Blocks that a loader will need soon, asked of the disk or the store while it works on another.

A loader reads one block after the other. Where the reads keep it waiting, several of them run at
once this way, without a further process. Where a block lies in its shard is estimated: the n-th of
m blocks begins n/m into it. What is asked for in vain costs a read; what is missed is read as
before. Nothing is decoded here.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from federation.model.job import Shard
from msd_client.contract.errors import MsdError
from msd_daemon.sources.record import ReadMeter
from msd_daemon.stores.urls import is_url

EXTENT_BYTES_MAX = 8 << 20
"""Of one block; a larger one is asked for as far as that."""
OBJECTS_MAX = 32
"""Objects of stores that are kept open."""


class BlockExtent(NamedTuple):
    """Which block of a shard is wanted, of how many."""

    shard: int
    block: int
    blocks: int


class FetchAhead:
    """Of one source loader.

    Args:
        shards: Of the source, by number.
        blocks: How many are fetched ahead.
    """

    def __init__(self, shards: Sequence[Shard], blocks: int) -> None:
        self._shards = shards
        self.blocks = blocks
        self._asked: OrderedDict[BlockExtent, None] = OrderedDict()
        self._objects: OrderedDict[int, object] = OrderedDict()
        self._meter = ReadMeter()
        """What is fetched is counted where it is used."""

    def wish(self, extents: Sequence[BlockExtent]) -> None:
        """Have these blocks fetched, those left out that were asked for lately."""
        for extent in extents:
            if extent in self._asked:
                continue
            self._asked[extent] = None
            while len(self._asked) > 4 * self.blocks:
                self._asked.popitem(last=False)
            shard = self._shards[extent.shard]
            begin = shard.size_bytes * extent.block // extent.blocks
            end = shard.size_bytes * (extent.block + 1) // extent.blocks
            end = min(end, begin + EXTENT_BYTES_MAX)
            if end <= begin:
                continue
            # Whoever needs it reads it himself, and gets the fault.
            with contextlib.suppress(OSError, MsdError):
                if is_url(shard.path):
                    self._fetch_object(extent.shard, shard, begin, end)
                else:
                    _advise_file(shard.path, begin, end)

    def _fetch_object(self, number: int, shard: Shard, begin: int, end: int) -> None:
        from msd_daemon.stores.remote_file import RemoteFile

        opened = self._objects.get(number)
        if not isinstance(opened, RemoteFile):
            fingerprint = shard.fingerprint.partition("-")[0]
            opened = RemoteFile(shard.path, shard.size_bytes, fingerprint, self._meter)
            self._objects[number] = opened
            if len(self._objects) > OBJECTS_MAX:
                self._objects.popitem(last=False)
        opened.fetch_ahead(begin, end)


def _advise_file(path: str, begin: int, end: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)
