"""Sources dealt to nodes: whole where one node bears them, even, and staying where they were."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from federation.model.owners import Owners
from federation.planning.assignment import Capacity, able_nodes, assign

MOST_PPM = 1_000_000


@st.composite
def cases(draw: Any) -> tuple[list[int], list[int], list[bool], list[Capacity]]:
    loads = draw(st.lists(st.integers(0, MOST_PPM), min_size=1, max_size=40))
    count = len(loads)
    lanes = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    streams = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    workers = draw(st.lists(st.integers(0, 8), min_size=1, max_size=6).filter(any))
    return loads, lanes, streams, [Capacity(node, it) for node, it in enumerate(workers)]


def carried(owners: Owners, loads: list[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for load, nodes in zip(loads, owners.nodes, strict=True):
        for node in nodes:
            found[node] = found.get(node, 0) + load / len(nodes)
    return found


@given(cases())
def test_each_source_is_on_able_nodes_and_on_one_where_that_bears_it(case: Any) -> None:
    loads, lanes, streams, capacities = case
    owners = assign(loads, lanes, streams, capacities)
    able = {it.node: it.workers for it in capacities if it.workers}
    fair = sum(loads) * max(able.values()) // sum(able.values())
    for source, nodes in enumerate(owners.nodes):
        assert nodes
        assert len(set(nodes)) == len(nodes)
        assert able.keys() >= set(nodes)
        if 2 * loads[source] <= 3 * fair:
            assert len(nodes) == 1
        if streams[source]:
            assert len(nodes) <= max(1, lanes[source])
    assert owners == assign(loads, lanes, streams, capacities), "the same on every machine"


@given(cases())
def test_no_node_bears_much_more_than_its_share(case: Any) -> None:
    loads, _lanes, _streams, capacities = case
    count = len(loads)
    owners = assign(loads, [64] * count, [False] * count, capacities)
    workers = sum(it.workers for it in capacities)
    largest = max(
        (load / len(nodes) for load, nodes in zip(loads, owners.nodes, strict=True)), default=0
    )
    for node, load in carried(owners, loads).items():
        # What list scheduling guarantees: the fair share, and the last source that came on top.
        fair = sum(loads) * capacities[node].workers / workers
        assert load <= fair + largest + count


@given(cases())
def test_what_is_fixed_stays_and_another_deal_of_the_same_moves_nothing(case: Any) -> None:
    loads, lanes, streams, capacities = case
    owners = assign(loads, lanes, streams, capacities)
    former = dict(enumerate(owners.nodes))
    assert assign(loads, lanes, streams, capacities, former) == owners
    fixed = {source: nodes for source, nodes in former.items() if source % 2}
    again = assign(loads, lanes, streams, capacities, former, fixed)
    assert all(again.nodes[source] == nodes for source, nodes in fixed.items())


def test_where_all_nodes_are_drained_each_loads_a_little() -> None:
    assert able_nodes([(0, "a"), (2, "b")], {"a": 3}) == [Capacity(0, 3), Capacity(2, 0)]
    assert able_nodes([(0, "a"), (2, "b")], {"a": 0}) == [Capacity(0, 1), Capacity(2, 1)]
