"""The slices of all nodes hold what their groups need, and no more."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.plan_slice import slice_by_node
from federation.planning.planner import StepPlanner
from tests.support.metadata import Feed, initial_state, make_job, make_spec, random_corpus

PLACES = ("source", "block_key", "index", "offset", "length", "column")


def planned(tree, seed):
    specs = [make_spec(f"s{number}", shards=2) for number in range(3)]
    corpora = [random_corpus(spec, seed + place, lambda rng: rng.randint(1, 40))
               for place, spec in enumerate(specs)]  # fmt: skip
    job = make_job(specs, BatchRule(rows=12, row_tokens=64))
    planner = StepPlanner(job, tree, initial_state(job))
    return Feed(planner, corpora).steps(3)[-1]


def segments_of(plan):
    """Return (group, microbatch, slot, source ... column) of every segment."""
    places = [getattr(plan, name)[plan.row] for name in ("row_dp", "row_microbatch", "row_slot")]
    return Counter(zip(*(column.tolist() for column in places),
                       *(getattr(plan, name).tolist() for name in PLACES), strict=True))  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(0, 2**31))
def test_slices_are_plans_of_their_groups(data, seed):
    mesh = {"pp": data.draw(st.integers(1, 2)), "dp": data.draw(st.sampled_from([1, 2, 3, 6])),
            "tp": data.draw(st.integers(1, 2))}  # fmt: skip
    ranks = mesh["pp"] * mesh["dp"] * mesh["tp"]
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    tree = ClientPlaceTree.from_mesh(mesh, nodes)
    plan = planned(tree, seed)
    whole = segments_of(plan)
    slices = dict(slice_by_node(plan, tree))
    assert set(slices) == set(nodes)
    for node, part in slices.items():
        groups = set(tree.groups_of_node(node))
        assert part.encode_dp is None
        assert segments_of(part) == Counter(
            {place: count for place, count in whole.items() if place[0] in groups}
        )
        assert np.array_equal(np.sort(part.row), part.row)
        own_rows = np.isin(plan.row_dp, sorted(groups))
        assert np.array_equal(part.row_valid_tokens, plan.row_valid_tokens[own_rows])
        assert part.valid_tokens == plan.valid_tokens
        assert part.membership_digest == plan.membership_digest
        header, frames = part.encode()
        assert segments_of(StepPlan.decode(header, frames)) == segments_of(part)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_a_slice_has_all_media_that_its_groups_encode(seed):
    tree = ClientPlaceTree.from_mesh({"dp": 6}, [0, 0, 1, 1, 1, 2])
    plan = planned(tree, seed)
    rng = np.random.default_rng(seed)
    encode_dp = rng.integers(-1, 6, (1, len(plan.source))).astype(np.int32)
    plan = replace(plan, encode_dp=encode_dp)
    for node, part in slice_by_node(plan, tree):
        groups = tree.groups_of_node(node)
        wanted = np.isin(plan.row_dp[plan.row], groups) | np.isin(encode_dp[0], groups)
        held = set(zip(part.source.tolist(), part.block_key.tolist(), part.index.tolist(),
                       part.offset.tolist(), part.encode_dp[0].tolist(), strict=True))  # fmt: skip
        whole = zip(plan.source.tolist(), plan.block_key.tolist(), plan.index.tolist(),
                    plan.offset.tolist(), encode_dp[0].tolist(), strict=True)  # fmt: skip
        assert {place for place, is_wanted in zip(whole, wanted, strict=True) if is_wanted} <= held
        assert len(part.row_dp) == part.row.max() + 1
