"""How fast ranks take steps, as far as it was seen."""

import pytest

from msd_daemon.core.consumption import SECOND_NS, Consumption


def run(
    made: Consumption, rate: float, seconds: float, begin_s: float = 0, steps: float = 0
) -> None:
    for look in range(int(seconds * 2) + 1):
        made.look(int(steps + rate * look / 2), int((begin_s + look / 2) * SECOND_NS))


def test_a_steady_rate_is_found_soon():
    made = Consumption()
    run(made, 10, 4)
    assert made.steps_s == pytest.approx(10, rel=0.1)


def test_nothing_is_said_of_the_first_seconds():
    made = Consumption()
    run(made, 10, 2)
    assert made.steps_s == 0


def test_slow_steps_are_not_taken_for_fast_ones():
    made = Consumption()
    run(made, 0.1, 300)
    assert 0.08 < made.steps_s < 0.2


def test_a_rate_outlives_a_drought_and_is_forgotten_slowly():
    made = Consumption()
    run(made, 10, 10)
    run(made, 2, 10, 10, 100)
    assert made.steps_s > 7
    run(made, 2, 600, 20, 120)
    assert made.steps_s == pytest.approx(2, rel=0.2)


def test_another_generation_counts_anew_and_keeps_the_rate():
    made = Consumption()
    run(made, 10, 10)
    made.restart()
    run(made, 10, 1, 11)
    assert made.steps_s > 9
