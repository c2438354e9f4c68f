"""Place trees of every ordering of axes agree with a mesh of nested lists."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.place_tree import AXES, DP_AXES, STAGES, ClientPlaceTree

ORDERINGS = [
    axes
    for count in range(6)
    for axes in itertools.permutations(("pp", "dp", "cp", "tp", "ep"), count)
]


def expected(axes, sizes):
    """Return (coordinate, dp group, cp rank, stage) of each rank, one by one."""
    found = []
    for place in itertools.product(*map(range, sizes)):
        where = dict(zip(axes, place, strict=True))
        size = dict(zip(axes, sizes, strict=True))
        group = 0
        for axis in axes:
            if axis in DP_AXES:
                group = group * size[axis] + where[axis]
        stage = "all"
        if size.get("pp", 1) > 1:
            stage = {0: "first", size["pp"] - 1: "last"}.get(where["pp"], "middle")
        found.append((where, group, where.get("cp", 0), stage))
    return found


def check(axes, sizes, nodes):
    tree = ClientPlaceTree.from_mesh(dict(zip(axes, sizes, strict=True)), nodes)
    ranks = expected(axes, sizes)
    assert tree.rank_count == len(ranks)
    for rank, (where, group, cp_rank, stage) in enumerate(ranks):
        assert tree.coordinate(rank) == where
        assert tree.dp_group(rank) == group
        assert tree.cp_rank(rank) == cp_rank
        assert tree.stage(rank) == stage
    for axis in axes:
        assert tree.first_ranks(axis) == tuple(
            rank for rank, (where, *_) in enumerate(ranks) if where[axis] == 0
        )
    held = set()
    for group in range(tree.dp_count):
        own = [rank for rank, (_, other, *_) in enumerate(ranks) if other == group]
        assert tree.ranks_of_dp_group(group) == tuple(own)
        assert tree.nodes_of_dp_group(group) == (
            tuple(sorted({nodes[rank] for rank in own})) if nodes else (0,)
        )
        held.update((node, group) for node in tree.nodes_of_dp_group(group))
    listed = {
        (node, group)
        for node in range(max(nodes, default=0) + 2)
        for group in tree.groups_of_node(node)
    }
    assert listed == held
    check_rings(tree, ranks)


def check_rings(tree, ranks):
    rings = tree.rings()
    assert [ring.ring for ring in rings] == list(range(len(rings)))
    keys = [(ring.group, STAGES.index(ring.stage)) for ring in rings]
    assert keys == sorted(set(keys))
    for ring in rings:
        assert ring.ranks == tuple(
            rank
            for rank, (_, group, _, stage) in enumerate(ranks)
            if (group, stage) == (ring.group, ring.stage)
        )
    assert sum(len(ring.ranks) for ring in rings) == len(ranks)


@pytest.mark.parametrize("axes", ORDERINGS, ids="-".join)
def test_every_ordering_of_up_to_five_axes(axes):
    sizes = [(2, 3, 1, 2, 2)[place] for place in range(len(axes))]
    rank_count = int(np.prod(sizes)) if sizes else 1
    # Not evenly spread: 3 ranks on node 1, the rest on nodes 0 and 4.
    nodes = [1 if rank < 3 else 4 * (rank % 3 == 0) for rank in range(rank_count)]
    check(axes, sizes, [])
    check(axes, sizes, nodes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mesh_on_any_nodes(data):
    axes = data.draw(st.permutations(AXES))[: data.draw(st.integers(0, 5))]
    sizes = [data.draw(st.integers(1, 3)) for _ in axes]
    rank_count = int(np.prod(sizes)) if sizes else 1
    nodes = data.draw(st.lists(st.integers(0, 4), min_size=rank_count, max_size=rank_count))
    check(axes, sizes, nodes)
