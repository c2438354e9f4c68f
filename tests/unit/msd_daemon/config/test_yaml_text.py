"""YAML that would pass silently elsewhere is refused here."""

import math

import pytest

from msd_daemon.config.yaml_text import TEXT_BYTES_MAX, YamlFaultError, plain_map, read_yaml


def faults_of(text: str) -> list[str]:
    with pytest.raises(YamlFaultError) as raised:
        read_yaml(text)
    return [fault.line() for fault in raised.value.faults]


def test_keys_become_strings():
    assert read_yaml("{0: {a: 1}, 250B: 2}") == {"0": {"a": 1}, "250B": 2}


def test_all_duplicate_keys_are_named_with_their_lines():
    lines = faults_of("seed: 1\nseed: 2\nbatch:\n  rows: 1\n  rows: 2\n")
    assert len(lines) == 2
    assert any(line.startswith('line 2: "seed": the key stands twice') for line in lines)
    assert any(line.startswith('line 5: "rows": the key stands twice') for line in lines)


@pytest.mark.parametrize(("key", "kind"), [("no", "bool"), ("on", "bool"), ("2024-01-02", "times")])
def test_keys_that_yaml_reads_as_something_else_are_refused(key, kind):
    (line,) = faults_of(f"sources: {{{key}: a.jsonl}}")
    assert key in line
    assert kind in line
    assert line.endswith("put it in quotes")


def test_quoted_names_pass():
    assert read_yaml("sources: {'no': a.jsonl}") == {"sources": {"no": "a.jsonl"}}


def test_syntax_faults_name_line_and_column():
    (line,) = faults_of("batch: {rows: 1\nsources: [")
    assert line.startswith("line 2 column")


@pytest.mark.parametrize("text", ["[1, 2]", "", "just text", "a: 1\n---\nb: 2"])
def test_what_is_not_one_map_is_refused(text):
    assert faults_of(text)


def test_python_tags_are_refused():
    assert "could not determine a constructor" in faults_of("!!python/object/apply:os.getpid []")[0]


def test_aliases_that_unfold_without_end_are_refused():
    text = "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    for this, last in zip("bcdefgh", "abcdefg", strict=True):
        text += f"{this}: &{this} [{','.join([f'*{last}'] * 10)}]\n"
    assert "too large" in faults_of(text)[0]


def test_self_referring_alias_is_refused():
    assert faults_of("a: &a [*a]")


def test_deep_nesting_is_refused():
    assert faults_of("a: " + "[" * 5000 + "]" * 5000)


def test_large_text_is_refused():
    assert "1 MiB" in faults_of("a: " + "x" * TEXT_BYTES_MAX)[0]


def test_map_is_copied_with_string_keys():
    assert plain_map({0: {"a": (1, 2)}}) == {"0": {"a": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("5e-3", 5e-3), ("1E5", 1e5), ("+1.5e3", 1500.0), ("-.5", -0.5), (".5e1", 5.0),
     ("Infinity", math.inf), ("-Infinity", -math.inf), ("1.5", 1.5)],
)  # fmt: skip
def test_numbers_are_read_as_json_and_yaml_1_2_write_them(text, value):
    read = read_yaml(f'{{"a": {text}, b: [{text}]}}')
    assert read == {"a": value, "b": [value]}
    assert type(read["a"]) is float


def test_not_a_number_is_one():
    assert math.isnan(read_yaml("a: NaN")["a"])


@pytest.mark.parametrize("text", ["1e-5", "NaN", "Infinity"])
def test_quoted_and_tagged_text_and_keys_stay_text(text):
    assert read_yaml(f"a: '{text}'") == {"a": text}
    assert read_yaml(f'a: "{text}"') == {"a": text}
    assert read_yaml(f"a: !!str {text}") == {"a": text}
    assert read_yaml(f"{{{text}: 1}}") == {text: 1}
    assert read_yaml(f"a: {{<<: {{{text}: 1}}}}") == {"a": {text: 1}}


@pytest.mark.parametrize("text", ["1e", "e5", "1e-5x", "NaNa", "08", "1_0e5", "v1e5", "+Infinity"])
def test_what_only_begins_like_a_number_stays_text(text):
    assert read_yaml(f"a: {text}") == {"a": text}
