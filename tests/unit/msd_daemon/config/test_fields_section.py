"""User fields: names, fills and columns are checked before anything starts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.job import FieldRule
from msd_client.contract.errors import JobError
from msd_client.contract.user_fields import USER_FIELDS_MAX
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.transforms import open_tokenizer
from tests.support.sources import ROOT, compress

JOB = """
tokenizer: {bytes: true}
batch: {rows: 8, row_tokens: 512}
sources: {math: %s}
fields: %s
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a file of each format."""
    row = {"text": "abc", "adv": [1.0, 2.0, 3.0], "turn": [0, 1, 1], "reward": 0.5, "group": 3}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a.txt").write_text("abc\n")
    pq.write_table(pa.table({name: [value] for name, value in row.items()}), tmp_path / "a.parquet")
    return tmp_path


def fields_of(folder, fields, source="a.jsonl"):
    return resolve_job(JOB % (source, fields), folder).fields


def faults_of(folder, fields, source="a.jsonl"):
    with pytest.raises(JobError) as raised:
        fields_of(folder, fields, source)
    return raised.value.faults


def test_a_field_has_its_name_and_a_number_per_token_by_default(folder):
    assert fields_of(folder, "{reward: {per: segment}, adv: {}, b: adv}") == (
        FieldRule("adv", "adv", "token"),
        FieldRule("b", "adv", "token"),
        FieldRule("reward", "reward", "segment"),
    )


def test_everything_can_be_said(folder):
    fields = "{g: {from: group, per: row, dtype: int64, fill: -1}}"
    assert fields_of(folder, fields) == (FieldRule("g", "group", "row", "int64", -1.0),)


def test_fields_are_part_of_the_stream(folder):
    digests = {
        resolve_job(JOB % ("a.jsonl", fields), folder).digest()
        for fields in ("{}", "{adv: {}}", "{adv: {fill: 1}}", "{adv: {dtype: float64}}")
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ("{tokens: adv}", 'fields.tokens: "tokens": is a field of every batch'),
        ("{loss_weights: adv}", "is a field of every batch"),
        ("{cu_seqlens_padded: adv}", "is a field of every batch"),
        ("{a-b: adv}", "is no Python name"),
        ("{adv: {dtype: float16}}", 'fields.adv.dtype: "float16": is none of'),
        ("{adv: {per: batch}}", 'fields.adv.per: "batch": is none of'),
        ("{adv: {fill: .nan}}", "fields.adv.fill: NaN: is not finite"),
        ("{adv: {fill: .inf, dtype: int32}}", "fields.adv.fill: Infinity: is not finite"),
        ("{adv: {fill: 1.0e+39}}", "is no float32; write a smaller number"),
        ("{adv: {fill: .5, dtype: int32}}", "fields.adv.fill: 0.5: is no int32"),
        ("{adv: {fill: 2147483648, dtype: int32}}", "is no int32; write an integer it holds"),
        ("{adv: {fill: 9223372036854775808, dtype: int64}}", "is no int64"),
        ("{adv: {from: ''}}", "fields.adv.from"),
        ("{adv: {column: adv}}", "fields.adv.column"),
    ],
)
def test_refusals(folder, fields, line):
    (fault,) = faults_of(folder, fields)
    assert line in fault


def test_more_fields_than_a_slot_can_name_are_refused(folder):
    names = [f"f{number}" for number in range(USER_FIELDS_MAX + 1)]
    (fault,) = faults_of(folder, "{" + ", ".join(f"{name}: adv" for name in names) + "}")
    assert f"are more than the {USER_FIELDS_MAX} that a slot can name" in fault
    assert len(fields_of(folder, "{" + ", ".join(f"{n}: adv" for n in names[1:]) + "}")) == 24


def test_a_job_without_any_source_of_fields_is_refused(folder):
    (fault,) = faults_of(folder, "{adv: {}}", "a.txt")
    assert fault.startswith(
        'fields: "adv": no source has fields, plain text and .bin/.idx have none'
    )
    assert fields_of(folder, "{adv: {}}", "a.txt, other: a.jsonl")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ("{adv: advantage}", "fields.adv.from: \"advantage\": source 'math': a.parquet has no such column (it has text, adv, turn, reward, group)"),
        ("{a: reward}", "column 'reward' holds double, not lists of numbers"),
        ("{a: {from: adv, dtype: int32}}", "column 'adv' holds list<element: double>, not lists of integers"),
        ("{a: {from: adv, per: row}}", "column 'adv' holds list<element: double>, not numbers"),
        ("{a: {from: reward, per: row, dtype: int64}}", "column 'reward' holds double, not integers"),
        ("{a: text}", "column 'text' holds string, not lists of numbers"),
        ("{a: {from: text, per: segment}}", "column 'text' holds string, not numbers"),
    ],
)  # fmt: skip
def test_parquet_without_the_column_is_refused_naming_the_source(folder, fields, line):
    (fault,) = faults_of(folder, fields, "a.parquet")
    assert line in fault


def test_parquet_columns_that_fit_pass(folder):
    fields = "{adv: {}, turn: {dtype: int32}, t: turn, reward: {per: row}, group: {per: row}}"
    assert len(fields_of(folder, fields, "a.parquet")) == 5


def test_a_damaged_footer_is_left_to_the_error_policy(folder):
    (folder / "a.parquet").write_bytes(b"PAR1" + b"\0" * 64)
    assert fields_of(folder, "{adv: {}}", "a.parquet")


def test_the_example_reads_the_record_that_it_shows(tmp_path):
    """The record in the comment of examples/rl-fields.yaml gives the fields that it promises."""
    text = (ROOT / "examples" / "rl-fields.yaml").read_text()
    record = next(line[1:].strip() for line in text.splitlines() if line.startswith("#   {"))
    folder = tmp_path / "data" / "rollouts"
    folder.mkdir(parents=True)
    (folder / "math-0.jsonl").write_text(record + "\n")
    (folder / "code-0.jsonl.zst").write_bytes(compress(f"{record}\n".encode(), "zst"))
    job = resolve_job(text, tmp_path)
    assert [(field.name, field.per) for field in job.fields] == [
        ("advantage", "token"),
        ("reward", "segment"),
    ]
    for number, source in enumerate(job.sources):
        tokenizer = open_tokenizer(job.tokenizer)
        loader = SourceLoader(source, number, tokenizer, job.seed, 0, 1, None, job.fields)
        draft = loader.next_chunk(1 << 16)
        assert draft.payload[0].tolist() == json.loads(record)["ids"]
        assert [array.round(3).tolist() for array in draft.values] == [
            pytest.approx(json.loads(record)["advantages"]),
            [json.loads(record)["reward"]],
        ]
