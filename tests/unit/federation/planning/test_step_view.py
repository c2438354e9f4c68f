"""A step as people look at it adds up to its plan."""

import numpy as np

from federation.model.cost import CostSpec
from federation.model.job import BatchRule
from federation.model.place_tree import ClientPlaceTree
from federation.planning.costs import plan_row_costs
from federation.planning.step_view import view_step
from tests.support.metadata import Feed, make_job, make_spec, random_corpus, start

MESH = {"pp": 2, "dp": 4, "tp": 2}


def viewed(nodes=()):
    specs = [make_spec("web"), make_spec("books")]
    corpora = [random_corpus(spec, place, lambda rng: rng.randint(1, 70))
               for place, spec in enumerate(specs)]  # fmt: skip
    job = make_job(specs, BatchRule(rows=16, row_tokens=64, microbatch_rows=2), [3, 1],
                   cost=CostSpec("transformer", 5, 1))  # fmt: skip
    plan = Feed(start(job, MESH), corpora).steps(4)[-1]
    tree = ClientPlaceTree.from_mesh(MESH, nodes)
    return plan, view_step(plan, tree, ("web", "books"), plan_row_costs(job.cost, plan), "mix()")


def test_cells_and_flows_add_up():
    plan, view = viewed()
    assert view.cell_costs.shape == (4, 2)
    assert view.cell_costs.sum(axis=1).max() == plan.cost_max
    assert view.cell_costs.sum() / 4 == plan.cost_mean
    assert view.cell_tokens.sum() == plan.length.sum()
    assert view.cell_segments.sum() == len(plan.length)
    placed = sum(flow.placed for flow in view.sources)
    drawn_now = sum(flow.drawn - flow.carried for flow in view.sources)
    assert placed == drawn_now + view.from_pool_tokens == int(view.cell_tokens.sum())
    assert view.carried_tokens == plan.carried_tokens


def test_places_list_every_rank_once_by_node():
    nodes = [rank % 3 for rank in range(16)]
    _, view = viewed(nodes)
    tree = ClientPlaceTree.from_mesh(MESH, nodes)
    listed = []
    for place in view.places:
        for stage, ranks in place.ranks:
            assert {tree.stage(rank) for rank in ranks} == {stage}
            assert {tree.dp_group(rank) for rank in ranks} == {place.group}
            assert {nodes[rank] for rank in ranks} == {place.node}
            listed += ranks
    assert sorted(listed) == list(range(16))
    assert [place.node for place in view.places] == sorted(place.node for place in view.places)


def test_plain_form_is_json():
    import json

    _, view = viewed()
    plain = json.loads(json.dumps(view.plain()))
    assert np.array(plain["groups"][1]["costs"]).tolist() == view.cell_costs[1].tolist()
