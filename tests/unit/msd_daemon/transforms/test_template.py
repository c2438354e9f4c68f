"""Field templates: what goes in, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.field_numbers import UnfitValueError
from msd_daemon.transforms.template import compile_template


def test_fields_are_joined() -> None:
    template = compile_template("Q: {question}\nA: {answer} {question}{{x}}")
    assert template.fields == ("question", "answer")
    assert template.render({"question": "why?", "answer": "é😀", "more": 1}) == (
        "Q: why?\nA: é😀 why?{x}"
    )
    assert compile_template("{a}").render({"a": ""}) == ""


def test_names_go_into_maps_unless_a_field_is_called_so() -> None:
    template = compile_template("{meta.title.en}|{a-b}")
    assert template.fields == ("meta.title.en", "a-b")
    assert compile_template("{Best Answer}").render({"Best Answer": 1}) == "1"
    assert template.render({"meta": {"title": {"en": "x"}}, "a-b": "y"}) == "x|y"
    assert template.render({"meta.title.en": "flat", "a-b": "y"}) == "flat|y"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (-0.5, "-0.5"),
        (1e30, "1e+30"),
        (True, "true"),
        (False, "false"),
        (np.int64(7), "7"),
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "true"),
        (10**30, "1" + "0" * 30),
        ("{b}", "{b}"),
    ],
)
def test_numbers_are_written_as_json(value: object, text: str) -> None:
    assert compile_template("<{a}>").render({"a": value}) == f"<{text}>"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "field 'a' is absent"),
        ({"a": None}, "field 'a' is null, not a string or a number"),
        ({"a": ["x"]}, "field 'a' is a list"),
        ({"a": {"b": 1}}, "field 'a' is a dict"),
        ({"a": b"x"}, "field 'a' is a bytes"),
        ({"a": float("nan")}, "field 'a' is nan, no finite number"),
        ({"a": np.zeros(2)}, "field 'a' is a ndarray"),
        ({"a": "x\ud800"}, "field 'a' has a lone surrogate at character 1"),
    ],
)
def test_values_that_are_no_text_are_named(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(UnfitValueError, match=reason):
        compile_template("{a}").render(fields)


def test_a_key_of_what_is_no_map_is_absent() -> None:
    with pytest.raises(UnfitValueError, match=r"field 'a\.b' is absent"):
        compile_template("{a.b}").render({"a": "text"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{a", "single '{' at character 0"),
        ("a}", "single '}' at character 1"),
        ("{}", "no field's name"),
        ("{a.}", "no field's name"),
        ("{a[0]}", "no field's name"),
        ("{a!r}", "no field's name"),
        ("{a:>10}", "no field's name"),
        ("{ a}", "no field's name"),
        ("{a.__class__()}", "no field's name"),
        ("{{a}}", "names no field"),
        ("", "names no field"),
        ("{{{a}", ""),
    ],
)
def test_templates_that_say_more_than_fields_are_refused(text: str, reason: str) -> None:
    if not reason:
        assert compile_template(text).render({"a": "x"}) == "{x"
        return
    with pytest.raises(ConfigError, match=reason):
        compile_template(text)


def test_names_of_attributes_are_only_keys() -> None:
    with pytest.raises(UnfitValueError, match="is absent"):
        compile_template("{a.__class__}").render({"a": "x"})
