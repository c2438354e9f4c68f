"""The language of `where`: what it takes, what it means, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.field_numbers import UnfitValueError
from msd_daemon.sources.field_view import FieldView
from msd_daemon.sources.where import compile_where, where_columns


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("q > .6", {"q": 0.7}, True),
        ("q > .6", {"q": 0.6}, False),
        ("duration < 30", {"duration": 29}, True),
        ("0.2 < q <= 1", {"q": 1}, True),
        ("lang in ('en','de') and not (score <= 0.5)", {"lang": "de", "score": 0.6}, True),
        ("lang in ('en','de') and not (score <= 0.5)", {"lang": "de", "score": 0.5}, False),
        ("lang in ('en','de') and not (score <= 0.5)", {"lang": "de"}, True),
        ("lang not in ['en']", {"lang": "fr"}, True),
        ("lang not in ['en']", {}, False),
        ("len(text) > 3", {"text": "éééé"}, True),
        ("len(tokens) == 2", {"tokens": np.arange(2)}, True),
        ("text.startswith('a')", {"text": "ab"}, True),
        ("endswith(lower(text), 'b') or q == 1", {"text": "AB", "q": 2}, True),
        ("upper(x) == 'A'", {}, False),
        ("meta.lang == 'x'", {"meta": {"lang": "x"}}, True),
        ("meta.lang == 'x'", {"meta": None}, False),
        ("meta.lang == 'x'", {"meta.lang": "x"}, True),
        ("(a + b) * 2 / c >= 3", {"a": 1, "b": 2, "c": 2}, True),
        ("a / b > 0", {"a": 1, "b": 0}, False),
        ("-a < 0", {"a": 1}, True),
        ("x is None", {}, True),
        ("x is not None", {"x": 0}, True),
        ("x == None", {"x": 0}, False),
        ("x != 3", {}, False),
        ("x != 3", {"x": 4}, True),
        ("ok", {"ok": True}, True),
        ("not ok", {}, True),
        ("ok == true", {"ok": False}, False),
        ("'b' in tags", {"tags": ["a", "b"]}, True),
        ("'b' in text", {"text": "abc"}, True),
        ("3 in ids", {"ids": np.array([1, 2])}, False),
        ("field('a-b') == 2", {"a-b": 2}, True),
        ("n == 9007199254740993", {"n": 9007199254740992.0}, False),
        ("x > 1", {"x": float("nan")}, False),
        ("x > 1", {"x": np.float32(2)}, True),
        ("number(stars) >= 5", {"stars": "7"}, True),
        ("number(stars) >= 5", {"stars": " 4.5e0\n"}, False),
        ("number(stars) > 5", {"stars": 7}, True),
        ("number(stars) > 5", {}, False),
        ("number(stars) is None", {"stars": None}, True),
        ("stars.number() + 1 == -2", {"stars": "-3"}, True),
        ("number(n) == 9007199254740993", {"n": "9007199254740993"}, True),
        ("stars != '' and number(stars) > 5", {"stars": ""}, False),
    ],
)
def test_what_expressions_mean(text: str, fields: dict[str, Any], expected: bool) -> None:
    where = compile_where(text)
    assert where(fields) is expected
    assert where(FieldView(fields)) is expected


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("q > .6", {"q": "high"}, r"compares 'high' \(a str\) with 0.6 \(a float\)"),
        ("q > .6", {"q": True}, "compares True"),
        (
            "stars > 5",
            {"stars": "7"},
            r"compares '7' \(a str\) with 5 \(a int\): use number\(stars\)$",
        ),
        ("5 < a.b", {"a": {"b": "7"}}, r"use number\(a\.b\)$"),
        ("number(s) > 5", {"s": "7 stars"}, r"'number\(s\)' takes '7 stars', which is no number$"),
        ("number(s) > 5", {"s": ""}, "takes '', which is no number"),
        ("number(s) > 5", {"s": "nan"}, "takes 'nan', which is no number"),
        ("number(s) > 5", {"s": "007"}, "takes '007', which is no number"),
        ("number(s) > 5", {"s": "1_0"}, "takes '1_0', which is no number"),
        ("number(s) > 5", {"s": "\u0667"}, "which is no number"),
        ("number(s) > 5", {"s": "9" * 5000}, r"takes '999.* \.\.\., which is no number"),
        ("number(s) > 5", {"s": True}, "takes a bool, not a text or number"),
        ("lang == 'en'", {"lang": 3}, "compares 3"),
        ("lang in ('en',)", {"lang": 3}, "looks for 3"),
        ("ok and q > 1", {"ok": 1}, "'ok' is a int, not true or false"),
        ("len(n) > 1", {"n": 3}, "takes a int, which has no length"),
        ("lower(n) == 'a'", {"n": 3}, "takes a int, not a string"),
        ("a + 1 > 2", {"a": "1"}, "calculates with '1'"),
        ("x == y", {"x": [1], "y": [1]}, "compares"),
    ],
)
def test_values_of_other_types_are_faults(text: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnfitValueError, match=reason):
        compile_where(text)(fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 > 0",
        "x >",
        "x = 1",
        "__import__('os').system('true')",
        "open('f')",
        "().y > 1",
        "x.lower",
        "[i for i in x]",
        "lambda: x",
        "x[0] > 1",
        "x ** 9 > 1",
        "x << 9 > 1",
        "f'{x}' == 'a'",
        "b'a' == x",
        "x if y else z",
        "x is 3",
        "x < None",
        "x in (y,)",
        "len(x, y) > 1",
        "lower(x, key=1) == 'a'",
        "(y := x) > 1",
        "x == 1; y",
        "not " * 4000 + "x",
        "-" * 16_000 + "x > 1",
        "(" * 500 + "x" + ")" * 500,
        "x" * 20_000,
        "x in (" + "1," * 5000 + ")",
        "x.y" + "()" * 3000,
        "\0",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    if text == "x.lower":  # a nested field of that name, no method
        assert compile_where(text)({"x": {"lower": True}})
        return
    with pytest.raises(ConfigError, match="where: "):
        compile_where(text)


def test_no_attribute_of_an_object_is_reached() -> None:
    where = compile_where("x.__class__.__name__ == 'str'")
    assert where({"x": "text"}) is False
    assert where({"x": {"__class__": {"__name__": "str"}}}) is True


def test_products_of_products_end() -> None:
    text = " * ".join(["n"] * 40) + " > 0"
    assert compile_where(text)({"n": 1 << 4000}) is False


def test_top_level_fields_in_order_of_first_use() -> None:
    assert where_columns("meta.lang == 'a' and q > b or meta.x is None") == ("meta", "q", "b")
