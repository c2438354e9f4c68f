"""What lies behind a source's last sample counts once its end was passed."""

from __future__ import annotations

import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import BatchRule
from msd_client.contract.errors import SourceExhaustedError
from tests.support.metadata import Feed, SourceCorpus, make_job, make_spec, start

GOOD = [4] * 12
BAD_SYNTAX, UNREADABLE = RecordStatus.BAD_SYNTAX, RecordStatus.UNREADABLE


def feed_of(at_exhaustion, bad_tail):
    """A long source, and one that ends in, or is nothing but, bad records."""
    long = make_spec("long", at_exhaustion="drop")
    short = make_spec("short", at_exhaustion=at_exhaustion)
    lengths = [] if bad_tail == "all" else GOOD
    block = ([*lengths, 0, 0], [0] * len(lengths) + [BAD_SYNTAX, UNREADABLE])
    corpora = [SourceCorpus(long, [[(GOOD * 10, [0] * 120)]]), SourceCorpus(short, [[block]])]
    job = make_job([long, short], BatchRule(4, 8), epochs=1)
    return job, corpora


@pytest.mark.parametrize("bad_tail", ["all", "last two"])
@pytest.mark.parametrize("at_exhaustion", ["drop", "stop"])
def test_bad_records_behind_the_last_sample_count_once(at_exhaustion, bad_tail):
    job, corpora = feed_of(at_exhaustion, bad_tail)
    feed = Feed(start(job), corpora)
    if (at_exhaustion, bad_tail) == ("stop", "all"):  # it stops before its first step
        with pytest.raises(SourceExhaustedError, match=r"bad_syntax 1, unreadable 1"):
            feed.steps(1000)
        return
    plans = feed.steps(1000)
    dropped = feed.planner.statistics().dropped_records
    assert dropped["bad_syntax"] == (0, 1)
    assert dropped["unreadable"] == (0, 1)
    assert sum(int(plan.dropped_records[1]) for plan in plans) == 2


@pytest.mark.parametrize("bad_tail", ["all", "last two"])
def test_they_count_the_same_after_a_restore_at_any_step(bad_tail):
    job, corpora = feed_of("drop", bad_tail)
    whole = Feed(start(job), corpora)
    states = [whole.planner.state()]
    while len(whole.steps(1)):
        states.append(whole.planner.state())
    assert len(states) > 8
    for state in states:
        feed = Feed(start(job, state=state), corpora)
        feed.steps(1000)
        assert feed.planner.state().encode() == states[-1].encode()
