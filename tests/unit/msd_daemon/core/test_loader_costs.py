"""Live costs of sources: averages of the last chunks, totals of all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_daemon.core.loader_costs import KNOWN_TOKENS, NO_COST, LoaderCosts, ReadCost


def test_nothing_is_known_of_a_source_without_chunks() -> None:
    cost = LoaderCosts(2).of(1)
    assert (cost.work_ns_per_sample, cost.wait_ns_per_token, cost.samples) == (0, 0.0, 0)
    assert cost.wait_ratio == 0.0


def test_costs_are_of_their_source_and_work_is_cpu_and_the_users_code() -> None:
    costs = LoaderCosts(2)
    costs.add(1, 10, 200, ReadCost(3_000, 2_000, 15_000, 4_000))
    cost = costs.of(1)
    assert cost.work_ns_per_sample == 500
    assert cost.wait_ns_per_sample == 1_500
    assert (cost.work_ns_per_token, cost.tokens_per_sample, cost.bytes_per_sample) == (25, 20, 400)
    assert (cost.samples, cost.tokens, cost.cpu_ns, cost.user_ns) == (10, 200, 3_000, 2_000)
    assert cost.wait_ratio == 0.75
    assert costs.of(0).samples == 0


def test_a_chunk_of_no_time_tells_nothing() -> None:
    costs = LoaderCosts(1)
    costs.add(0, 10, 200, NO_COST)
    assert costs.of(0).samples == 0


@given(old=st.integers(1, 10**8), new=st.integers(1, 10**8), samples=st.integers(1, 50))
def test_an_average_follows_what_changed_and_totals_keep_all(
    old: int, new: int, samples: int
) -> None:
    costs = LoaderCosts(1)
    for cost in [old] * 50 + [new] * 400:
        costs.add(0, samples, samples, ReadCost(cpu_ns=cost * samples))
    found = costs.of(0)
    assert abs(found.work_ns_per_sample - new) <= 1 + new // 1000 + abs(old - new) // 1000
    assert found.cpu_ns == (50 * old + 400 * new) * samples
    assert found.samples == 450 * samples


def test_what_was_known_before_stands_until_chunks_tell():
    costs = LoaderCosts(2)
    costs.know(0, 1000, 100 * KNOWN_TOKENS, ReadCost(5000, 0, 300, 70))
    known = costs.of(0)
    assert known.samples == 10
    assert known.work_ns_per_token == pytest.approx(5000 / (100 * KNOWN_TOKENS), rel=0.1)
    assert costs.counted(0) == (0, 0, ReadCost()), "no total counts it"
    costs.add(0, 10, KNOWN_TOKENS, ReadCost(50 * KNOWN_TOKENS, 0, 0, 0))
    assert costs.of(0).work_ns_per_token > 20
    before = costs.of(0)
    costs.know(0, 1000, KNOWN_TOKENS, ReadCost(1, 1, 1, 1))
    assert costs.of(0) == before, "chunks told already"
    costs.know(1, 0, 0, ReadCost())
    assert costs.of(1).samples == 0
