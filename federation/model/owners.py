"""Which node loads what: the owner of each source's parts, of one generation.

A source's blocks are dealt to its parts by ordinal, as they are to the source loaders of one node
(msd_daemon.sources.walk): the rule here is the loaders' own. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ProtocolError
from msd_client.contract.position import BLOCK_BITS

Int64Array = npt.NDArray[np.int64]
_BLOCK_MASK = (1 << BLOCK_BITS) - 1


@dataclass(frozen=True)
class Owners:
    """The nodes of all sources' parts. Nodes are numbered as in the generation's list of them."""

    nodes: tuple[tuple[int, ...], ...]
    """Of each source the node of each part; one part as a rule."""
    lanes: tuple[int, ...]
    """Lanes of each source: streaming ones are dealt lane by lane, 1 = block by block."""

    @cached_property
    def _table(self) -> Int64Array:
        """Node of each part, padded. Shape (sources, most parts)."""
        most = max(map(len, self.nodes), default=1)
        table = np.zeros((len(self.nodes), most), np.int64)
        for source, parts in enumerate(self.nodes):
            table[source, : len(parts)] = parts
        return table

    @cached_property
    def _parts(self) -> Int64Array:
        return np.array([len(parts) for parts in self.nodes], np.int64)

    @cached_property
    def _lanes(self) -> Int64Array:
        # A seekable source has more blocks than lanes anyway: its block is its own lane.
        return np.array([lanes if lanes > 1 else _BLOCK_MASK + 1 for lanes in self.lanes], np.int64)

    def of(self, source: npt.NDArray[Any], block_key: Int64Array) -> Int64Array:
        """Return the node that loads each record. Shape (n,).

        Args:
            source: Source index. Shape (n,).
            block_key: Block key. Shape (n,).
        """
        block = block_key & _BLOCK_MASK
        part = block % self._lanes[source] % self._parts[source]
        found: Int64Array = self._table[source, part]
        return found

    def node_of(self, source: int, block_key: int) -> int:
        """Return the node that loads one record."""
        parts = self.nodes[source]
        if len(parts) == 1:
            return parts[0]
        block = block_key & _BLOCK_MASK
        lanes = self.lanes[source]
        return parts[(block % lanes if lanes > 1 else block) % len(parts)]

    def parts_of(self, node: int, source: int) -> list[int]:
        """Return the parts of a source that a node loads, ascending."""
        return [part for part, owner in enumerate(self.nodes[source]) if owner == node]

    def sources_of(self, node: int) -> list[int]:
        """Return the sources of which a node loads a part, ascending."""
        return [source for source, parts in enumerate(self.nodes) if node in parts]

    def encode(self) -> list[list[int]]:
        """Return the nodes as plain lists; `decode` is the reverse."""
        return [list(parts) for parts in self.nodes]

    @staticmethod
    def decode(plain: Sequence[Sequence[int]], lanes: Sequence[int], node_count: int) -> Owners:
        """Return owners as they came.

        Raises:
            ProtocolError: Sources are missing, or a node is none of the generation's.
        """
        owners = Owners(tuple(tuple(map(int, parts)) for parts in plain), tuple(lanes))
        if len(owners.nodes) != len(lanes) or not all(owners.nodes):
            raise ProtocolError(
                f"{len(owners.nodes)} sources have owners, the job has {len(lanes)}"
            )
        for parts in owners.nodes:
            if min(parts) < 0 or max(parts) >= node_count:
                raise ProtocolError(f"owners {parts} are not among {node_count} nodes")
        return owners
