"""Parcels over a network that loses, repeats and reorders, with processes that begin anew."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from federation.exchange_messages import FRAME_BYTES_MIN, ParcelKey
from tests.support.exchange_world import LIMITS, World

seeds = st.integers(0, 2**32 - 1)


def random_keys(world: World, count: int, generation: int = 1) -> dict[ParcelKey, int]:
    """Return parcels with their sizes."""
    rng, found = world.rng, {}
    for _ in range(count):
        producer, consumer = rng.sample(sorted(world.nodes), 2)
        key = ParcelKey("j", generation, rng.randrange(4), producer, consumer)
        found[key] = rng.choice([1, FRAME_BYTES_MIN, rng.randrange(1, 9 * FRAME_BYTES_MIN)])
    return found


def check_window(world: World) -> None:
    for node in world.nodes.values():
        assert 0 <= node.taker.on_the_way_bytes <= LIMITS.window_bytes + FRAME_BYTES_MIN


def run_chaos(world: World, keys: dict[ParcelKey, int], *, restarts: bool) -> None:
    """Offer and want all of them in some order while messages go astray."""
    rng = world.rng
    actions = [("offer", key) for key in keys] + [("want", key) for key in keys]
    rng.shuffle(actions)
    world.loss = rng.choice([0.0, 0.1, 0.5])
    for _ in range(rng.randrange(50, 400)):
        if actions and rng.random() < 0.3:
            what, key = actions.pop()
            if what == "offer":
                world.nodes[key.producer].offer(key, keys[key])
            else:
                world.nodes[key.consumer].want(key)
        if rng.random() < 0.02:
            pair = tuple(rng.sample(sorted(world.nodes), 2))
            world.cut ^= {pair}
        if restarts and rng.random() < 0.02:
            world.may_rewrite = True
            node = rng.choice(sorted(world.nodes))
            world.nodes[node].begin()
            for other in world.nodes.values():
                if rng.random() < 0.5:  # noticed at once, or by silence alone
                    other.taker.peer_restarted(node, world.now_ns)
                    other.act()
        world.disturb()
        check_window(world)
    for what, key in actions:
        if what == "offer":
            world.nodes[key.producer].offer(key, keys[key])
        else:
            world.nodes[key.consumer].want(key)


def check_all_came(world: World, keys: dict[ParcelKey, int]) -> None:
    for name, node in world.nodes.items():
        assert Counter(node.came) == Counter(key for key in keys if key.consumer == name)
        assert Counter(node.acked) == Counter(key for key in keys if key.producer == name)
        assert not node.offers
        assert not node.wants
        assert not node.unsettled
        assert node.taker.on_the_way_bytes == 0


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_each_parcel_comes_once_whatever_happens_to_messages(seed: int) -> None:
    world = World("abc", seed)
    keys = random_keys(world, world.rng.randrange(1, 12))
    run_chaos(world, keys, restarts=False)
    world.settle()
    check_all_came(world, keys)


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_each_parcel_comes_once_whoever_restarts(seed: int) -> None:
    world = World("abc", seed)
    keys = random_keys(world, world.rng.randrange(1, 12))
    run_chaos(world, keys, restarts=True)
    world.settle()
    check_all_came(world, keys)


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_nothing_of_a_dropped_generation_comes_or_is_written(seed: int) -> None:
    world = World("abc", seed)
    old, new = random_keys(world, 6, 1), random_keys(world, 6, 2)
    run_chaos(world, old, restarts=world.rng.random() < 0.3)
    names = sorted(world.nodes)
    world.rng.shuffle(names)
    came = {name: len(world.nodes[name].came) for name in names}
    for name in names:  # each node hears of it at another time; frames into its rooms are refused
        world.nodes[name].drop(1)
        came[name] = len(world.nodes[name].came)
        for _ in range(30):
            world.disturb()
    for key, size in old.items():  # too late
        world.nodes[key.producer].offer(key, size)
        world.nodes[key.consumer].want(key)
    run_chaos(world, new, restarts=False)
    world.settle()
    for name, node in world.nodes.items():
        assert Counter(node.came[came[name] :]) == Counter(
            key for key in new if key.consumer == name
        )
        assert not node.offers
        assert len(node.giver) == 0


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_what_is_withdrawn_is_not_written_and_the_others_come(seed: int) -> None:
    world = World("ab", seed)
    keys = random_keys(world, 10)
    gone = set(world.rng.sample(sorted(keys), len(keys) // 2))
    for key, size in keys.items():
        world.nodes[key.producer].offer(key, size)
        world.nodes[key.consumer].want(key)
    for _ in range(world.rng.randrange(60)):
        world.disturb()
    for key in gone:
        world.nodes[key.consumer].withdraw(key)
        world.nodes[key.producer].withdraw(key)
    world.settle()
    for key in keys:
        times = world.nodes[key.consumer].came.count(key)
        assert times == 1 or (key in gone and times == 0)
        assert key not in world.nodes[key.producer].offers


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 4))
def test_a_damaged_parcel_is_asked_for_again_and_then_given_up(seed: int, times: int) -> None:
    world = World("ab", seed)
    world.may_rewrite = True
    key = ParcelKey("j", 1, 0, "a", "b")
    world.nodes["b"].spoil = times
    world.nodes["a"].offer(key, 3 * FRAME_BYTES_MIN + 5)
    world.nodes["b"].want(key)
    world.settle()
    assert world.nodes["b"].came == ([key] if times < 3 else [])
    assert world.nodes["b"].failed == ([] if times < 3 else [key])
