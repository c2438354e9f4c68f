"""What a source's records are and which of them are samples: tokens, key, hold_out, loss_weight."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job

JOB = """
tokenizer: {bytes: true}
batch: {rows: 8, row_tokens: 512}
sources: {web: %s}
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a file of each format."""
    row = {"text": "abc", "ids": [1, 2, 3], "id": "k"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a.txt").write_text("abc\n")
    (tmp_path / "b.bin").write_bytes(b"\1\0" * 8)
    (tmp_path / "b.idx").write_bytes(b"MMIDIDX\0\0" + b"\0" * 64)
    table = {name: [value] for name, value in row.items()} | {"n": [7], "x": [0.5]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    return tmp_path


def resolve(folder, source):
    return resolve_job(JOB % source, folder).sources[0]


def fault_of(folder, source):
    with pytest.raises(JobError) as raised:
        resolve_job(JOB % source, folder)
    (fault,) = raised.value.faults
    return fault


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
def test_tokens_stand_in_place_of_text(folder, file):
    plain = resolve(folder, file)
    assert (plain.text_field, plain.tokens_field, plain.is_tokenized) == ("text", "", False)
    taken = resolve(folder, f"{{paths: {file}, tokens: ids}}")
    assert (taken.tokens_field, taken.is_tokenized, taken.token_bytes) == ("ids", True, 2)


@pytest.mark.parametrize(("vocabulary", "token_bytes"), [(65536, 2), (65537, 4), (None, 4)])
def test_ids_are_as_wide_as_the_vocabulary_needs(folder, vocabulary, token_bytes):
    tokenizer = "" if vocabulary is None else f"tokenizer: {{vocabulary: {vocabulary}}}"
    text = (JOB % "{paths: a.jsonl, tokens: ids}").replace("tokenizer: {bytes: true}", tokenizer)
    job = resolve_job(text, folder)
    assert job.sources[0].token_bytes == token_bytes
    assert job.tokenizer.kind == "none"


def test_own_text_wins_over_tokens_of_all(folder):
    text = JOB % "{paths: a.jsonl}, code: {paths: a.parquet, text: id}"
    text += "defaults: {tokens: ids, key: id, hold_out: .1, loss_weight: .5}"
    code, web = resolve_job(text, folder).sources
    assert (web.tokens_field, web.is_tokenized) == ("ids", True)
    assert (code.tokens_field, code.text_field, code.is_tokenized) == ("", "id", False)
    assert (web.key_field, web.hold_out, web.loss_weight) == ("id", 0.1, 0.5)


def test_defaults_that_a_format_has_no_use_for_are_left_out(folder):
    text = JOB % "a.txt, pair: b.bin" + "defaults: {tokens: ids, key: id, hold_out: .1}"
    pair, web = resolve_job(text, folder).sources
    assert (pair.tokens_field, pair.key_field, pair.is_tokenized, pair.hold_out) == (
        "",
        "",
        True,
        0.1,
    )
    assert (web.tokens_field, web.key_field, web.is_tokenized, web.hold_out) == ("", "", False, 0.1)


def test_nothing_is_held_out_by_default(folder):
    spec = resolve(folder, "a.jsonl")
    assert (spec.hold_out, spec.part, spec.key_field, spec.loss_weight) == (0, "train", "", 1)


@pytest.mark.parametrize(
    ("own", "found"), [("hold_out: 0", (0, 0.25)), ("loss_weight: 1", (0.5, 1))]
)
def test_an_own_zero_or_one_wins_over_the_default(folder, own, found):
    text = JOB % f"{{paths: a.jsonl, {own}}}" + "defaults: {hold_out: .5, loss_weight: .25}"
    spec = resolve_job(text, folder).sources[0]
    assert (spec.hold_out, spec.loss_weight) == found


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{paths: a.txt, tokens: ids}", "sources.web.tokens: \"ids\": format text has no fields"),
        ("{paths: b.bin, key: id}", "sources.web.key: \"id\": format megatron has no fields"),
        ("{paths: a.jsonl, tokens: ids, text: text}", "sources.web.tokens: \"ids\": text is given too"),
        ("{paths: a.jsonl, hold_out: 1}", "sources.web.hold_out: 1: must be less than 1"),
        ("{paths: a.jsonl, hold_out: -0.1}", "sources.web.hold_out: -0.1: must be greater"),
        ("{paths: a.jsonl, hold_out: .nan}", "sources.web.hold_out: NaN: "),
        ("{paths: a.jsonl, loss_weight: 0}", "sources.web.loss_weight: 0: must be greater than 0"),
        ("{paths: a.jsonl, loss_weight: .inf}", "sources.web.loss_weight: Infinity: "),
        ("{paths: a.parquet, tokens: toks}", "sources.web.tokens: \"toks\": a.parquet has no such column"),
        ("{paths: a.parquet, tokens: text}", "column 'text' holds string, not lists of token ids"),
        ("{paths: a.parquet, tokens: n}", "column 'n' holds int64, not lists of token ids"),
        ("{paths: a.parquet, text: text+body}", "sources.web.text: \"body\": a.parquet has no such"),
        ("{paths: a.parquet, key: k, hold_out: .1}", "sources.web.key: \"k\": a.parquet has no such"),
        ("{paths: a.parquet, key: x, hold_out: .1}", "column 'x' holds double, not text or integers"),
    ],
)  # fmt: skip
def test_refusals(folder, source, line):
    assert line in fault_of(folder, source)


@pytest.mark.parametrize(
    "source",
    [
        "{paths: a.parquet, text: text+id}",
        "{paths: a.parquet, key: n, hold_out: .1}",
        "{paths: a.parquet, key: gone}",  # nothing is held out, so none is read
        "{paths: a.parquet, tokens: ids, key: id, hold_out: .1}",
    ],
)
def test_columns_that_are_there_pass(folder, source):
    assert resolve(folder, source).format == "parquet"


def test_a_loss_weight_of_one_source_gives_batches_loss_weights(folder):
    assert not resolve_job(JOB % "a.jsonl", folder).has_loss_weights
    assert resolve_job(JOB % "{paths: a.jsonl, loss_weight: .5}", folder).has_loss_weights
    assert resolve_job(JOB % "a.jsonl" + "ignore: loss_mask", folder).has_loss_weights


def test_what_is_held_out_is_part_of_the_stream(folder):
    digests = {
        resolve_job(JOB % f"{{paths: a.jsonl, {keys}}}", folder).digest()
        for keys in ("key: id", "hold_out: .1", "hold_out: .2", "hold_out: .1, key: id")
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("tokenizer", "width", "id_bytes"),
    [("{vocabulary: 200000}", "", 0), ("{vocabulary: 200000}", ", token_bytes: 2", 2),
     ("", ", token_bytes: 4", 4)],
)  # fmt: skip
def test_files_of_bare_ids_are_as_wide_as_the_job_says(folder, tokenizer, width, id_bytes):
    text = JOB % f"{{paths: b.bin, format: token_file{width}}}"
    text = text.replace("tokenizer: {bytes: true}", f"tokenizer: {tokenizer}" if tokenizer else "")
    (source,) = resolve_job(text, folder).sources
    assert source.token_file.id_bytes == id_bytes


def test_bare_ids_of_unknown_width_are_refused(folder):
    text = (JOB % "{paths: b.bin, format: token_file}").replace("tokenizer: {bytes: true}", "")
    with pytest.raises(JobError, match=r"sources\.web\.token_bytes.* no tokenizer .*write 2"):
        resolve_job(text, folder)
    assert "records of its own" in fault_of(folder, "{paths: a.jsonl, token_bytes: 2}")
