"""A generation is hungry where a rank waits, though its loop holds the last slot meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msd_daemon.core.rank_waits import RankWaits
from msd_daemon.core.slots import RingState
from msd_daemon.services.generation import Generation

RANK = 3


class World:
    """What `is_hungry` looks at."""

    def __init__(self) -> None:
        self.state = RingState(2, frozenset({RANK}))
        self.fake: Any = SimpleNamespace(
            times=SimpleNamespace(first_batch_ns=1),
            _starved=[0],
            steps=SimpleNamespace(missing=lambda: None),
            rings={0: SimpleNamespace(state=self.state)},
            waits=RankWaits(),
            number=1,
            trace=None,
            _released=lambda _: None,
            _settle=lambda: None,
        )

    def publish(self) -> tuple[int, int]:
        slot, sequence = self.state.begin_fill(0)
        self.state.fill_ended(slot, sequence, 1, 0)
        self.fake.waits.served([RANK])
        return slot, sequence

    def release(self, held: tuple[int, int], taken: int, waited_ns: int) -> None:
        event = SimpleNamespace(
            generation=1, slot=held[0], sequence=held[1], payload_bytes=taken, aux=waited_ns
        )
        Generation.released(self.fake, RANK, 0, event)  # type: ignore[arg-type]

    @property
    def is_hungry(self) -> bool:
        getter: Any = Generation.is_hungry.fget  # type: ignore[attr-defined]
        return bool(getter(self.fake))


def test_a_rank_that_says_it_waits_is_hungry_though_it_holds_a_slot() -> None:
    world = World()
    world.publish()
    assert not world.is_hungry  # nobody took it yet
    Generation.rank_waits(world.fake, RANK, 0, 50, 1)
    assert world.is_hungry
    world.publish()
    assert not world.is_hungry
    Generation.rank_waits(world.fake, RANK, 0, 50, 1)  # this word crossed the batch
    assert not world.is_hungry


def test_a_loop_that_holds_its_last_slot_is_hungry_where_it_had_to_wait_of_late() -> None:
    world = World()
    held = world.publish()
    for _ in range(2):
        after = world.publish()
        world.release(held, after[1] + 1, 200_000_000)
        held = after
    assert world.is_hungry
    after = world.publish()
    assert not world.is_hungry
    world.release(held, after[1] + 1, 0)  # it came at once
    assert not world.is_hungry
    world.release(after, after[1] + 1, 0)
    assert world.is_hungry  # holds nothing, and nothing is there
    world.fake._starved = []
    assert not world.is_hungry
