"""A microbatch that may keep more activation bytes than the job allows is refused with the sums."""

import pytest

from federation.model.cost import ActivationBytes, CostSpec, EncoderCost
from federation.model.job import BatchRule, RampPoint
from federation.model.media import MediaRule
from msd_client.contract.errors import JobError
from msd_daemon.config.activation_check import check_activations
from msd_daemon.config.resolve import resolve_job

IMAGE = MediaRule("image", 1, "uint8", 50, 5)
SOUND = MediaRule("audio", 1, "uint8", 30, 6)
COST = CostSpec(
    encoders=(EncoderCost("image", 1), EncoderCost("audio", 1)),
    activations=ActivationBytes(token=10, image=100, audio=1000),
)
VARLEN = {"packing": "varlen", "step_tokens": 1000}


def faults_of(most, media=(), cost=COST, **batch):
    batch = {"rows": 8, "row_tokens": 64, "microbatch_rows": 1} | batch
    rule = BatchRule(**batch, microbatch_activation_bytes=most)
    faults = []
    check_activations(rule, cost, media, faults)
    return [fault.line() for fault in faults]


def test_rows_keep_what_their_caps_let_them():
    assert not faults_of(640)
    (fault,) = faults_of(639)
    assert fault.startswith(
        "batch.microbatch_activation_bytes: 639: a microbatch may keep 640 of 64 tokens = 640 bytes; "
        "lower batch.microbatch_rows"
    )
    assert "write 640 or more" in fault
    (fault,) = faults_of(71_279, (IMAGE, SOUND), microbatch_rows=2)
    assert (
        "1280 of 128 tokens + 10000 of 100 image patches + 60000 of 60 audio frames = 71280 bytes"
        in fault
    )
    assert not faults_of(71_280, (IMAGE, SOUND), microbatch_rows=2)


def test_the_longest_rows_of_a_schedule_count():
    (fault,) = faults_of(1000, row_tokens_ramp=(RampPoint(5, 128),))
    assert "1280 of 128 tokens" in fault


def test_a_varlen_microbatch_has_to_hold_text_alone_and_media_alone():
    assert not faults_of(30_000, (IMAGE, SOUND), **VARLEN)
    (fault,) = faults_of(29_999, (IMAGE, SOUND), **VARLEN)
    assert (
        "a microbatch may keep 30000 of 30 audio frames = 30000 bytes; lower batch.micro" in fault
    )
    assert "batch.microbatch_tokens" in fault


def test_where_media_are_encoded_anywhere_a_varlen_microbatch_may_keep_all_of_it():
    (fault,) = faults_of(30_000, (IMAGE, SOUND), encode="any", **VARLEN)
    assert "= 35640 bytes" in fault


def test_without_a_model_nothing_is_known():
    (fault,) = faults_of(1000, cost=CostSpec())
    assert "no model is given" in fault


@pytest.fixture
def job(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 9)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    return tmp_path, {
        "seed": 1,
        "tokenizer": {"bytes": True},
        "sources": {"a": "a.jsonl"},
        "model": {"backbone": shape},
        "batch": {"rows": 4, "row_tokens": 64},
    }


def test_a_job_file_says_it_in_bytes_and_what_says_nothing_changes_no_digest(job):
    folder, plain = job
    found = resolve_job(plain, folder)
    assert found.batch.microbatch_activation_bytes == 0
    capped = resolve_job(
        {**plain, "batch": {**plain["batch"], "microbatch_activation_bytes": "20Gi"}}, folder
    )
    assert capped.batch.microbatch_activation_bytes == 20 << 30
    assert capped.digest() != found.digest()
    assert capped.sample_digest() == found.sample_digest()
    with pytest.raises(JobError, match=r"microbatch_activation_bytes: 1024: .* of 64 tokens = "):
        resolve_job(
            {**plain, "batch": {**plain["batch"], "microbatch_activation_bytes": "1Ki"}}, folder
        )
