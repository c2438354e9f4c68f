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


VARLEN = "packing: varlen, step_tokens: 4M, microbatch_tokens: 32768"


def test_a_varlen_batch_says_tokens_and_no_rows(folder):
    rule = resolve(folder, f"{VARLEN}, segment_multiple: 16, long: skip").batch
    assert (rule.is_varlen, rule.step_tokens, rule.row_tokens) == (True, 4_000_000, 32768)
    assert (rule.rows, rule.microbatch_rows, rule.row_segments_max) == (124, 1, 4096)
    assert rule.step_tokens_max == 4_032_768
    ramped = resolve(
        folder,
        "packing: varlen, step_tokens: {0: 1M, 5B: 4M}, microbatch_tokens: {0: 8Ki, 9B: 32Ki}",
    ).batch
    assert ramped.step_tokens_ramp == (RampPoint(5 * 10**9, 4 * 10**6, "tokens"),)
    assert ramped.row_tokens_ramp == (RampPoint(9 * 10**9, 32768, "tokens"),)
    assert (ramped.rows, ramped.rows_ramp) == (124, ())
    later = ramped.at(0, 6 * 10**9)
    assert (later.step_tokens, later.row_tokens, later.rows) == (4 * 10**6, 8192, 490)


def test_another_size_of_varlen_steps_has_the_same_samples(folder):
    plain = resolve(folder, VARLEN)
    other = resolve(folder, "packing: varlen, step_tokens: {0: 8M, 9: 2M}, microbatch_tokens: 64Ki")
    assert other.digest() != plain.digest()
    assert other.sample_digest() == plain.sample_digest()
    assert resolve(folder).sample_digest() != plain.sample_digest()


@pytest.mark.parametrize(
    ("batch", "more", "line"),
    [
        ("packing: varlen, microbatch_tokens: 64", "", "batch.step_tokens: (nothing): a required key is missing; add it"),
        ("packing: varlen, step_tokens: 64", "", "batch.microbatch_tokens: (nothing): a required key is missing; add it"),
        (VARLEN + ", rows: 8", "", "batch.rows: 8: packing varlen has no such size; write step_tokens and microbatch_tokens"),
        ("rows: 8, row_tokens: 64, step_tokens: 4M", "", "batch.step_tokens: \"4M\": packing best_fit has no such size; write rows and row_tokens"),
        (VARLEN + ", microbatch_rows: 2", "", "batch.microbatch_rows: 2: a microbatch of packing varlen is one row"),
        (VARLEN + ", segment_multiple: 5", "", "batch.segment_multiple: 5: does not divide batch.microbatch_tokens 32768"),
        (VARLEN + ", row_multiple: 5", "", "batch.row_multiple: 5: does not divide batch.microbatch_tokens 32768"),
        (VARLEN, "documents: joined", 'documents: "joined": packing varlen deals documents one by one'),
        ("packing: varlen, step_tokens: 1T, microbatch_tokens: 64", "", "batch.step_tokens: 1000000000000: a step of 1000000000064 tokens is over"),
        ("packing: varlen, step_tokens: 4K, microbatch_tokens: 64", "", 'batch.step_tokens: "4K": K and k are refused'),
        ("packing: varlen, step_tokens: {5: 4}, microbatch_tokens: 64", "", "no entry begins at 0"),
        ("packing: varlen, step_tokens: 64, microbatch_tokens: 1", "", "batch.microbatch_tokens: 1: must be greater"),
        (VARLEN, "loaders: {val: {from: web, part: all, rows: 4}}\nmixture: {0: {web: 1}}", "loaders.val.rows: 4: packing varlen has no such size; write step_tokens"),
        ("rows: 8, row_tokens: 64", "loaders: {val: {from: web, part: all, step_tokens: 4}}\nmixture: {0: {web: 1}}", "loaders.val.step_tokens: 4: packing best_fit has no such size; write rows"),
    ],
)  # fmt: skip
def test_refusals_of_varlen(folder, batch, more, line):
    assert line in fault_of(folder, batch, more)


def test_a_field_per_row_has_no_place_in_varlen(folder):
    (folder / "a.jsonl").write_text('{"text": "abc", "score": 1}\n')
    text = (JOB % VARLEN).replace("a.txt", "a.jsonl") + "fields: {score: {per: row}}"
    with pytest.raises(
        JobError, match=r'fields\.score\.per: "row": rows of packing varlen are micro'
    ):
        resolve_job(text, folder)


def test_validation_of_varlen_has_tokens_of_its_own(folder):
    from federation.model.validation import validation_job

    more = "mixture: {0: {web: 1}}\nloaders: {a: {from: web, part: all, step_tokens: 64Ki}, b: {from: web, part: all}}"
    job = resolve(folder, VARLEN, more)
    own = validation_job(job, "a").batch
    assert (own.step_tokens, own.rows, own.step_tokens_ramp) == (65536, 3, ())
    assert validation_job(job, "b").batch.step_tokens == 4_000_000
