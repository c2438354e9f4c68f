"""Whatever the profiles and budgets: every part has a worker, nothing is lost, no budget is broken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.source_profile import SourceProfile
from federation.planning.auto_partition import BASE_BYTES, make_table
from federation.planning.resource_costs import SourceNeed
from federation.planning.resource_table import Budgets, Pace

MIB = 1 << 20


@st.composite
def profiles(draw: st.DrawFn) -> SourceProfile:
    times = [draw(st.integers(0, 10**11)) for _ in range(3)]
    samples = draw(st.integers(1, 10**6))
    return SourceProfile(
        fingerprint="f",
        origin=draw(st.sampled_from(["probe", "live"])),
        records=samples + draw(st.integers(0, 100)),
        samples=samples,
        tokens=samples * draw(st.integers(1, 5000)),
        read_bytes=draw(st.integers(0, 10**9)),
        chunk_bytes=draw(st.integers(0, 10**9)),
        cpu_ns=times[0],
        user_ns=times[1],
        wait_ns=times[2],
        open_bytes=draw(st.integers(0, 64 * MIB)),
        pair_ppm=draw(st.sampled_from([0, 1_000_000, 1_500_000, 1_500_001, 2_000_000])),
    )


@st.composite
def all_needs(draw: st.DrawFn) -> list[SourceNeed]:
    count = draw(st.integers(1, 12))
    needs = [
        SourceNeed(
            f"s{number}",
            draw(st.one_of(st.just(0), st.integers(1, 1 << 40))),
            draw(st.one_of(st.none(), profiles())),
            lanes=draw(st.integers(1, 8)),
            is_streaming=draw(st.booleans()),
            is_critical=draw(st.booleans()),
        )
        for number in range(count)
    ]
    needs[0] = needs[0]._replace(share=max(needs[0].share, 1), profile=draw(profiles()))
    return needs


budget_sets = st.builds(
    Budgets,
    cpus_milli=st.integers(100, 128_000),
    memory_bytes=st.integers(1, 64 << 30),
    shared_bytes=st.integers(0, 1 << 30),
    workers_max=st.integers(1, 24),
    workers_fixed=st.one_of(st.just(0), st.integers(1, 8)),
)
paces = st.builds(
    Pace,
    step_tokens=st.integers(1, 10**8),
    step_ns=st.integers(1, 10**12),
    payload_bytes=st.integers(0, 10**11),
)


@settings(max_examples=150, deadline=None)
@given(all_needs(), paces, budget_sets, st.sampled_from(["tokens", "samples"]))
def test_every_table_holds_together(
    needs: list[SourceNeed], pace: Pace, budgets: Budgets, unit: str
):
    table = make_table(needs, pace, budgets, unit)
    most = budgets.workers_fixed or budgets.workers_max
    assert 1 <= len(table.workers) <= most
    if budgets.workers_fixed:
        assert len(table.workers) == budgets.workers_fixed
    for need, row in zip(needs, table.sources, strict=True):
        assert (row.parts > 0) == (need.share > 0), "weight 0 opens nothing, all others something"
        assert row.parts == len(row.workers)
        assert row.parts <= (min(most, need.lanes) if need.is_streaming else most)
        assert all(0 <= worker < len(table.workers) for worker in row.workers)
        # Parts of one source in one worker would read no more at once than one of them.
        assert len(set(row.workers)) == len(row.workers) or row.parts > len(table.workers)
        assert row.reason
    for worker in table.workers:
        has = {number for number, row in enumerate(table.sources) if worker.worker in row.workers}
        assert set(worker.sources) == has
    total = sum(row.load.busy_ppm for row in table.sources)
    dealt = sum(worker.load_ppm for worker in table.workers)
    parts = sum(row.parts for row in table.sources)
    assert total <= dealt <= total + parts, "no load is lost; a part is rounded up"
    if table.memory_bytes > budgets.memory_bytes:
        assert table.verdict.stage == "memory"
    if not table.verdict.waits:
        assert table.memory_bytes <= budgets.memory_bytes
        assert table.cpu_ppm <= budgets.cpus_milli * 1000
        assert all(worker.load_ppm <= 1_000_000 for worker in table.workers)
        assert (table.verdict.source, table.verdict.stage) == ("", "")
    assert table.memory_bytes >= budgets.shared_bytes + BASE_BYTES


@settings(max_examples=60, deadline=None)
@given(all_needs(), paces, budget_sets)
def test_the_table_does_not_depend_on_anything_else(
    needs: list[SourceNeed], pace: Pace, budgets: Budgets
):
    assert make_table(needs, pace, budgets) == make_table(list(needs), pace, budgets)


@settings(max_examples=80, deadline=None)
@given(all_needs(), paces, budget_sets)
def test_dearer_sources_never_make_a_job_cheaper(
    needs: list[SourceNeed], pace: Pace, budgets: Budgets
):
    slower = pace._replace(step_ns=pace.step_ns * 2)
    fast, slow = make_table(needs, pace, budgets), make_table(needs, slower, budgets)
    assert slow.cpu_ppm <= fast.cpu_ppm
    assert all(
        b.load.busy_ppm <= a.load.busy_ppm
        for a, b in zip(fast.sources, slow.sources, strict=True)
        if a.reads == b.reads
    )
