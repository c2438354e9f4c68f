"""Plans of a five-source image-text mix: encoder and backbone evened each, nothing else changed."""

from dataclasses import fields, replace

import numpy as np
import pytest

from federation.model.job import BatchRule, MixturePoint, MixtureSchedule
from federation.model.plan import StepPlan
from federation.planning.costs import segment_costs
from federation.planning.hybrid import NO_MEDIA
from msd_client.contract.errors import ConfigError, ProtocolError
from tests.support.metadata import Feed, make_job, make_spec, start, with_batch
from tests.support.picture_mix import COST, NAMES, ROW_TOKENS, ROW_UNITS, picture_mix, units_of

STEPS = 4
MICROBATCH_ROWS, MICROBATCHES = 4, 4


def mix(dp_count, **changes):
    batch = BatchRule(dp_count * MICROBATCH_ROWS * MICROBATCHES, ROW_TOKENS, MICROBATCH_ROWS)
    job, corpora = picture_mix(5, replace(batch, encode="any"), max(12, dp_count))
    return replace(job, **changes), corpora


def plans_of(job, corpora, dp_count, strategy, steps=STEPS):
    feed = Feed(start(replace(job, strategy=strategy), {"dp": dp_count}), corpora, seed=3)
    plans = feed.steps(steps)
    assert len(plans) == steps
    return plans


def units_by_segment(plan, corpora):
    places = (plan.source, plan.block_key, plan.index)
    return np.array(
        [units_of(corpora, *place) for place in zip(*(c.tolist() for c in places), strict=True)]
    )


def cell_sums(groups, plan, values):
    """Return sums by (group, microbatch)."""
    found = np.zeros((plan.dp_count, plan.microbatch_count), np.int64)
    np.add.at(found, (groups, plan.row_microbatch[plan.row]), values)
    return found


def encoder_loads(plan, corpora):
    units = units_by_segment(plan, corpora)
    held = units > 0
    assert np.array_equal(plan.encode_dp[0] == NO_MEDIA, ~held)
    groups = np.where(held, plan.encode_dp[0], 0)
    return cell_sums(groups, plan, units), units


def encoder_bound(plan, units):
    """Each microbatch index: the mean, or its largest unit of encoding, which stands alone."""
    bound = 0.0
    for number in range(plan.microbatch_count):
        own = units[plan.row_microbatch[plan.row] == number]
        bound += max(own.sum() / plan.dp_count, own.max(initial=0))
    return bound


def backbone_bound(plan, row_costs):
    """Each microbatch index: the mean, or its dearest row with the cheapest beside it."""
    bound = 0.0
    for number in range(plan.microbatch_count):
        own = np.sort(row_costs[plan.row_microbatch == number])
        beside = own[: plan.microbatch_rows - 1].sum()
        bound += max(own.sum() / plan.dp_count, own[-1] + beside)
    return bound


@pytest.mark.parametrize("dp_count", [8, 32])
def test_encoder_and_backbone_are_within_five_percent_of_their_bounds(dp_count):
    """All groups wait for each other in every microbatch: sums of the slowest, over a step."""
    job, corpora = mix(dp_count)
    home_over = []
    for plan in plans_of(job, corpora, dp_count, "vlm_hybrid"):
        loads, units = encoder_loads(plan, corpora)
        bound = encoder_bound(plan, units)
        assert loads.max(axis=0).sum() <= 1.05 * bound
        home = cell_sums(plan.row_dp[plan.row], plan, units)
        home_over.append(home.max(axis=0).sum() / bound)
        costs = np.zeros(plan.rows, np.int64)
        np.add.at(costs, plan.row, segment_costs(COST, plan.length.astype(np.int64)))
        cells = np.zeros((dp_count, plan.microbatch_count), np.int64)
        np.add.at(cells, (plan.row_dp, plan.row_microbatch), costs)
        assert cells.max(axis=0).sum() <= 1.05 * backbone_bound(plan, costs)
    assert min(home_over) > 1.3, "the mix would be even without a deal"


def test_media_go_anywhere_and_a_step_holds_what_it_held():
    job, corpora = mix(8)
    at_home = plans_of(job, corpora, 8, "vlm_backbone")
    anywhere = plans_of(job, corpora, 8, "vlm_hybrid")
    plain = with_batch(job, encode="home")
    before = plans_of(plain, corpora, 8, "balanced")
    assert plain.digest() != job.digest()
    for home, free, old in zip(at_home, anywhere, before, strict=True):
        assert old.encode_dp is None
        assert len(old.encode()[1]) == 5
        assert home.membership_digest == free.membership_digest == old.membership_digest
        for field in fields(StepPlan):
            if field.name not in ("delta", "encode_dp", "encoder_cost_max"):
                sent, come = getattr(home, field.name), getattr(free, field.name)
                assert np.array_equal(sent, come), field.name
        holds = home.encode_dp[0] != NO_MEDIA
        assert np.array_equal(home.encode_dp[0][holds], home.row_dp[home.row][holds])
        assert (home.encode_dp != free.encode_dp).any()
        loads, _ = encoder_loads(free, corpora)
        assert int(loads.max()) <= MICROBATCH_ROWS * ROW_UNITS


def test_tight_slots_keep_their_cap():
    """Rows that hold hardly more units than their own: the deal gives way, not the cap."""
    job, corpora = mix(8)
    tight = replace(job, media=(replace(job.media[0], row_units_max=5000),))
    for plan in plans_of(tight, corpora, 8, "vlm_hybrid"):
        loads, units = encoder_loads(plan, corpora)
        assert int(loads.max()) <= MICROBATCH_ROWS * 5000
        home = cell_sums(plan.row_dp[plan.row], plan, units)
        assert loads.max(axis=0).sum() <= home.max(axis=0).sum()


def test_a_step_without_pictures_is_a_step_like_others():
    points = (
        MixturePoint(0, {**dict.fromkeys(NAMES, 0.0), "web": 1.0}),
        MixturePoint(2, dict.fromkeys(NAMES, 1.0)),
    )
    job, corpora = mix(8, mixture=MixtureSchedule("tokens", points))
    plans = plans_of(job, corpora, 8, "vlm_hybrid")
    assert [int((plan.encode_dp >= 0).sum()) == 0 for plan in plans] == [True, True, False, False]


def test_groups_survive_the_wire_and_damaged_ones_are_refused():
    job, corpora = mix(8)
    plan = plans_of(job, corpora, 8, "vlm_hybrid", 1)[0]
    header, frames = plan.encode()
    again = StepPlan.decode(header, frames)
    assert np.array_equal(again.encode_dp, plan.encode_dp)
    assert again.encode_dp.dtype == np.int32
    for bad in (frames[5][:-4], b"", frames[5][:-4] + (8).to_bytes(4, "little")):
        with pytest.raises(ProtocolError, match="encod"):
            StepPlan.decode(header, [*frames[:5], bad])
    with pytest.raises(ProtocolError, match="5 or 6 frames"):
        StepPlan.decode(header, [*frames, b""])


def test_a_job_that_has_no_room_for_routes_is_told_so():
    job, corpora = mix(8)
    home = replace(with_batch(job, encode="home"), strategy="vlm_hybrid")
    with pytest.raises(ConfigError, match=r"batch\.encode: any"):
        Feed(start(home, {"dp": 8}), corpora).step()


def test_a_job_that_does_not_say_has_the_digest_it_had():
    job = make_job([make_spec("web")], BatchRule(2, 8))
    said = with_batch(job, encode="any")
    assert said.digest() != job.digest()
    assert said.sample_digest() == job.sample_digest()
    assert "encode" not in job._stream_map()["batch"]


@pytest.mark.parametrize("strategy", ["vlm_hybrid", "vlm_backbone"])
def test_a_plan_tells_how_even_encoders_are(strategy):
    job, corpora = mix(8)
    for plan in plans_of(job, corpora, 8, strategy, steps=2):
        loads, _ = encoder_loads(plan, corpora)
        wanted = loads.max(axis=0).sum() / loads.mean(axis=0).sum()
        assert plan.encoder_imbalance == pytest.approx(wanted)
        assert plan.encoder_cost_max == loads.max(axis=0).sum()
        header, frames = plan.encode()
        assert StepPlan.decode(header, frames).encoder_imbalance == plan.encoder_imbalance
        assert (plan.encoder_imbalance < 1.2) == (strategy == "vlm_hybrid")


def test_without_routes_a_plan_says_nothing_of_encoders():
    job, corpora = mix(8)
    (plan,) = plans_of(with_batch(job, encode="home"), corpora, 8, "balanced", steps=1)
    assert plan.encoder_imbalance is None
