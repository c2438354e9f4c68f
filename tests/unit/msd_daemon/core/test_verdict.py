"""The rules that name who waits for whom, on looks that a test makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_daemon.core.looks import (
    JobLook,
    PeerLook,
    PlannerLook,
    ProcessLook,
    RankLook,
    RingLook,
    SourceLook,
    StoreLook,
    WorkerLook,
)
from msd_daemon.core.verdict import CAUSES, EVIDENCE_MAX, STEADY_LOOKS, VerdictTrack, during_passes
from msd_daemon.core.verdict_rules import judge

S = 1_000_000_000
BEGUN = 100 * S


def process(pid: int, state: str = "S", cpu_ns: int = 0, queued_ns: int = 0) -> ProcessLook:
    return ProcessLook(pid, state, cpu_ns, queued_ns)


def look(second: float, **changes: Any) -> JobLook:
    """Return a job of two ranks whose rings are half full, with a light and a heavy source."""
    at_ns = BEGUN + int(second * S)
    base = JobLook(
        at_ns,
        "job",
        "n0",
        "running",
        generation=1,
        begun_ns=BEGUN,
        steps_planned=20,
        step_released=10,
        sequences=40,
        horizon_steps=8,
        rings=tuple(
            RingLook(n, n, 4, 2, 0, 2, 30, (n,), debtor=n, debtor_since_ns=at_ns - S // 10,
                     published_ns=at_ns - S // 10)
            for n in range(2)
        ),
        ranks=tuple(
            RankLook(n, n, process(50 + n), batches=28, waited_ns=0, interval_ns=S // 10,
                     released_ns=at_ns - S // 10)
            for n in range(2)
        ),
        workers=(
            WorkerLook("loader", 0, process(70)),
            WorkerLook("constructor", 0, process(80)),
        ),
        sources=(
            SourceLook("light", 0.5, workers=(0,)),
            SourceLook("heavy", 0.5, workers=(0,), is_granted=True),
        ),
        planner=PlannerLook(process(60)),
        pool_bytes=1000,
        pool_free_bytes=500,
        cpus=2.0,
    )  # fmt: skip
    return replace(base, **changes)


def starved(seconds: int, **changes: Any) -> list[JobLook]:
    """Return looks in which rank 1 waits for half of the time, and its ring is nearly empty."""
    found = []
    for second in range(seconds + 1):
        base = look(20 + second)
        rings = tuple(replace(ring, free=3, published=1) for ring in base.rings)
        ranks = (base.ranks[0], replace(base.ranks[1], waited_ns=second * S // 2))
        heavy = replace(base.sources[1], starved_ns=second * S // 2, is_starved=True)
        found.append(
            replace(base, rings=rings, ranks=ranks, sources=(base.sources[0], heavy), **changes)
        )
    return found


def with_worker(looks: list[JobLook], busy: float, **changes: Any) -> list[JobLook]:
    """Have the loader worker use so much of a CPU, at what the changes say."""
    return [
        replace(
            it,
            workers=(
                replace(
                    it.workers[0],
                    process=process(70, changes.get("state", "S"), int(busy * (it.at_ns - BEGUN))),
                    **{key: value for key, value in changes.items() if key != "state"},
                ),
                *it.workers[1:],
            ),
        )
        for it in looks
    ]


def test_half_full_rings_and_no_waits_are_nobodys_fault():
    found = judge([look(n) for n in range(5)])
    assert (found.side, found.level, found.cause) == ("neither", "fine", "none")


def test_full_rings_mean_the_trainer_and_name_who_releases_last():
    full = []
    for second in range(5):
        base = look(20 + second)
        rings = [replace(ring, free=0, published=4) for ring in base.rings]
        rings[1] = replace(rings[1], debtor_since_ns=rings[1].debtor_since_ns - S)
        full.append(replace(base, rings=tuple(rings)))
    found = judge(full)
    assert (found.side, found.cause, found.rank) == ("trainer", "trainer_paced", 1)


def test_full_rings_whose_last_reader_is_not_known_name_no_rank():
    rings = tuple(replace(ring, free=0, published=4, debtor=None) for ring in look(20).rings)
    found = judge([look(20 + second, rings=rings) for second in range(5)])
    assert (found.cause, found.rank) == ("trainer_paced", None)
    assert not any("None" in line for line in (found.summary, *found.evidence))


def test_a_source_whose_worker_computes_all_the_time_is_bound_by_the_cpu():
    looks = with_worker(starved(8), 0.97, activity="window", source="heavy", is_busy=True)
    found = judge(looks)
    assert (found.side, found.level, found.cause) == ("loader", "slow", "cpu_bound")
    assert (found.source, found.stage, found.rank) == ("heavy", "transform", 1)


def test_a_worker_that_wants_a_cpu_and_gets_none_counts_as_computing():
    looks = starved(8)
    queued = [
        replace(
            it,
            workers=(
                WorkerLook("loader", 0, process(70, "R", 0, it.at_ns - BEGUN), True, "window", "heavy"),
                it.workers[1],
            ),
        )
        for it in looks
    ]  # fmt: skip
    found = judge(queued)
    assert found.cause == "cpu_bound"
    assert any("waiting for one of 2 CPUs" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("host", "store", "cause", "stage"),
    [
        ("", None, "disk_slow", "read"),
        ("h", StoreLook("h", None, False, 64, 64), "store_slow", "store"),
        ("h", StoreLook("h", 2.0, False, 4, 64), "store_throttled", "store"),
        ("h", StoreLook("h", 300.0, True, 64, 64), "store_throttled", "store"),
        ("h", StoreLook("h", 300.0, False, 64, 64), "store_slow", "store"),
    ],
)
def test_a_source_whose_worker_reads_is_bound_by_its_disk_or_store(host, store, cause, stage):
    looks = with_worker(starved(8), 0.05, activity="reading", source="heavy", is_busy=True)
    looks = [
        replace(
            it,
            sources=(it.sources[0], replace(it.sources[1], host=host)),
            stores=() if store is None else (store,),
        )
        for it in looks
    ]
    found = judge(looks)
    assert (found.cause, found.stage, found.source) == (cause, stage, "heavy")


def test_the_jobs_own_code_is_told_from_ours():
    looks = with_worker(starved(8), 0.02, activity="user code", source="heavy", is_busy=True)
    assert judge(looks).cause == "user_code"


@pytest.mark.parametrize(
    ("costs", "cause"),
    [
        ({"cpu_ns": 5 * S, "wait_ns": S}, "cpu_bound"),
        ({"cpu_ns": S, "wait_ns": 5 * S}, "disk_slow"),
        ({"user_ns": 5 * S, "wait_ns": S}, "user_code"),
        ({"cpu_ns": S // 10, "wait_ns": S // 5}, "user_code"),  # too little to say: marks do
    ],
)
def test_chunks_own_word_goes_before_what_looks_saw(costs, cause):
    looks = with_worker(starved(8), 0.02, activity="user code", source="heavy", is_busy=True)
    looks[-1] = replace(
        looks[-1], sources=(looks[-1].sources[0], replace(looks[-1].sources[1], **costs))
    )
    assert judge(looks).cause == cause


def test_a_share_that_grew_is_why():
    looks = with_worker(starved(8), 0.97, activity="window", source="heavy", is_busy=True)
    looks = [
        replace(
            it,
            sources=(
                it.sources[0], replace(it.sources[1], shifted_from=0.1, shifted_ns=looks[0].at_ns),
            ),
        )
        for it in looks
    ]  # fmt: skip
    found = judge(looks)
    assert (found.cause, found.stage, found.source) == ("mixture_changed", "transform", "heavy")
    assert "from 10 to 50 %" in found.summary


def test_a_pool_without_room_is_why_though_its_source_is_starved():
    looks = [
        replace(
            it,
            pool_refused=True,
            sources=(it.sources[0], replace(it.sources[1], is_granted=False)),
        )
        for it in starved(8)
    ]
    assert (judge(looks).cause, judge(looks).stage) == ("memory_full", "pool")


def test_a_worker_that_is_stopped_lost_or_long_at_a_record_goes_first():
    looks = with_worker(starved(8), 0.0, state="T", is_busy=True)
    assert judge(looks).cause == "worker_stuck"
    looks = starved(8)
    looks[-1] = replace(looks[-1], worker_deaths=2, last_death="loader 0 ended with status -9")
    assert judge(looks).cause == "worker_lost"
    looks[-1] = replace(looks[-1], quarantined=1, last_quarantine=("heavy", "record 7: crash"))
    found = judge(looks)
    assert (found.cause, found.evidence[2]) == ("bad_record", "record 7: crash")
    looks = with_worker(
        starved(8), 0.0, activity="record", source="heavy", since_ns=BEGUN, shard="a", place=7
    )
    found = judge(looks)
    assert found.cause == "bad_record"
    assert any("record 7 of a" in line for line in found.evidence)


def test_a_planner_counts_once_what_it_planned_is_served():
    stopped = PlannerLook(process(60, "T"), since_ns=BEGUN + 10 * S)
    looks = starved(8, planner=stopped)
    assert judge(looks).cause != "planner_gone"
    looks = [
        replace(it, rings=tuple(replace(ring, published_total=40) for ring in it.rings))
        for it in looks
    ]
    found = judge(looks)
    assert (found.side, found.cause, found.stage) == ("loader", "planner_gone", "planner")
    gone = PlannerLook(None, is_there=False, silence="no one leads", since_ns=BEGUN)
    found = judge([replace(it, planner=gone) for it in looks])
    assert found.cause == "planner_gone"
    assert "no one leads" in found.summary


SILENT = PlannerLook(
    None, is_there=False, silence="planner p0 at h:5557 is silent since 09:00:00",
    since_ns=BEGUN + 10 * S, place="h:5557",
)  # fmt: skip


@pytest.mark.parametrize("peers", [(), (PeerLook("n7", True, "", 3, BEGUN),)])
def test_no_node_blames_another_while_the_clusters_planner_is_silent(peers):
    looks = [replace(it, sources=it.sources[:1], other_nodes=1, peers=peers) for it in starved(8)]
    assert judge(looks).cause == "node_slow"
    found = judge([replace(it, planner=SILENT) for it in looks])
    assert (found.side, found.cause, found.stage) == ("loader", "planner_gone", "planner")
    assert "planner p0 at h:5557 is silent since 09:00:00" in found.summary
    assert found.since_ns == SILENT.since_ns
    assert found.command == "systemctl status msd-planner   (on the host of h:5557)"


def test_a_node_that_is_down_or_a_source_of_ones_own_is_named_though_the_planner_is_silent():
    down = PeerLook("n7", False, "cut off", 3, BEGUN)
    looks = starved(8, planner=SILENT, other_nodes=1)
    assert judge([replace(it, peers=(down,)) for it in looks]).cause == "node_slow"
    assert judge(looks).source == "heavy"


def test_ranks_that_wait_for_their_start_wait_for_a_silent_planner():
    for state in ("joining", "starting", "waiting for ranks"):
        found = judge([look(20, state=state, waiting_for_ranks=(1,), planner=SILENT)])
        assert (found.cause, found.level, found.side) == ("planner_gone", "stalled", "loader")
    assert judge([look(20, state="failed", planner=SILENT)]).cause == "job_failed"


def test_a_node_whose_ranks_left_or_that_only_loads_says_that_the_planner_is_silent():
    alone = look(20, rings=(), ranks=(), other_nodes=1)
    assert judge([alone]).cause == "none"
    found = judge([replace(alone, planner=SILENT)])
    assert (found.cause, found.level) == ("planner_gone", "slow")
    assert "planner p0 at h:5557 is silent" in found.summary


def test_a_job_that_an_operator_stopped_is_not_said_to_have_failed():
    error = "job 'case' was stopped by msdctl stop"
    for state in ("failed", "stopped", "closed"):
        found = judge([look(20, state=state, error=error, is_stopped=True)])
        assert (found.side, found.level, found.cause) == ("neither", "fine", "job_stopped")
        assert found.summary == f"the job was stopped: {error}"
        assert found.command == "msdctl jobs"  # the job's own status is gone


def test_what_to_type_next_about_other_nodes_is_not_what_was_just_typed():
    looks = [replace(it, sources=it.sources[:1], other_nodes=1) for it in starved(8)]
    assert judge(looks).command == "msdctl cluster"


def test_a_journal_that_can_not_be_written_and_a_node_that_owes_samples_are_named():
    assert judge(starved(8, journal_stalled="disk full")).cause == "journal_stalled"
    peer = PeerLook("n7", True, "", 3, BEGUN)
    found = judge(starved(8, peers=(peer,)))
    assert (found.cause, found.node, found.stage) == ("node_slow", "n7", "exchange")


def test_a_node_without_ranks_says_what_others_wait_for():
    looks = with_worker(starved(8), 0.97, activity="window", source="heavy", is_busy=True)
    alone = [replace(it, rings=(), ranks=(), other_nodes=2) for it in looks]
    found = judge(alone)
    assert (found.side, found.cause, found.source, found.rank) == (
        "loader",
        "cpu_bound",
        "heavy",
        None,
    )
    idle = [
        replace(it, sources=looks[0].sources, rings=(), ranks=(), other_nodes=2) for it in looks
    ]
    assert judge(idle).level == "fine"


def test_ranks_that_wait_for_no_source_of_this_node_wait_for_others():
    looks = [replace(it, sources=it.sources[:1], other_nodes=1) for it in starved(8)]
    assert (judge(looks).cause, judge(looks).stage) == ("node_slow", "exchange")
    alone = [replace(it, other_nodes=0) for it in looks]
    assert judge(alone).cause == "loader_slow"


def test_a_rank_that_asks_and_gets_nothing_is_a_stall():
    looks = []
    for second in range(6):
        base = look(20 + second)
        since_ns = BEGUN + 20 * S
        rings = tuple(
            replace(ring, free=3, published=1, published_ns=since_ns) for ring in base.rings
        )
        ranks = tuple(
            replace(rank, waiting_since_ns=since_ns, released_ns=since_ns) for rank in base.ranks
        )
        looks.append(replace(base, rings=rings, ranks=ranks))
    assert judge(looks).level == "stalled"
    assert judge(looks[:2]).level != "stalled"


def test_a_stopped_rank_and_ranks_that_hang_are_the_trainers():
    base = look(40)
    stopped = replace(base.ranks[1], process=process(51, "T"), released_ns=base.at_ns - 3 * S)
    found = judge([look(39), replace(base, ranks=(base.ranks[0], stopped))])
    assert (found.side, found.cause, found.rank) == ("trainer", "rank_stopped", 1)
    hang = tuple(
        replace(rank, released_ns=base.at_ns - 30 * S, batches=28 - rank.rank)
        for rank in base.ranks
    )
    rings = tuple(replace(ring, free=0, published=4) for ring in base.rings)
    found = judge([replace(base, ranks=hang, rings=rings)])
    assert (found.cause, found.rank) == ("ranks_hang", 1)
    assert "rank 1 gave back 27 batches, others 28" in found.evidence
    alone = (base.ranks[0], hang[1])
    found = judge([replace(base, ranks=alone, rings=rings)])
    assert (found.cause, found.rank) == ("rank_behind", 1)


def test_a_step_that_takes_long_is_no_hang():
    base = look(40)
    slow = tuple(
        replace(rank, interval_ns=20 * S, released_ns=base.at_ns - 30 * S) for rank in base.ranks
    )
    rings = tuple(replace(ring, free=0, published=4) for ring in base.rings)
    assert judge([replace(base, ranks=slow, rings=rings)]).level == "fine"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"state": "joining", "waiting_for_ranks": (3,)}, "waiting_for_ranks"),
        ({"state": "failed", "error": "x"}, "job_failed"),
        ({"is_ended": True}, "stream_ended"),
        ({"rings": ()}, "not_running"),
    ],
)
def test_a_job_that_does_not_run_is_nobodys_stall(changes, cause):
    found = judge([look(5, **changes)])
    assert (found.side, found.level, found.cause) == ("neither", "fine", cause)


def test_a_generation_has_time_for_its_first_batches():
    def early(second: float) -> JobLook:
        base = look(second)
        return replace(
            base,
            rings=tuple(
                replace(r, published=0, published_total=0, published_ns=0, free=4, debtor=None)
                for r in base.rings
            ),
            sources=(base.sources[0], replace(base.sources[1], is_starved=True)),
        )

    assert judge([early(5)]).cause == "starting"
    assert judge([early(20)]).level == "slow"
    assert (judge([early(90)]).side, judge([early(90)]).source) == ("loader", "heavy")


def test_since_lasts_while_a_verdict_does_and_a_better_one_has_to_hold():
    track = VerdictTrack(judge)
    looks = with_worker(starved(30), 0.97, activity="window", source="heavy", is_busy=True)
    for it in looks[:10]:
        found = track.take(it)
    since = found.since_ns
    assert found.cause == "cpu_bound"
    assert looks[0].at_ns < since <= looks[4].at_ns
    assert track.take(looks[10]).since_ns == since
    calm = [replace(look(60 + n), generation=1) for n in range(20)]
    kept = [track.take(it).cause for it in calm]
    assert kept[0] == "cpu_bound"
    assert kept[-1] == "none"
    assert len([cause for cause in kept if cause == "cpu_bound"]) >= STEADY_LOOKS - 1


def test_a_pass_of_validation_is_no_hang_and_its_own_waits_count():
    fine = judge([look(3)])
    hang = replace(fine, side="trainer", level="stalled", cause="ranks_hang", rank=1)
    assert during_passes(hang, ()) == hang
    assert during_passes(hang, [fine]).level == "fine"
    slow = judge(with_worker(starved(8), 0.97, activity="window", source="heavy", is_busy=True))
    found = during_passes(hang, [fine, slow])
    assert (found.cause, found.source) == ("cpu_bound", "heavy")
    assert found.summary.startswith("in a pass of validation: ")
    assert during_passes(slow, [fine]) == slow


def test_a_verdict_is_plain_for_json():
    plain = judge([look(3)]).plain(1000.0)
    assert set(plain) == {
        "side", "level", "cause", "stage", "summary", "source", "rank", "node", "since", "evidence",
        "command",
    }  # fmt: skip


_STATES = st.sampled_from(["R", "S", "D", "T", "Z", ""])
_NS = st.integers(0, 200 * S)


@st.composite
def any_look(draw: Any, second: int) -> JobLook:
    """Draw a job that anything may be wrong with."""
    base = look(second)
    slots = draw(st.integers(1, 8))
    free = draw(st.integers(0, slots))
    rings = tuple(
        RingLook(
            n, n, slots, free, draw(st.integers(0, slots - free)), slots - free,
            draw(st.integers(0, 60)), tuple(draw(st.sets(st.integers(0, 2)))),
            debtor=draw(st.none() | st.integers(0, 2)), debtor_since_ns=draw(_NS),
            idle_readers=tuple(draw(st.sets(st.integers(0, 2)))), published_ns=draw(_NS),
        )
        for n in range(draw(st.integers(0, 2)))
    )  # fmt: skip
    ranks = tuple(
        RankLook(
            n, draw(st.integers(0, 2)), process(n, draw(_STATES)), draw(st.integers(0, 9)),
            draw(_NS), draw(_NS), draw(_NS), draw(_NS),
        )
        for n in range(draw(st.integers(0, 3)))
    )  # fmt: skip
    workers = tuple(
        WorkerLook(
            draw(st.sampled_from(["loader", "constructor", "spare"])), n,
            process(90 + n, draw(_STATES), draw(_NS), draw(_NS)), draw(st.booleans()),
            draw(st.sampled_from(["", "record", "window", "user code", "reading"])),
            draw(st.sampled_from(["", "light", "heavy"])), since_ns=draw(_NS),
        )
        for n in range(draw(st.integers(0, 3)))
    )  # fmt: skip
    sources = tuple(
        SourceLook(
            name, draw(st.floats(0, 1)), 0.0, draw(_NS), (0, 1), draw(st.booleans()),
            draw(st.booleans()), draw(_NS), draw(st.sampled_from(["", "h"])),
        )
        for name in ("light", "heavy")[: draw(st.integers(0, 2))]
    )  # fmt: skip
    return replace(
        base,
        state=draw(st.sampled_from(["joining", "running", "failed", "closed"])),
        is_ended=draw(st.booleans()),
        rings=rings,
        ranks=ranks,
        workers=workers,
        sources=sources,
        stores=draw(st.sampled_from([(), (StoreLook("h", 1.0),), (StoreLook("h"),)])),
        planner=PlannerLook(
            draw(st.none() | st.builds(process, st.just(60), _STATES)), draw(st.booleans()), "x",
            draw(_NS),
        ),
        peers=(PeerLook("n1", draw(st.booleans()), "", draw(st.integers(0, 2)), draw(_NS)),),
        pool_refused=draw(st.booleans()),
        worker_deaths=draw(st.integers(0, 3)),
        quarantined=draw(st.integers(0, 3)),
    )  # fmt: skip


@given(st.data())
def test_whatever_is_seen_there_is_a_verdict_of_the_closed_sets(data):
    track = VerdictTrack(judge)
    for second in range(data.draw(st.integers(1, 4))):
        found = track.take(data.draw(any_look(200 + second)))
        assert found.side in ("loader", "trainer", "neither")
        assert found.cause in CAUSES
        assert (found.side == "neither") <= (found.level == "fine")
        assert len(found.evidence) <= EVIDENCE_MAX
        assert found.since_ns > 0
        assert "\n" not in found.summary


def test_a_rank_that_asks_behind_a_long_step_does_not_stand_still_yet():
    looks = []
    for second in range(6):
        base = look(20 + second)
        rings = tuple(
            replace(ring, free=3, published=1, published_ns=BEGUN + 20 * S) for ring in base.rings
        )
        ranks = tuple(
            replace(rank, waiting_since_ns=base.at_ns - S // 5, released_ns=BEGUN + 20 * S)
            for rank in base.ranks
        )
        looks.append(replace(base, rings=rings, ranks=ranks))
    assert judge(looks).level != "stalled"
