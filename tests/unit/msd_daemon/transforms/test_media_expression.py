"""Arithmetic that says how many placeholder tokens an item takes."""

from __future__ import annotations

import pytest

from msd_daemon.transforms.media_expression import compile_expression

SIZES = {"frames": 3000, "patches": 1380, "t": 1, "h": 30, "w": 46, "merge": 2}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("ceil(ceil(frames / 2) / 4)", 375),
        ("frames // 8", 375),
        ("patches // merge // merge", 345),
        ("t * (h // merge) * (w // merge + 1)", 360),
        ("min(max(frames, 5), 7, 9)", 7),
        ("floor(2.5) + 4 % 3 - -1", 4),
        (" 256 ", 256),
        ("6 / 2", 3),
    ],
)
def test_expressions(text: str, count: int) -> None:
    found = compile_expression(text)(SIZES)
    assert found == count
    assert isinstance(found, int)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no expression"),
        ("frames +", "is no expression"),
        ("<|image_pad|>", "is no expression"),
        ("seconds", "no name 'seconds'"),
        ("frames ** 2", "holds 'frames \\*\\* 2'"),
        ("frames.real", "holds 'frames.real'"),
        ("__import__('os')", "holds"),
        ("ceil(x=1)", "holds"),
        ("(lambda: 1)()", "holds"),
        ("[1][0]", "holds"),
        ("'a' * 9", "holds"),
        ("True", "holds"),
        ("1 if frames else 2", "holds"),
        ("ceil(1, 2)", "gives ceil 2 arguments"),
        ("min(1)", "gives min 1 arguments"),
        ("99999999999", "has a number over"),
        ("1e999", "has a number over"),
        ("(" * 150 + "1" + ")" * 150, "longer than 200"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_expression(text)(SIZES)


@pytest.mark.parametrize(
    "text", ["frames / 7", "h - w", "1 / (t - 1)", "frames % 0", "frames * frames * frames"]
)
def test_counts_are_whole_and_not_negative(text: str) -> None:
    with pytest.raises(ValueError, match=r"gives|divides by zero"):
        compile_expression(text)(SIZES)
