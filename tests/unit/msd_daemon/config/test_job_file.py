"""What a job file may say, and the fault line for each thing it may not."""

import json

import pytest

from msd_daemon.config.job_file import job_schema, parse_job_file
from msd_daemon.config.yaml_text import read_yaml

SMALLEST = "{batch: {rows: 4, row_tokens: 8}, sources: {web: web/*.jsonl}}"


def lines_of(text: str) -> list[str]:
    return [fault.line() for fault in parse_job_file(read_yaml(text)).faults]


def with_key(key: str) -> str:
    return SMALLEST[:-1] + f", {key}}}"


def test_smallest_job_has_the_documented_defaults():
    parsed = parse_job_file(read_yaml(SMALLEST))
    assert not parsed.faults
    file = parsed.file
    assert (file.batch.packing, file.batch.long, file.batch.microbatch_rows) == (
        "best_fit",
        "split",
        1,
    )
    assert (file.labels, file.ignore, file.documents) == ("shifted", -100, "separate")
    assert (file.dtypes.tokens, file.dtypes.labels) == ("int32", "int64")
    assert file.sources["web"].paths == ["web/*.jsonl"]
    assert file.strategy == "balanced"


def test_sources_take_a_glob_a_list_or_a_map():
    text = with_key("seed: 1").replace(
        "{web: web/*.jsonl}", "{a: x, b: [x, y], c: {paths: x, text: body, shuffle: false}}"
    )
    sources = parse_job_file(read_yaml(text)).file.sources
    assert sources["a"].paths == ["x"]
    assert sources["b"].paths == ["x", "y"]
    assert sources["c"].text == "body"
    assert sources["c"].shuffle.is_shuffled is False


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("sead: 1", "sead: 1: unknown key; did you mean seed?"),
        ("seed: x", 'seed: "x": must be a valid integer; write a whole number'),
        ("seed: -1", "seed: -1: must be greater than or equal to 0; write a larger number"),
        ("schema: 2", "schema: 2: is none of 1; write one of them"),
        ("steps: 8k", 'steps: "8k": K and k are refused'),
        ("steps: 0", "steps: 0: must be greater than or equal to 1"),
        ("tokens: 1.5", "tokens: 1.5: is not a whole number"),
        ("labels: both", "labels: \"both\": is none of 'shifted' or 'aligned'; write one of them"),
        ("name: 'a b'", 'name: "a b": not a name'),
        ("dtypes: {tokens: int8}", 'dtypes.tokens: "int8": is none of'),
        ("loader: {train: {}}", 'loader: {"train": {}}: unknown key'),
        ("field: {}", "field: {}: unknown key"),
        (
            "tokenizer: {file: a, dir: b}",
            "gives file and dir; give one of file, dir, tiktoken, bytes",
        ),
        ("tokenizer: {eos: end}", "gives no tokenizer"),
        ("tokenizer: {bytes: true, pattern: gpt2}", "a pattern belongs to a tiktoken file"),
        ("tokenizer: {bytes: true, eos: -3}", "tokenizer.eos: -3: neither a token nor an id"),
        ("defaults: {wherever: 'q > 1'}", 'defaults.wherever: "q > 1": unknown key'),
        ("defaults: {on_error: {budget_ratio: 2}}", "defaults.on_error.budget_ratio: 2"),
        (
            "defaults: {on_error: ignore}",
            "defaults.on_error.policy: \"ignore\": is none of 'skip', 'fail' or 'quarantine'",
        ),
        ("defaults: {shuffle: {interleave: 0}}", "defaults.shuffle.interleave: 0: must be greater"),
        ("defaults: {record_bytes_max: 4M}", 'defaults.record_bytes_max: "4M": unknown suffix'),
        ("mixture: {unit: words, 0: {web: 1}}", 'mixture.unit: "words": is none of'),
        ("mixture: {web: 6}", "weights stand under the step or token count that they hold from"),
        ("mixture: {x: {web: 6}}", 'mixture.x: "x": is not a number; write a step (0, 1000)'),
        ("mixture: {0: {web: .nan}}", "mixture.0.web: NaN: a weight is finite and not negative"),
        ("mixture: {0: {web: .inf}}", "mixture.0.web: Infinity: a weight is finite"),
        ("mixture: {0: {web: -1}}", "mixture.0.web: -1: a weight is finite and not negative"),
        ("mixture: {0: {web: '4'}}", 'mixture.0.web: "4": a weight is a number, this is str'),
        ("mixture: {}", "mixture: {}: "),
        ("ignore: mask", 'ignore: "mask": neither a label nor loss_mask'),
        ("ignore: true", "ignore: true: neither a label nor loss_mask"),
    ],
)
def test_fault_names_key_value_and_remedy(key, line):
    (found,) = lines_of(with_key(key))
    assert line in found
    assert "; " in found


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ("{row_tokens: 8}", "batch.rows: (nothing): a required key is missing; add it"),
        ("{rows: 0, row_tokens: 8}", "batch.rows: 0: must be greater"),
        ("{rows: {5: 4}, row_tokens: 8}", 'batch.rows: {"5": 4}: no entry begins at 0'),
        ("{rows: {0: 4, 9: 8, 1M: 4}, row_tokens: 8}", "steps and tokens are mixed"),
        ("{rows: {0: 4, 9: x}, row_tokens: 8}", 'batch.rows.9: "x": is not a number'),
        ("{rows: 4, row_tokens: 1}", "batch.row_tokens: 1: must be greater than or equal to 2"),
        ("{rows: 4, row_tokens: 1T}", 'batch.row_tokens: "1T": must be less than'),
        ("{rows: 4, row_tokens: 8, packing: rows}", 'batch.packing: "rows": is none of'),
        ("{rows: true, row_tokens: 8}", "batch.rows: true: expected a number, got bool"),
    ],
)
def test_batch_faults(batch, line):
    (found,) = lines_of(SMALLEST.replace("{rows: 4, row_tokens: 8}", batch))
    assert line in found


@pytest.mark.parametrize("name", ["a b", "-a", "", "*", "a/b", "x" * 65, "ü"])
def test_source_names_are_checked(name):
    (found,) = lines_of(SMALLEST.replace("web:", f"{json.dumps(name)}:"))
    assert "not a name" in found


def test_all_faults_stand_together_and_sound_sections_remain():
    text = """
    seed: 3
    tokenizer: {file: t.json, dir: d}
    batch: {rows: 4, row_tokens: 8K}
    sources: {web: web/*.jsonl, code: {path: x}}
    mixture: {0: {web: .nan, code: -1}}
    """
    parsed = parse_job_file(read_yaml(text))
    paths = {fault.path for fault in parsed.faults}
    assert paths == {
        "tokenizer",
        "batch.row_tokens",
        "sources.code.path",
        "sources.code.paths",
        "mixture.0.web",
        "mixture.0.code",
    }
    assert parsed.broken == {"tokenizer", "batch", "sources.code", "mixture"}
    assert parsed.file.seed == 3
    assert set(parsed.file.sources) == {"web"}


def test_sources_that_are_no_map_do_not_hide_other_faults():
    lines = lines_of("{sources: 3, batch: {rows: 0, row_tokens: 8}}")
    assert any(line.startswith("sources: 3: ") for line in lines)
    assert any(line.startswith("batch.rows: 0: ") for line in lines)


def test_long_values_are_cut():
    (line,) = lines_of(with_key(f"labels: {'x' * 500}"))
    assert len(line) < 200


def test_schema_names_every_key_and_takes_short_forms():
    schema = job_schema()
    assert {"schema", "stream", "sources", "mixture", "batch", "tokenizer"} <= set(
        schema["properties"]
    )
    assert schema["required"] == ["batch", "sources"]
    source = json.dumps(schema["properties"]["sources"])
    assert '"type": "string"' in source
    assert '"type": "array"' in source
