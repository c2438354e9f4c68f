import numpy as np
import pytest

from federation.model.cost import CostSpec
from federation.model.job import BatchRule, MixturePoint, MixtureSchedule
from federation.model.mixture import MixtureTimeline
from federation.model.place_tree import ClientPlaceTree
from federation.planning.dgraph import DGraph, SampleState
from federation.planning.step_pool import Pool
from federation.planning.strategies import STRATEGIES, find_strategy
from msd_client.contract.errors import ConfigError, MeshMismatchError, UsageError


class FixedSampler:
    """Draws one given pool."""

    def __init__(self, lengths, is_last=True):
        self.pool = np.zeros((6, len(lengths)), np.int64)
        self.pool[2] = np.arange(len(lengths))
        self.pool[4] = lengths
        self.is_last = is_last

    def draw(self, schedule, delay=None):
        return Pool(self.pool, 0, is_last=self.is_last)


def graph(lengths=(4, 9, 7, 2), mesh=None, batch=None, ids=(11,)):
    return DGraph(
        FixedSampler(lengths),
        ClientPlaceTree.from_mesh(mesh or {"dp": 2}),
        batch or BatchRule(4, 10),
        schedule=MixtureTimeline(MixtureSchedule("tokens", (MixturePoint(0, {"a": 1.0}),)), ("a",)),
        cost_model=CostSpec("transformer", 1, 1),
        objective="step",
        source_ids=np.array(ids),
    )


def test_samples_move_from_drawn_to_placed():
    made = graph((4, 9, 7, 2, 10, 10, 10))
    made.mix(made.schedule)
    states = made.states().tolist()
    assert set(states) == {SampleState.DRAWN, SampleState.PACKED}
    made.distribute("dp").plan()
    assert set(made.states().tolist()) == {SampleState.DRAWN, SampleState.PLACED}
    assert made.states().tolist().count(SampleState.DRAWN) == states.count(SampleState.DRAWN)


def test_lineage_says_what_a_row_holds():
    made = graph((4, 5, 10))
    made.mix(made.schedule)
    rows = [made.lineage(row) for row in range(4)]
    assert sorted(len(row) for row in rows) == [0, 0, 1, 2]
    assert [(0, 0, 0, 0, 4), (0, 0, 1, 0, 5)] in rows


def test_every_strategy_is_a_chain_of_verbs_that_freezes_the_same_rows():
    memberships = set()
    for name in STRATEGIES:
        made = graph(batch=BatchRule(4, 10, encode="any"))
        memberships.add(find_strategy(name)(made, 0).plan().membership)
    assert len(memberships) == 1


def test_membership_follows_names_not_numbers_and_not_the_mesh():
    def membership(**options):
        made = graph(**options)
        return made.mix(made.schedule).distribute("dp").plan().membership

    assert membership() == membership(mesh={"dp": 4, "tp": 2})
    assert membership() != membership(ids=(12,))
    assert membership() != membership(lengths=(4, 9, 7, 3))


def test_verbs_out_of_order_are_refused():
    with pytest.raises(UsageError, match="after mix"):
        graph().distribute("dp")
    with pytest.raises(UsageError, match="mix\\(\\) and distribute"):
        graph().plan()
    made = graph()
    with pytest.raises(UsageError, match="mixes once"):
        made.mix(made.schedule).mix(made.schedule)
    with pytest.raises(UsageError, match="after mix"):
        graph().states()
    with pytest.raises(UsageError, match="after mix"):
        graph().lineage(0)


@pytest.mark.parametrize("key", ["a", 1.5, True, -1, 1 << 63, None])
def test_a_key_to_shuffle_by_is_a_number(key):
    made = graph()
    with pytest.raises(UsageError, match="shuffle"):
        made.mix(made.schedule).distribute("dp").shuffle(key)


@pytest.mark.parametrize("schedule", [5, None, {"a": 1.0}])
def test_only_a_schedule_is_mixed_by(schedule):
    with pytest.raises(UsageError, match=r"graph\.schedule"):
        graph().mix(schedule)


def test_axes_groups_and_methods_that_do_not_fit_are_refused():
    made = graph(mesh={"dp": 2, "tp": 2})
    made.mix(made.schedule)
    with pytest.raises(MeshMismatchError, match="2 groups for 4 ranks"):
        made.distribute("world")
    with pytest.raises(MeshMismatchError, match="no axis 'cp'"):
        made.distribute("cp")
    with pytest.raises(MeshMismatchError, match="group_size 3"):
        made.distribute("dp", group_size=3)
    with pytest.raises(ConfigError, match="'magic' is none of"):
        made.balance("magic")
    with pytest.raises(ConfigError, match="'speed' is none of"):
        made.balance("greedy", "speed")
    with pytest.raises(ConfigError, match="min_gain 5 is no share; write a number from 0 to 1"):
        made.balance("greedy", min_gain=5)
    with pytest.raises(ConfigError, match="tolerance nan is no share"):
        made.balance("greedy", tolerance=float("nan"))
    with pytest.raises(UsageError, match=r"shape \(4, 2\), .* need \(4, 1\)"):
        made.balance("greedy", local_bytes=np.zeros((4, 2), np.int64))
    with pytest.raises(MeshMismatchError, match="no axis 'cp'"):
        made.broadcast_at("cp")


def test_broadcast_axes_are_in_the_plan():
    made = graph(mesh={"dp": 2, "tp": 2})
    plan = made.mix(made.schedule).distribute("dp").broadcast_at("tp").plan()
    assert plan.broadcast_axes == ("tp",)


def test_only_the_last_step_may_leave_rows_empty():
    made = graph((4,))
    made._sampler.is_last = False
    with pytest.raises(AssertionError, match="only the last step"):
        made.mix(made.schedule).distribute("dp").plan()
    plan = graph((4,))
    made = plan.mix(plan.schedule).distribute("dp").cost(plan.cost_model).plan()
    assert sorted(made.rank_costs.tolist()) == [0, 20]


def placed(made, *arguments, **options):
    made.mix(made.schedule).distribute("dp").cost(made.cost_model)
    return made.balance(*arguments, **options).plan()


@pytest.mark.parametrize("method", ["greedy", "karmarkar_karp"])
@pytest.mark.parametrize("objective", ["step", "microbatch", "pipeline"])
def test_balance_moves_rows_and_changes_none(method, objective):
    lengths = np.random.default_rng(3).integers(1, 100, 200)
    options = {"lengths": lengths, "mesh": {"pp": 2, "dp": 4}, "batch": BatchRule(32, 100)}
    plain = placed(graph(**options), "none")
    even = placed(graph(**options), method, objective)
    assert even.membership == plain.membership
    assert even.rank_costs.sum() == plain.rank_costs.sum()
    assert even.rank_costs.max() <= plain.rank_costs.max()
    assert np.bincount(even.placement.dp).tolist() == [8] * 4


def test_the_pipeline_objective_looks_at_the_stages_of_the_mesh():
    lengths = np.random.default_rng(4).integers(1, 100, 300)
    placements = [
        placed(
            graph(lengths, {"pp": stages, "dp": 2}, BatchRule(32, 100)), "greedy", "pipeline"
        ).placement
        for stages in (1, 4)
    ]
    assert not np.array_equal(placements[0].microbatch, placements[1].microbatch)


def test_what_gains_too_little_leaves_rows_in_turn():
    lengths = np.random.default_rng(5).integers(1, 100, 200)
    made = placed(graph(lengths, {"dp": 4}, BatchRule(32, 100)), "greedy", min_gain=0.9)
    assert made.placement.dp.tolist() == [0, 1, 2, 3] * 8


def test_rows_go_where_their_bytes_lie():
    mesh, nodes = {"dp": 2}, (0, 1)
    made = DGraph(
        FixedSampler((10, 10, 10, 10)),
        ClientPlaceTree.from_mesh(mesh, nodes),
        BatchRule(4, 10),
        schedule=graph().schedule,
        cost_model=CostSpec(),
        objective="step",
        source_ids=np.array([11]),
    )
    local = np.array([[0, 40], [0, 40], [40, 0], [40, 0]])
    assert placed(made, "greedy", local_bytes=local).placement.dp.tolist() == [1, 1, 0, 0]


def test_bytes_of_blocks_that_are_dealt_to_nodes_in_turn_are_told_by_the_graph():
    def made_of(token_bytes):
        made = DGraph(
            FixedSampler((10, 10, 10, 10)),
            ClientPlaceTree.from_mesh({"dp": 2}, (0, 2)),  # no rank on node 1: it reads nothing
            BatchRule(4, 10),
            schedule=graph().schedule,
            cost_model=CostSpec(),
            objective="step",
            source_ids=np.array([11]),
            token_bytes=np.array([token_bytes]),
        )
        made._sampler.pool[1] = [1, 1, 0, 2]
        return made

    near, far = made_of(4), made_of(2)
    rows = placed(near, "greedy", is_local=True).packed.segments[1]
    assert [int(rows[row] % 2) for row in np.flatnonzero(near.plan().placement.dp)] == [1, 1]
    assert near.crossing_bytes() == 0
    placed(far, "greedy")
    assert far.crossing_bytes() == 2 * 10 * 2  # two of the four rows, ids of two bytes
    assert near.chain.endswith("balance(greedy, step, is_local)")


def test_varlen_steps_have_no_rows_to_give_bytes_of():
    made = graph(batch=BatchRule(5, 10, packing="varlen", step_tokens=40), mesh={"dp": 2})
    with pytest.raises(UsageError, match="write is_local=True"):
        made.balance("greedy", local_bytes=np.zeros((5, 1), np.int64))
