"""Any chain of verbs, on any mesh, however metadata comes: the same step, every sample placed once."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.cost import CostSpec
from federation.model.job import BatchRule, ErrorPolicy
from federation.model.place_tree import ClientPlaceTree
from federation.planning.balance import METHODS, OBJECTIVES
from federation.planning.planner import StepPlanner
from tests.support.metadata import Feed, initial_state, make_job, make_spec, random_corpus

ROWS, MICROBATCH_ROWS, STEPS = 48, 2, 4
MESHES = (
    {"dp": 1}, {"dp": 4}, {"pp": 3, "dp": 2}, {"dp_replicate": 2, "dp_shard": 3}, {"tp": 2, "dp": 8},
    {"cp": 2, "dp": 12, "pp": 2},
)  # fmt: skip


def chain_of(data, tree):
    """Return a strategy of random verbs behind mix and distribute."""
    dp = tree.dp_count
    group_size = data.draw(st.sampled_from([None, *(n for n in range(1, dp + 1) if dp % n == 0)]))
    axis = data.draw(
        st.sampled_from([a for a in tree.axes if a in ("dp", "cp", "dp_shard")] or ["dp"])
    )
    verbs = data.draw(
        st.lists(st.sampled_from(("cost", "balance", "shuffle", "broadcast")), max_size=4)
    )
    method = data.draw(st.sampled_from(METHODS))
    objective = data.draw(st.sampled_from(tuple(OBJECTIVES)))
    min_gain = data.draw(st.sampled_from((0.0, 0.02, 1.0)))
    tolerance = data.draw(st.sampled_from((0.0, 0.05)))
    is_local = data.draw(st.booleans())

    def strategy(graph, step):
        graph = graph.mix(graph.schedule).distribute(axis, group_size)
        for verb in verbs:
            if verb == "cost":
                graph = graph.cost(graph.cost_model)
            elif verb == "shuffle":
                graph = graph.shuffle(step)
            elif verb == "broadcast":
                graph = graph.broadcast_at(tree.axes[0])
            else:
                local = None
                if is_local:
                    rng = np.random.default_rng(step)
                    local = rng.integers(0, 1000, (ROWS, tree.node_count))
                graph = graph.balance(
                    method, objective, min_gain=min_gain, tolerance=tolerance, local_bytes=local
                )
        return graph

    return strategy


def planned(job, corpora, tree, strategy, seed):
    """Return the plans of a feed whose chunks and order of arrival a seed sets."""
    rng = random.Random(seed)
    planner = StepPlanner(job, tree, initial_state(job), strategy)
    feed = Feed(planner, corpora, rng.randint(1, 3), rng.randint(1, 40), seed, rng.random() / 2)
    return feed.steps(STEPS), planner


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**31))
def test_a_step_holds_the_same_whatever_is_done_with_it(data, seed):
    # However many bad records there are, none ends the stream.
    listed = {"on_error": ErrorPolicy("quarantine")}
    specs = [
        make_spec("web", 3, **listed), make_spec("books", 2, **listed),
        make_spec("live", 3, "streaming", **listed),
    ]  # fmt: skip
    corpora = [random_corpus(spec, seed + place, lambda rng: rng.randint(1, 90), bad_ratio=0.02)
               for place, spec in enumerate(specs)]  # fmt: skip
    batch = BatchRule(ROWS, 64, MICROBATCH_ROWS)
    job = make_job(specs, batch, [3, 2, 1], cost=CostSpec("transformer", 7, 1))
    plain, _ = planned(job, corpora, ClientPlaceTree.from_mesh({"dp": 1}), None, seed)
    mesh = data.draw(st.sampled_from(MESHES))
    ranks = int(np.prod(list(mesh.values())))
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    tree = ClientPlaceTree.from_mesh(mesh, nodes)
    plans, planner = planned(job, corpora, tree, chain_of(data, tree), seed + 1)
    assert len(plans) == len(plain) > 0
    for plan, same in zip(plans, plain, strict=True):
        assert plan.membership_digest == same.membership_digest
        assert plan.stream_digest == same.stream_digest
        assert (plan.valid_tokens, plan.carried_tokens) == (same.valid_tokens, same.carried_tokens)
        check_placement(plan, tree)
    check_conservation(planner)


def check_placement(plan, tree):
    """Every place of the mesh's microbatches holds one row."""
    cells = tree.dp_count * plan.microbatch_count
    place = (plan.row_dp * plan.microbatch_count + plan.row_microbatch) * MICROBATCH_ROWS
    places = np.sort(place + plan.row_slot)
    assert np.array_equal(places, np.arange(cells * MICROBATCH_ROWS))
    assert plan.cost_max >= plan.cost_mean


def check_conservation(planner):
    """Tokens drawn are delivered or carried."""
    found = planner.statistics()
    drawn, delivered = sum(found.drawn_tokens), sum(found.delivered_tokens)
    assert drawn == delivered + found.carried_tokens
