"""With how many workers a job begins, and who reads what, by the profiles of its sources."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from federation.model.job import BatchRule, MixturePoint
from federation.model.source_profile import SourceProfile
from federation.planning.resource_table import Budgets
from msd_client.contract.state import StreamState
from msd_daemon.core.resource_needs import (
    pace_of,
    shares_of_state,
    source_needs,
    weighted_sources,
)
from msd_daemon.core.start_table import start_table
from tests.support.metadata import initial_state, make_job, make_spec

PROFILE = SourceProfile("f", "live", 100, 100, 10_000, 40_000, 40_000, 10**7, 0, 0, 1 << 20)
HEAVY = replace(PROFILE, cpu_ns=10**9)
BUDGETS = Budgets(4000, 8 << 30, 64 << 20, 4)
JOB = make_job(
    [make_spec("a"), make_spec("b"), make_spec("c")],
    BatchRule(rows=64, row_tokens=1024),
    points=(
        MixturePoint(0, {"a": 3.0, "b": 1.0}),
        MixturePoint(100, {"a": 1.0, "b": 1.0}),
    ),
)


def test_nothing_is_decided_by_halves():
    assert start_table(JOB, [3, 1, 0], [PROFILE, None, None], BUDGETS) is None
    empty = replace(PROFILE, tokens=0)
    assert start_table(JOB, [3, 1, 0], [PROFILE, empty, None], BUDGETS) is None


def test_without_a_pace_it_is_as_fast_as_the_budgets_allow():
    found = start_table(JOB, [3, 1, 0], [HEAVY, PROFILE, None], BUDGETS)
    assert found is not None
    assert found.workers == 4
    assert sorted(found.deals) == [0, 1], "what has no weight is dealt to nobody"
    assert len(found.deals[0]) > len(found.deals[1])
    assert all(worker < found.workers for deal in found.deals.values() for worker in deal)


def test_a_known_pace_takes_what_it_needs():
    found = start_table(JOB, [3, 1, 0], [PROFILE, PROFILE, None], BUDGETS, 10**10)
    assert found is not None
    assert (found.workers, found.deals) == (1, {0: (0,), 1: (0,)})


def test_a_configured_number_stays():
    fixed = BUDGETS._replace(workers_fixed=3)
    found = start_table(JOB, [3, 1, 0], [PROFILE, PROFILE, None], fixed, 10**10)
    assert found is not None
    assert found.workers == 3


def test_memory_that_fits_no_step_decides_nothing():
    tight = BUDGETS._replace(memory_bytes=1)
    assert start_table(JOB, [3, 1, 0], [PROFILE, PROFILE, None], tight) is None


def test_shares_are_the_states_and_before_its_first_step_the_schedules():
    state = initial_state(JOB)
    first = shares_of_state(JOB, state)
    assert first[0] == 3 * first[1]
    assert first[2] == 0
    running = replace(state, shares=np.array([0, 5, 5], np.int64))
    assert shares_of_state(JOB, running) == [0, 5, 5]
    renamed: StreamState = replace(running, source_names=("a", "b", "z"))
    assert shares_of_state(JOB, renamed) == first
    assert weighted_sources(JOB) == [0, 1]


def test_media_beside_the_tokens_are_counted_as_payload():
    needs = source_needs(JOB, [1, 0, 0], [PROFILE, None, None])
    assert pace_of(JOB, needs, 1).payload_bytes == 0
    with_media = replace(PROFILE, chunk_bytes=140_000)
    needs = source_needs(JOB, [1, 0, 0], [with_media, None, None])
    assert pace_of(JOB, needs, 1).payload_bytes == 64 * 1024 * 10
