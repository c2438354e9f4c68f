"""Key `transform`: its short forms, its options, what is refused."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from msd_daemon.config.transform_file import Transform, TransformFile

ADAPTER = TypeAdapter(Transform)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ocrlab:jitter", {"call": "ocrlab:jitter"}),
        ("crop", {"use": "crop"}),
        ({"use": "crop"}, {"use": "crop"}),
        (
            {"use": "crop", "rate": 0.5, "by": "x"},
            {"use": "crop", "options": {"rate": 0.5, "by": "x"}},
        ),
        ({"use": "crop", "options": {"rate": 1}}, {"use": "crop", "options": {"rate": 1}}),
        ({"call": "a.b:C.f", "files": "x.txt"}, {"call": "a.b:C.f", "files": ["x.txt"]}),
        (
            {"call": "größe:fn", "python": "v/bin/python", "options": {"a": [1, {"b": None}]}},
            {"call": "größe:fn", "python": "v/bin/python", "options": {"a": [1, {"b": None}]}},
        ),
    ],
)
def test_forms(written, meant):
    assert ADAPTER.validate_python(written) == TransformFile(**meant)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({}, "gives call and use, or neither"),
        ({"call": "a:b", "use": "c"}, "gives call and use, or neither"),
        ({"use": "c", "python": "p"}, "remove python and files"),
        ({"use": "c", "files": ["p"]}, "remove python and files"),
        ({"call": "a"}, "not module:function"),
        ({"call": "a:"}, "not module:function"),
        ({"call": "../a:f"}, "not module:function"),
        ({"call": "a:f", "rate": 1}, "Extra inputs are not permitted"),
        ({"use": "c", "rate": 1, "options": {}}, "Extra inputs are not permitted"),
        ({"use": "c", "rate": float("nan")}, "options are not plain"),
        ({"use": "c", "when": object()}, "options are not plain"),
        ({"use": "c", "map": {1: 2}}, "keys that are no text"),
        ({"use": "c", "a-b": 2}, "'a-b' names no argument"),
        ({"use": "c", "text": "x" * 40_000}, "options of 40012 bytes, over 32768"),
        (7, "valid dictionary"),
    ],
)
def test_refusals(written, told):
    with pytest.raises(ValidationError, match=told):
        ADAPTER.validate_python(written)


def test_it_has_a_schema():
    schema = ADAPTER.json_schema(mode="validation")
    assert {"type": "string"} in schema["anyOf"]
