"""Who loads what in a cluster: sources dealt to nodes by their load and the nodes' capacity. Pure.

Largest first (LPT), each to the node that is least loaded for its capacity, so a source is open on as
few nodes as its load needs: on one, unless its share is more than a node can bear. Those with weight
0 are dealt last, by count: they cost nothing before they are drawn. A former owner keeps a source
where that makes no node worse: what it read ahead is good there. Ties by node, then by source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from federation.model.owners import Owners

PPM = 1_000_000
SPLIT_FACTOR = 3
"""A source is split where its load is more than so many halves of a node's fair share."""


class Capacity(NamedTuple):
    """What a node can load with."""

    node: int
    workers: int
    """Its loader workers; 0: it loads nothing (it is drained, or gone)."""


def able_nodes(nodes: Iterable[tuple[int, str]], workers: Mapping[str, int]) -> list[Capacity]:
    """Return what nodes can load with; where all are drained each loads a little: better than no stream.

    Args:
        nodes: (number, name) of each.
        workers: Loader workers of those that may load, by name.
    """
    able = [Capacity(number, workers.get(name, 0)) for number, name in nodes]
    if any(it.workers for it in able):
        return able
    return [it._replace(workers=1) for it in able]


def assign(
    loads: Sequence[int],
    lanes: Sequence[int],
    is_streaming: Sequence[bool],
    capacities: Sequence[Capacity],
    former: Mapping[int, tuple[int, ...]] | None = None,
    fixed: Mapping[int, tuple[int, ...]] | None = None,
) -> Owners:
    """Return the owners of all sources.

    Args:
        loads: Integer load of each source: share of the mixture times cost, any unit.
        lanes: Of each source.
        is_streaming: Streaming sources have no more parts than lanes.
        capacities: Of the nodes; one at least has workers.
        former: Nodes of the parts of sources before, by source.
        fixed: Of sources that stay where they are.
    """
    able = [it for it in capacities if it.workers > 0]
    assert able, "no node loads"
    workers = sum(it.workers for it in able)
    total = sum(loads) or 1
    carried = {it.node: 0 for it in able}
    counts = {it.node: 0 for it in able}
    size = {it.node: it.workers for it in able}
    nodes: list[tuple[int, ...]] = [()] * len(loads)
    for source, stay in (fixed or {}).items():
        nodes[source] = stay
        for node in stay:
            if node in carried:
                carried[node] += -(-loads[source] // len(stay))
                counts[node] += 1
    order = sorted(
        (s for s in range(len(loads)) if not nodes[s]), key=lambda source: (-loads[source], source)
    )
    for source in order:
        parts = _parts(loads[source], total, workers, size, lanes[source], is_streaming[source])
        share = -(-loads[source] // parts)
        chosen: list[int] = []
        known = [node for node in (former or {}).get(source, ()) if node in size]
        for _ in range(parts):
            # Half a part more on the former owner costs less than reading ahead elsewhere.
            best = min(
                (node for node in size if node not in chosen),
                key=lambda node: (
                    -(
                        -PPM
                        * (carried[node] + share - (share // 2 if node in known else 0))
                        // size[node]
                    ),
                    node not in known,
                    -(-counts[node] * PPM // size[node]),
                    node,
                ),
            )
            chosen.append(best)
            carried[best] += share
            counts[best] += 1
        nodes[source] = tuple(sorted(chosen))
    return Owners(tuple(nodes), tuple(lanes))


def _parts(
    load: int, total: int, workers: int, size: Mapping[int, int], lanes: int, is_streaming: bool
) -> int:
    """Return on how many nodes a source is open: more than one where one could not bear it."""
    largest = max(size.values())
    fair = total * largest // workers
    if 2 * load <= SPLIT_FACTOR * fair:
        return 1
    parts = min(len(size), -(-load // max(fair, 1)))
    return min(parts, lanes) if is_streaming else parts
