"""Shape of a step: multiples, ramps, tails and masks, with the numbers in each refusal."""

import pytest

from federation.model.job import RampPoint
from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job

JOB = """
tokenizer: {bytes: true}
batch: {%s}
sources: {web: a.txt}
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with one source."""
    (tmp_path / "a.txt").write_text("abc\n")
    return tmp_path


def resolve(folder, batch="rows: 8, row_tokens: 512", more=""):
    return resolve_job(JOB % batch + more, folder)


def fault_of(folder, batch="rows: 8, row_tokens: 512", more=""):
    with pytest.raises(JobError) as raised:
        resolve(folder, batch, more)
    (fault,) = raised.value.faults
    return fault


def test_defaults(folder):
    job = resolve(folder)
    rule = job.batch
    assert (rule.segment_multiple, rule.row_multiple, rule.boundaries) == (1, 1, "exact")
    assert (rule.rows_ramp, rule.row_tokens_ramp, rule.is_mtp) == ((), (), False)
    assert (rule.ignore, rule.ignore_label, job.end) == ("label", -100, "pad")
    assert rule.cp_layout == "zigzag_row"
    assert not job.has_loss_weights


def test_a_ramp_is_its_first_value_and_the_later_ones_by_start(folder):
    rule = resolve(
        folder, "rows: {500: 32, 0: 8, 100: 16}, row_tokens: {0: 512, 2B: 2048, 1B: 1024}"
    ).batch
    assert (rule.rows, rule.row_tokens) == (8, 512)
    assert rule.rows_ramp == (RampPoint(100, 16), RampPoint(500, 32))
    billion = 10**9
    assert rule.row_tokens_ramp == (
        RampPoint(billion, 1024, "tokens"),
        RampPoint(2 * billion, 2048, "tokens"),
    )
    assert rule.rows_values == (8, 16, 32)
    later = rule.at(100, billion - 1)
    assert (later.rows, later.row_tokens, later.rows_ramp) == (16, 512, ())
    assert (rule.at(99, 2 * billion).rows, rule.at(99, 2 * billion).row_tokens) == (8, 2048)


def test_a_plain_number_and_a_ramp_of_one_are_the_same_job(folder):
    plain = resolve(folder, "rows: 8, row_tokens: 512")
    assert resolve(folder, "rows: {0: 8}, row_tokens: {0: 512}").digest() == plain.digest()


def test_another_shape_has_the_same_samples(folder):
    plain = resolve(folder)
    for batch in (
        "rows: 16, row_tokens: 512",
        "rows: 8, row_tokens: 1024",
        "rows: {0: 8, 9: 16}, row_tokens: {0: 512, 1M: 1024}",
    ):
        other = resolve(folder, batch)
        assert other.digest() != plain.digest()
        assert other.sample_digest() == plain.sample_digest()
    longer = resolve(folder, "rows: 8, row_tokens: 512, long: skip")
    assert longer.sample_digest() != plain.sample_digest()


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ("rows: {0: 8, 5: 9}, row_tokens: 512, microbatch_rows: 2", "batch.microbatch_rows: 2: does not divide batch.rows 9"),
        ("rows: {5: 8}, row_tokens: 512", "no entry begins at 0"),
        ("rows: {0: 8, 1M: 9, 1.0M: 10}, row_tokens: 512", "begin at the same point"),
        ("rows: {}, row_tokens: 512", "no entry begins at 0"),
        ("rows: 8, row_tokens: {0: 512, 5: 1}", "batch.row_tokens.5: 1: must be greater"),
        ("rows: {0: 8, 1M: 0}, row_tokens: 512", "batch.rows.1M: 0: must be greater"),
        ("rows: 8, row_tokens: 512, row_multiple: 3", "batch.row_multiple: 3: does not divide batch.row_tokens 512"),
        ("rows: 8, row_tokens: {0: 512, 9: 520}, row_multiple: 128", "batch.row_multiple: 128: does not divide batch.row_tokens 520"),
        ("rows: 8, row_tokens: 512, segment_multiple: 5", "batch.segment_multiple: 5: does not divide batch.row_tokens 512"),
        ("rows: 8, row_tokens: 512, segment_multiple: 8, packing: concat", "packing concat leaves no place empty"),
        ("rows: 8, row_tokens: 512, segment_multiple: 0", "batch.segment_multiple: 0"),
        ("rows: 8, row_tokens: 512, boundaries: padded", "batch.boundaries: \"padded\": is none of"),
        ("rows: 8, row_tokens: 512, cp_layout: zigzag", "batch.cp_layout: \"zigzag\": is none of"),
    ],
)  # fmt: skip
def test_refusals(folder, batch, line):
    assert line in fault_of(folder, batch)


def test_multiples_that_divide_pass(folder):
    rule = resolve(
        folder, "rows: 8, row_tokens: {0: 512, 9: 640}, row_multiple: 128, segment_multiple: 16"
    ).batch
    assert (rule.row_multiple, rule.segment_multiple) == (128, 16)


@pytest.mark.parametrize("end", ["pad", "drop", "wrap"])
def test_tails(folder, end):
    assert resolve(folder, more=f"end: {end}\nepochs: 1").end == end


def test_an_unknown_tail_is_refused(folder):
    assert 'end: "cut": is none of' in fault_of(folder, more="end: cut")


def test_a_loss_mask_has_ids_for_labels(folder):
    job = resolve(folder, "rows: 8, row_tokens: 512, pad_id: 7", "ignore: loss_mask")
    assert (job.batch.ignore, job.batch.ignore_label) == ("loss_mask", 7)
    assert job.has_loss_weights


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("ignore: mask", '"mask": neither a label nor loss_mask'),
        ("ignore: 5", "ignore: 5: is an id of the vocabulary (0..255)"),
        ("ignore: true", "true: neither a label nor loss_mask"),
    ],
)
def test_other_masks_are_refused(folder, more, line):
    with pytest.raises(JobError) as raised:
        resolve(folder, more=more)
    assert any(line in fault for fault in raised.value.faults)
