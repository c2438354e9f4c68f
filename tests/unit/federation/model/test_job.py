"""What the digests of a job are functions of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from federation.model.cost import (
    ActivationBytes,
    CalibrationRule,
    CostSpec,
    EncoderCost,
    WindowTerm,
)
from federation.model.job import (
    BatchRule,
    ErrorPolicy,
    FieldRule,
    LoaderRule,
    MixturePoint,
    MixtureSchedule,
    RampPoint,
    ResolvedJob,
    Shard,
    ShuffleRule,
    SourceSpec,
    TokenizerSpec,
    decode_job,
    encode_job,
)

SOURCE = SourceSpec("a", "jsonl", "none", "seekable", (Shard("/x/a", 5, "f"),), "m")
JOB = ResolvedJob(
    "job",
    1,
    (SOURCE,),
    TokenizerSpec("bytes"),
    BatchRule(16, 64, 2),
    MixtureSchedule("tokens", (MixturePoint(0, {"a": 1.0}),)),
)


def with_batch(**changes):
    return replace(JOB, batch=replace(JOB.batch, **changes))


def with_source(**changes):
    return replace(JOB, sources=(replace(SOURCE, **changes),))


@pytest.mark.parametrize(
    "other",
    [
        with_batch(rows=32, microbatch_rows=4, row_segments_max=9),
        with_batch(row_tokens=128, rows_ramp=(RampPoint(4, 8),)),
        with_batch(labels="aligned", ignore="loss_mask", ignore_label=0, documents="joined"),
        with_batch(pad_id=3, boundaries="constant", cp_layout="contiguous", is_mtp=True),
        with_batch(token_dtype="int64", label_dtype="int32", row_multiple=2),
        with_source(on_error=ErrorPolicy("fail"), loss_weight=0.5),
        replace(
            JOB, steps=9, tokens=10, end="drop", strategy="unbalanced", cost=CostSpec("tokens", 2)
        ),
        replace(JOB, fields=(FieldRule("x", "x", "row"),)),
        replace(JOB, tokenizer=replace(JOB.tokenizer, library="bytes 2")),
    ],
)
def test_a_state_goes_on_with_a_job_of_another_shape_end_or_policy(other):
    assert other.sample_digest() == JOB.sample_digest()
    assert other.digest() != JOB.digest()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (replace(JOB, seed=2), "seed"),
        (replace(JOB, epochs=2), "epochs"),
        (replace(JOB, tokenizer=replace(JOB.tokenizer, eos_id=9)), "tokenizer"),
        (with_batch(packing="concat"), "batch"),
        (with_batch(long="skip"), "batch"),
        (with_source(hold_out=0.1), "sources.a"),
        (with_source(shuffle=ShuffleRule(window_shards=3)), "sources.a"),
        (with_source(max_epochs=3), "sources.a"),
    ],
)
def test_samples_are_a_function_of_what_is_named(other, part):
    pairs = [
        dict(item.rpartition(":")[::2] for item in job.sample_digest().split(","))
        for job in (JOB, other)
    ]
    assert [key for key in pairs[0] if pairs[0][key] != pairs[1][key]] == [part]


@pytest.mark.parametrize(
    "other",
    [
        replace(JOB, name="other", notes=("x",), loaders=(LoaderRule("v", ("a",)),)),
        with_source(shards=(Shard("/y/b", 5, "f"),)),
    ],
)
def test_names_paths_notes_and_validation_are_in_no_digest(other):
    assert (other.digest(), other.sample_digest()) == (JOB.digest(), JOB.sample_digest())


def test_costs_that_say_no_more_than_before_leave_the_digest_as_it_was():
    before = CostSpec("transformer", 7, 3)
    job = replace(JOB, cost=before)
    assert (
        job.digest() == "3fa38ccfb9caf1ab96ea16f925348fdb"
    )  # of the version that knew two factors alone
    estimated = replace(before, activations=ActivationBytes(token=5, image=6))
    assert replace(JOB, cost=estimated).digest() == job.digest()
    for changes in (
        {"cost": replace(before, windowed=(WindowTerm(4, 1),))},
        {"cost": replace(before, encoders=(EncoderCost("image", 1),))},
        {"calibration": CalibrationRule()},
    ):
        assert replace(job, **changes).digest() != job.digest()
        assert replace(job, **changes).sample_digest() == job.sample_digest()


def test_a_job_with_costs_travels():
    cost = CostSpec(
        "transformer", 7, 3, (WindowTerm(4, 1),), (EncoderCost("image", 1),), ActivationBytes(5, 6)
    )
    job = replace(JOB, cost=cost, calibration=CalibrationRule(5, 6, 0.5))
    assert decode_job(encode_job(job)) == job
