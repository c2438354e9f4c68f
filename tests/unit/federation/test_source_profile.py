"""Profiles: joined, kept apart by what the cost depends on, refused where they are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from federation.model.job import BatchRule
from federation.model.source_profile import (
    RECORDS_KEPT,
    SourceProfile,
    bound_of,
    decode_profile,
    encode_profile,
    joined,
    profile_fingerprint,
)
from msd_client.contract.errors import ConfigError
from tests.support.metadata import make_job, make_spec

PROBE = SourceProfile("f", "probe", 10, 8, 800, 4000, 3200, 1000, 200, 300, 1 << 20, 1_500_000)
LIVE = SourceProfile("f", "live", 100, 90, 9000, 50_000, 36_000, 20_000, 0, 1000, 0)


def test_live_counts_take_the_place_of_a_probe_and_keep_what_it_alone_measures():
    whole = joined(PROBE, LIVE)
    assert whole.origin == "live"
    assert (whole.records, whole.cpu_ns) == (100, 20_000)
    assert (whole.open_bytes, whole.pair_ppm) == (1 << 20, 1_500_000)
    again = joined(whole, replace(PROBE, open_bytes=5, pair_ppm=0))
    assert (again.origin, again.records, again.open_bytes) == ("live", 100, 5)
    assert again.pair_ppm == 1_500_000


def test_live_counts_add_up_and_old_ones_fade():
    twice = joined(LIVE, LIVE)
    assert (twice.records, twice.tokens, twice.cpu_ns) == (200, 18_000, 40_000)
    old = replace(LIVE, records=RECORDS_KEPT * 4, cpu_ns=4_000_000)
    faded = joined(old, LIVE)
    assert faded.records == RECORDS_KEPT + 100
    assert faded.cpu_ns == 1_000_000 + 20_000


def test_another_sources_counts_are_not_added():
    assert joined(replace(PROBE, fingerprint="g"), LIVE) == LIVE
    assert joined(None, LIVE) == LIVE


@pytest.mark.parametrize(
    ("times", "bound"), [((3, 1, 1), "cpu"), ((1, 3, 1), "transform"), ((1, 1, 3), "read")]
)
def test_what_a_loader_does_most(times: tuple[int, int, int], bound: str):
    cpu, user, wait = times
    assert bound_of(replace(PROBE, cpu_ns=cpu, user_ns=user, wait_ns=wait)) == bound


def test_plain_form_comes_back_and_nonsense_is_refused():
    assert decode_profile(encode_profile(PROBE)) == PROBE
    for change in ({"cpu_ns": -1}, {"cpu_ns": "1"}, {"unknown": 1}, {"origin": "guess"}):
        with pytest.raises(ConfigError):
            decode_profile(encode_profile(PROBE) | change)


def test_figures_are_by_sample_and_token():
    figures = PROBE.figures()
    assert figures["tokens_per_sample"] == 100
    assert figures["cpu_s_per_sample"] == 125e-9
    assert figures["two_readers"] == 1.5


def test_the_fingerprint_is_of_what_the_cost_depends_on():
    specs = [make_spec(name) for name in "ab"]
    job = make_job(specs, BatchRule(rows=4, row_tokens=64))
    own = profile_fingerprint(job, 0)

    def changed(**fields: object) -> str:
        source = replace(job.sources[0], **fields)  # type: ignore[arg-type]
        return profile_fingerprint(replace(job, sources=(source, *job.sources[1:])), 0)

    assert changed(name="other") == own
    assert changed(max_epochs=3, is_critical=True) == own
    assert changed(text_field="body") != own
    assert changed(manifest_digest="1" * 32) != own
    assert profile_fingerprint(replace(job, seed=99), 0) == own
    tokenizer = replace(job.tokenizer, vocabulary_count=1000)
    assert profile_fingerprint(replace(job, tokenizer=tokenizer), 0) != own
