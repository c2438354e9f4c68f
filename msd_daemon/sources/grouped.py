"""Blocks whose records come in groups: neighbours of a shard that have one value of a field.

A group belongs to the block in which its first record lies, so no block tears one: a block begins
with the first group that begins in it and is read on, into the blocks behind it, as far as its last
group goes. To know whether its first record begins one, the block before is read for its last key.

A record whose key cannot be read (damage, no such field) is no sample; it counts as one of the group
before it, so that the others of a group stay together around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from federation.model.job import Shard, SourceSpec
from msd_daemon.sources.record import RawRecord
from msd_daemon.sources.record_identity import group_key

_KEYS_MAX = 1 << 16
"""Last keys of blocks that are kept."""


class Blocks(Protocol):
    """Blocks of raw records."""

    def block_count(self, shard: Shard) -> int:
        """Return the blocks of a shard, at least 1."""
        ...

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records of a block; damage is a record too."""
        ...


class GroupedBlocks:
    """The same records in blocks of whole groups; those that continue one say so.

    Args:
        blocks: As the format has them.
        field: Whose value a group's records share.
    """

    def __init__(self, blocks: Blocks, field: str) -> None:
        self._blocks = blocks
        self._field = field
        self._last_keys: dict[tuple[str, int], bytes | None] = {}

    def block_count(self, shard: Shard) -> int:
        """Return the blocks of a shard, at least 1."""
        return self._blocks.block_count(shard)

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records of the groups that begin in a block."""
        key = self._key_before(shard, block)
        # What has no key at the shard's very beginning has no group before it.
        has_group = key is None
        is_first = True
        for at in range(block, self._blocks.block_count(shard)):
            if at > block and not has_group:
                return
            records = self._blocks.records(shard, at)
            try:
                for record in records:
                    own = group_key(record, self._field)
                    if own is not None and own != key:
                        if at > block:
                            return
                        key, has_group = own, True
                    elif has_group:
                        record.is_continuing = not is_first
                    else:
                        continue
                    is_first = False
                    yield record
            finally:
                close_records(records)
            if at == block:
                self._keep(shard, at, key)

    def _key_before(self, shard: Shard, block: int) -> bytes | None:
        """Return the last key before a block, None where there is none."""
        key: bytes | None = None
        unknown: list[int] = []
        for at in range(block - 1, -1, -1):
            if (shard.path, at) in self._last_keys:
                key = self._last_keys[shard.path, at]
                break
            unknown.append(at)
            key = self._last_key(shard, at)
            if key is not None:
                break
        for at in unknown:
            self._keep(shard, at, key)
        return key

    def _last_key(self, shard: Shard, block: int) -> bytes | None:
        key: bytes | None = None
        for record in self._blocks.records(shard, block):
            own = group_key(record, self._field)
            key = key if own is None else own
        return key

    def _keep(self, shard: Shard, block: int, key: bytes | None) -> None:
        if len(self._last_keys) >= _KEYS_MAX:
            self._last_keys.clear()
        self._last_keys[shard.path, block] = key


def close_records(records: Iterator[RawRecord]) -> None:
    """Close the reader behind records, where there is one."""
    close = getattr(records, "close", None)
    if close is not None:
        close()


def without_where(spec: SourceSpec) -> SourceSpec:
    """Return a source whose format refuses no record."""
    if spec.recipe is None or not spec.recipe.where:
        return spec
    return replace(spec, recipe=replace(spec.recipe, where=""))
