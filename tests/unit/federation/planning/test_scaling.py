"""What the scaler decides: splits, moves, workers, parks; what it lets be."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from federation.planning.scaling import (
    BUSY,
    DEPTH_MAX,
    SECOND_NS,
    Decision,
    Scaling,
    ScalingRule,
    SourceView,
)

RULE = ScalingRule(1, 8)


def view(work: int, workers: tuple[int, ...] = (0,), **changes: object) -> SourceView:
    made = SourceView(work, 0, work, 0, workers, 1 << 16)
    return replace(made, **changes)  # type: ignore[arg-type]


class World:
    """Carries decisions out at once."""

    def __init__(self, views: list[SourceView], workers: int, rule: ScalingRule = RULE) -> None:
        self.views, self.workers = views, workers
        self.scaling = Scaling(rule, len(views))
        self.now_ns = 0

    def look(self, seconds: float = 0.5, *, is_hungry: bool = False) -> Decision:
        self.now_ns += int(seconds * SECOND_NS)
        made = self.scaling.decide(
            self.views, workers=self.workers, is_hungry=is_hungry, now_ns=self.now_ns
        )
        self.workers = max(made.workers, self.workers - 1)
        for deal in made.deals:
            self.views[deal.source] = replace(self.views[deal.source], workers=deal.workers)
        for depth in made.depths:
            self.views[depth.source] = replace(self.views[depth.source], depth=depth.blocks)
        for source in made.parked:
            self.views[source] = replace(self.views[source], is_parked=True)
        return made

    def settle(self, looks: int = 200) -> None:
        for _ in range(looks):
            self.look()

    def loads(self) -> list[int]:
        loads = [0] * self.workers
        for it in self.views:
            for worker in it.workers:
                loads[worker] += it.work // len(it.workers)
        return loads


def test_a_source_that_is_more_than_a_worker_can_do_is_split_over_as_many_as_it_needs():
    world = World([view(2600), view(100)], 4)
    (deal,) = world.look().deals
    assert deal.source == 0
    assert len(deal.workers) == len(set(deal.workers)) == 4
    assert "2.60 workers" in deal.reason


def test_workers_are_started_for_what_is_needed_and_no_more_than_the_budget():
    assert World([view(3000, (0, 1))], 2).look().workers == 4
    assert World([view(50_000, (0, 1))], 2).look().workers == 8


def test_a_source_is_split_before_its_share_grows():
    world = World([view(500), view(10, work_ahead=2500)], 4)
    deals = world.look().deals
    assert [len(deal.workers) for deal in deals if deal.source == 1] == [4]
    assert "soon" in deals[-1].reason


def test_light_sources_share_workers_and_nobody_moves_where_no_worker_is_busy():
    world = World([view(20, (0,)) for _ in range(30)], 4)
    assert world.look().deals == ()


def test_partitions_move_from_the_worker_that_has_most():
    world = World([view(400, (0,)) for _ in range(6)], 4)
    assert world.loads() == [2400, 0, 0, 0]
    world.settle(8)
    assert max(world.loads()) <= 800


def test_what_was_moved_is_let_be_for_a_while():
    world = World([view(700, (0,)), view(700, (0,))], 2)
    moved = [deal.source for deal in world.look().deals]
    assert moved
    world.views = [view(700, (1,)), view(700, (1,))]
    again = [deal.source for deal in world.look(0.5).deals]
    assert not set(moved) & set(again)


def test_a_load_that_swings_a_little_moves_nothing():
    rng = random.Random(3)
    base = [300, 900, 1500, 200, 700]
    world = World([view(load) for load in base], 4)
    world.settle(60)
    deals = 0
    for _ in range(200):
        world.views = [
            replace(it, work=int(load * rng.uniform(0.9, 1.1)), work_ahead=load)
            for it, load in zip(world.views, base, strict=True)
        ]
        deals += len(world.look().deals)
    assert deals <= 2


def test_a_source_that_needs_less_gets_less_once_that_lasts():
    world = World([view(3000, (0, 1, 2, 3)), view(100, (0,))], 4)
    world.settle(30)
    before = len(world.views[0].workers)
    world.views[0] = replace(world.views[0], work=200, work_ahead=200)
    world.look(1.0)
    assert len(world.views[0].workers) == before
    world.settle(80)
    assert len(world.views[0].workers) == 1


def test_workers_leave_one_by_one_after_a_long_while_and_their_partitions_before_them():
    world = World([view(100, (3,)), view(100, (2,))], 4)
    counts = []
    for _ in range(200):
        world.look(1.0)
        counts.append(world.workers)
        assert all(max(it.workers) < 4 for it in world.views)
    assert counts[25] == 4
    assert counts[-1] == 1
    assert all(it.workers == (0,) for it in world.views)
    assert all(before - after in (0, 1) for before, after in itertools.pairwise(counts))


def test_hungry_ranks_bring_more_workers_than_the_load_says():
    assert World([view(1900, (0, 1))], 2, ScalingRule(1, 8)).look(is_hungry=True).workers == 4
    assert World([view(900, (0, 1))], 2, ScalingRule(1, 8)).look(is_hungry=True).workers == 2


def test_sources_without_a_share_keep_nothing_open_once_that_lasts():
    world = World([view(0), view(500), view(0, work_ahead=300)], 2)
    assert world.look().parked == ()
    world.settle(10)
    parked = world.look(RULE.shrink_ns / SECOND_NS).parked
    assert parked == (0,)
    assert world.look().parked == ()


def test_a_source_that_waits_for_reads_fetches_ahead_before_it_is_split():
    slow = SourceView(100, 2400, 100, 2400, (0,), 1 << 16)
    world = World([slow, view(100)], 4)
    first = world.look()
    assert [(depth.source, depth.blocks) for depth in first.depths] == [(0, 1)]
    assert "96 %" in first.depths[0].reason
    assert all(len(deal.workers) == 1 for deal in first.deals)
    while world.views[0].depth < DEPTH_MAX:
        world.look()
    world.settle(5)
    assert len(world.views[0].workers) > 1  # all blocks ahead were not enough


def test_an_operators_number_holds_whatever_the_load():
    world = World([view(10, pinned=3), view(3000, pinned=1)], 4)
    world.settle(60)
    assert [len(it.workers) for it in world.views] == [3, 1]
    named = World([view(10, pinned=2, pinned_to=(3, 1))], 4)
    named.settle(5)
    assert named.views[0].workers == (3, 1)


def test_streams_have_no_more_partitions_than_lanes():
    world = World([view(5000, partitions_max=2)], 8)
    world.settle(20)
    assert len(world.views[0].workers) == 2


def test_what_others_load_and_what_was_never_measured_is_let_be():
    world = World([view(5000, ()), view(0, (0, 1), is_known=False)], 4)
    assert world.look().deals == ()


@pytest.mark.parametrize("seed", range(30))
def test_any_world_comes_to_rest_balanced_within_its_bounds(seed: int) -> None:
    rng = random.Random(seed)
    workers = rng.randint(2, 8)
    rule = ScalingRule(1, rng.randint(workers, 12))
    views = [
        view(int(10 ** rng.uniform(0, 3.3)), (rng.randrange(workers),))
        for _ in range(rng.randint(1, 40))
    ]
    world = World(views, workers, rule)
    world.settle(400)
    assert not world.look().deals
    assert 1 <= world.workers <= rule.workers_max
    for it in world.views:
        assert len(set(it.workers)) == len(it.workers)
        assert all(0 <= worker < world.workers for worker in it.workers)
    loads, total = world.loads(), sum(it.work for it in world.views)
    largest = max(it.work // len(it.workers) for it in world.views)
    assert max(loads) <= max(
        BUSY, 13 * total // (10 * world.workers), 11 * largest // 10 + total // world.workers
    )


def test_a_decision_is_a_function_of_what_was_seen() -> None:
    def run() -> list[Decision]:
        world = World([view(700 + 10 * n, (n % 3,)) for n in range(12)], 3)
        return [world.look() for _ in range(50)]

    assert run() == run()


def test_no_deal_is_narrowed_before_its_source_was_measured_or_while_ranks_wait_for_it():
    wide = view(0, (0, 1, 2, 3), partitions_max=1, is_measured=False)
    waited = view(0, (0, 1, 2, 3), is_waited_for=True)
    world = World([wide, waited], 4, ScalingRule(4, 4))
    world.settle(60)
    assert [len(it.workers) for it in world.views] == [4, 4]
    world.views = [
        replace(world.views[0], is_measured=True),
        replace(world.views[1], is_waited_for=False),
    ]
    assert world.look().deals == ()
    world.settle(60)
    assert [len(it.workers) for it in world.views] == [1, 1]


def test_a_deal_by_hand_that_was_given_back_is_not_narrowed_at_once():
    world = World([view(0, (0,), pinned=3)], 4, ScalingRule(4, 4))
    world.settle(60)
    world.views[0] = replace(world.views[0], pinned=None)
    assert world.look().deals == ()
    assert len(world.views[0].workers) == 3
    world.settle(60)
    assert len(world.views[0].workers) == 1


def test_a_source_that_ranks_wait_for_is_widened_though_its_loaders_bound_its_load():
    world = World([view(300, is_waited_for=True, is_busy=True), view(100)], 2)
    assert world.look(is_hungry=True).deals == ()  # one look says little
    for _ in range(60):
        world.look(is_hungry=True)
    assert len(world.views[0].workers) == world.workers == RULE.workers_max
    assert len(world.views[1].workers) == 1


def test_a_source_whose_loaders_idle_is_not_widened_by_a_wait():
    world = World([view(300, is_waited_for=True), view(100)], 2)
    for _ in range(60):
        assert world.look(is_hungry=True).deals == ()
    assert world.workers == 2
