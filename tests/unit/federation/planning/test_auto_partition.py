"""The table of workers and parts: what is asked for, what budgets end, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from federation.model.source_profile import SourceProfile
from federation.planning.auto_partition import (
    BASE_BYTES,
    CONSTRUCTOR_BYTES,
    WORKER_BYTES,
    fastest_step_ns,
    make_table,
)
from federation.planning.resource_costs import SourceNeed, source_loads
from federation.planning.resource_table import Budgets, Pace, ResourceTable

MIB = 1 << 20
SECOND_NS = 1_000_000_000
PACE = Pace(step_tokens=1_000_000, step_ns=SECOND_NS)
ROOMY = Budgets(cpus_milli=64_000, memory_bytes=64 << 30, shared_bytes=64 * MIB, workers_max=64)


def profile(cpu_ms: int = 0, user_ms: int = 0, wait_ms: int = 0, **more: Any) -> SourceProfile:
    """Return what costs so many milliseconds for 10^6 tokens of 1,000 samples."""
    return SourceProfile(
        **{
            "fingerprint": "f",
            "origin": "probe",
            "records": 1000,
            "samples": 1000,
            "tokens": 1_000_000,
            "read_bytes": 4_000_000,
            "chunk_bytes": 4_000_000,
            "cpu_ns": cpu_ms * 1_000_000,
            "user_ns": user_ms * 1_000_000,
            "wait_ns": wait_ms * 1_000_000,
            "open_bytes": MIB,
            **more,
        }
    )


def need(name: str, share: int, found: SourceProfile | None, **more: Any) -> SourceNeed:
    return SourceNeed(name, share, found, **more)


def table(*needs: SourceNeed, budgets: Budgets = ROOMY, pace: Pace = PACE) -> ResourceTable:
    return make_table(needs, pace, budgets)


def test_parts_that_must_wait_for_a_long_block_say_so():
    slow = need("slow", 1, profile(cpu_ms=3000), block_ns=600 * 10**9)
    quick = need("quick", 1, profile(cpu_ms=3000), block_ns=10**9)
    found = table(slow, quick)
    assert len(found.sources[0].workers) > 1
    assert "one takes 600 s" in found.sources[0].reason
    assert "shuffle.block_bytes" in found.sources[0].reason
    assert "block" not in found.sources[1].reason


def test_light_sources_share_one_worker():
    found = table(*(need(f"s{n}", 1, profile(cpu_ms=100)) for n in range(4)))
    assert len(found.workers) == 1
    assert [row.workers for row in found.sources] == [(0,)] * 4
    assert "shares worker 0 with 3" in found.sources[0].reason
    assert not found.verdict.waits


def test_a_heavy_source_is_split_and_the_light_ones_stand_beside_it():
    heavy, light = need("heavy", 3, profile(cpu_ms=4000)), need("light", 1, profile(cpu_ms=400))
    found = table(heavy, light)
    # 3/4 of 4 s is 300 %: four parts of 75 %; the light one has 10 %.
    assert found.sources[0].parts == 4
    assert len(set(found.sources[0].workers)) == 4
    assert "4 parts of 75 %" in found.sources[0].reason
    assert len(found.workers) == 5
    assert all(worker.load_ppm <= 800_000 for worker in found.workers)
    assert not found.verdict.waits


def test_weight_0_opens_nothing():
    found = table(need("on", 1, profile(cpu_ms=10)), need("off", 0, profile(cpu_ms=10**6)))
    assert found.sources[1].parts == 0
    assert found.sources[1].reason == "weight 0: nothing is opened"
    assert found.workers[0].sources == (0,)


def test_too_few_cpus_name_the_source_that_takes_most():
    found = table(
        need("cheap", 1, profile(cpu_ms=500)),
        need("dear", 1, profile(cpu_ms=9000)),
        budgets=ROOMY._replace(cpus_milli=2000),
    )
    assert (found.verdict.waits, found.verdict.source, found.verdict.stage) == (
        True, "dear", "decode",
    )  # fmt: skip
    assert "476 %" in found.verdict.reason
    assert "200 %" in found.verdict.reason


def test_the_users_code_is_named_as_the_stage():
    found = table(
        need("own", 1, profile(cpu_ms=10, user_ms=3000)), budgets=ROOMY._replace(cpus_milli=1000)
    )
    assert (found.verdict.source, found.verdict.stage) == ("own", "transform")


def test_a_stream_of_few_lanes_can_not_be_split_further():
    found = table(need("tar", 1, profile(cpu_ms=8000), is_streaming=True, lanes=4))
    assert found.sources[0].parts == 4
    assert (found.verdict.waits, found.verdict.source, found.verdict.stage) == (
        True, "tar", "decode",
    )  # fmt: skip
    assert "4 lanes" in found.verdict.reason


def test_a_source_that_waits_for_reads_has_several_under_way_not_several_processes():
    found = table(
        need("far", 1, profile(cpu_ms=100, wait_ms=1600, pair_ppm=2_000_000)),
        budgets=ROOMY._replace(cpus_milli=1000),
    )
    assert (found.sources[0].parts, found.sources[0].reads) == (1, 8)
    assert found.sources[0].load.wait_ppm == 200_000
    assert not found.verdict.waits, "one CPU is enough for what waits"
    assert table(need("near", 1, profile(cpu_ms=200, wait_ms=100))).sources[0].reads == 1


def test_a_stream_that_waits_for_reads_is_read_by_several_loaders():
    slow = profile(cpu_ms=100, wait_ms=1600, pair_ppm=2_000_000)
    found = table(need("far", 1, slow, is_streaming=True, lanes=4))
    assert (found.sources[0].parts, found.sources[0].reads) == (3, 1)


def test_a_store_that_gives_no_more_is_not_asked_by_more():
    found = table(need("slow", 1, profile(cpu_ms=100, wait_ms=2900, pair_ppm=1_050_000)))
    assert found.sources[0].parts == 1
    assert (found.verdict.waits, found.verdict.source, found.verdict.stage) == (
        True, "slow", "read",
    )  # fmt: skip
    assert "a second reader would get no more" in found.sources[0].reason


def test_a_critical_source_is_read_twice():
    one = table(need("s", 1, profile(cpu_ms=500)))
    two = table(need("s", 1, profile(cpu_ms=500), is_critical=True))
    assert two.sources[0].has_shadow
    assert not one.sources[0].has_shadow
    assert two.cpu_ppm - one.cpu_ppm == 500_000


def test_memory_ends_the_workers_and_then_the_job():
    fixed = ROOMY.shared_bytes + BASE_BYTES + CONSTRUCTOR_BYTES + MIB
    heavy = need("heavy", 1, profile(cpu_ms=4000))
    tight = ROOMY._replace(memory_bytes=fixed + 2 * WORKER_BYTES + 2 * MIB)
    found = table(heavy, budgets=tight)
    assert len(found.workers) == 2
    assert "memory allows no more" in found.workers_reason
    assert found.verdict.stage == "decode"
    none = table(heavy, budgets=ROOMY._replace(memory_bytes=fixed))
    assert (none.verdict.waits, none.verdict.stage, none.verdict.source) == (True, "memory", "")


def test_a_configured_number_of_workers_stays():
    needs = [need(f"s{n}", 1, profile(cpu_ms=100)) for n in range(2)]
    found = table(*needs, budgets=ROOMY._replace(workers_max=4, workers_fixed=4))
    assert len(found.workers) == 4
    assert found.workers[3].reason.startswith("has nothing to read")
    heavy = table(need("h", 1, profile(cpu_ms=4000)), budgets=ROOMY._replace(workers_fixed=2))
    assert len(heavy.workers) == 2
    assert heavy.verdict.waits


def test_media_make_constructors_the_limit():
    pace = PACE._replace(payload_bytes=8 << 30)
    needed = need("s", 1, profile(cpu_ms=10))
    found = table(needed, pace=pace, budgets=ROOMY._replace(constructors_max=8))
    assert (found.constructors, found.verdict.waits) == (3, False)
    alone = table(needed, pace=pace)
    assert (alone.constructors, alone.verdict.stage) == (1, "build")
    tight = table(
        need("s", 1, profile(cpu_ms=10)), pace=pace, budgets=ROOMY._replace(cpus_milli=1000)
    )
    assert tight.verdict.stage == "build"


def test_an_unmeasured_source_costs_what_the_others_do():
    loads = source_loads(
        [need("a", 1, profile(cpu_ms=100)), need("b", 1, profile(cpu_ms=300)), need("c", 2, None)],
        1_000_000, SECOND_NS, "tokens",
    )  # fmt: skip
    assert [load.cpu_ppm for load in loads] == [25_000, 75_000, 100_000]
    big = replace(profile(cpu_ms=100_000), records=10**6, samples=10**6, tokens=10**9)
    alike = source_loads(
        [need("a", 1, big), need("b", 1, profile(cpu_ms=300)), need("c", 2, None)],
        1_000_000, SECOND_NS, "tokens",
    )  # fmt: skip
    assert alike == loads, "a long measurement is no more of an average than a short one"


def test_shares_of_samples_go_by_their_length():
    long = replace(profile(cpu_ms=100), samples=100)
    loads = source_loads(
        [need("long", 1, long), need("short", 1, profile(cpu_ms=100))],
        1_100_000, SECOND_NS, "samples",
    )  # fmt: skip
    assert [load.tokens for load in loads] == [1_000_000, 100_000]


@pytest.mark.parametrize("cpus", [1, 4, 16])
def test_the_fastest_step_is_the_border_of_waiting(cpus: int):
    needs = [need("a", 1, profile(cpu_ms=2000)), need("b", 3, profile(cpu_ms=100, user_ms=700))]
    budgets = ROOMY._replace(cpus_milli=cpus * 1000)
    fastest = fastest_step_ns(needs, PACE, budgets)
    assert fastest is not None
    assert not make_table(needs, PACE._replace(step_ns=fastest), budgets).verdict.waits
    shorter = PACE._replace(step_ns=fastest * 97 // 100)
    assert make_table(needs, shorter, budgets).verdict.waits


def test_no_step_is_long_enough_where_memory_is_short():
    budgets = ROOMY._replace(memory_bytes=MIB)
    assert fastest_step_ns([need("a", 1, profile(cpu_ms=1))], PACE, budgets) is None
