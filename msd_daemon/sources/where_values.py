"""What the parts of a `where` expression give for the fields of a record; None stands for absent.

Whole numbers and floats compare exactly, texts by code points, true and false only with each other.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from msd_daemon.sources.field_numbers import UnfitValueError, kind_of, shown

Fields = Mapping[str, Any]
Value = Callable[[Fields], Any]
Test = Callable[[Fields], bool]
Operator = Callable[[Any, Any], Any]

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
OPERATORS: dict[str, Operator] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ARITHMETIC: dict[type[ast.operator], Operator] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS = frozenset({"len", "lower", "upper", "startswith", "endswith", "number"})
_DIGITS_BITS_MAX = 1 << 16
"""Whole numbers beyond are null: products of products need not end."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS_MAX = 1024
"""Of a text that is a number; Python's own limit can be changed from outside."""


def constant(value: Any) -> Value:
    """Return the function of a constant."""
    return lambda _: value


def lookup(path: tuple[str, ...]) -> Value:
    """Return the function of a field, by its whole name or key by key."""
    name = ".".join(path)
    first, keys = path[0], path[1:]

    def look(fields: Fields) -> Any:
        value = fields.get(name)
        if value is None and keys:
            value = fields.get(first)
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
        return value.item() if isinstance(value, np.generic) else value

    return look


def both(parts: Sequence[Test]) -> Test:
    """Return the function that is true where all parts are."""
    return lambda fields: all(part(fields) for part in parts)


def either(parts: Sequence[Test]) -> Test:
    """Return the function that is true where a part is."""
    return lambda fields: any(part(fields) for part in parts)


def negate(part: Test) -> Test:
    """Return the function that is true where a part is not."""
    return lambda fields: not part(fields)


def none_test(value: Value, *, is_wanted: bool) -> Test:
    """Return the function that asks whether a value is absent, or there."""
    return lambda fields: (value(fields) is None) is is_wanted


def is_true(value: Value, source: str) -> Test:
    """Return the function of a value that is a condition by itself."""

    def test(fields: Fields) -> bool:
        found = value(fields)
        if found is None:
            return False
        if type(found) is not bool:
            raise UnfitValueError(f"{source!r} is {kind_of(found)}, not true or false")
        return found

    return test


def compare(name: str, left: Value, right: Value, source: str, sides: tuple[str, str]) -> Test:
    """Return the function of a comparison; false where a side is absent.

    Args:
        name: The operator.
        left: What gives one side.
        right: What gives the other.
        source: The expression, for people.
        sides: Both sides of it, for people.
    """
    function = OPERATORS[name]

    def test(fields: Fields) -> bool:
        one, other = left(fields), right(fields)
        if one is None or other is None:
            return False
        family, second = _family(one), _family(other)
        if not family or family != second:
            remedy = ""
            if {family, second} == {"text", "number"}:
                remedy = f": use number({sides[0 if family == 'text' else 1]})"
            raise UnfitValueError(
                f"{source!r} compares {shown(one)} ({kind_of(one)}) with {shown(other)} "
                f"({kind_of(other)}){remedy}"
            )
        return bool(function(one, other))

    return test


def membership(value: Value, items: frozenset[Any] | Value, source: str) -> Test:
    """Return the function of `in`: one of constants, part of a text, or item of a list.

    Args:
        value: What is looked for.
        items: (whether it is a truth value, constant) of each, or what gives a text or a list.
        source: The expression, for people.
    """
    if isinstance(items, frozenset):
        families = {_family(item) for _, item in items}

        def is_listed(fields: Fields) -> bool:
            found = value(fields)
            if found is None:
                return False
            if _family(found) not in families:
                raise UnfitValueError(f"{source!r} looks for {shown(found)} ({kind_of(found)})")
            return (type(found) is bool, found) in items

        return is_listed
    inside = items

    def is_part(fields: Fields) -> bool:
        found, whole = value(fields), inside(fields)
        if found is None or whole is None:
            return False
        if isinstance(whole, str) and isinstance(found, str):
            return found in whole
        if isinstance(whole, (list, tuple, np.ndarray)):
            return any(
                _family(item) == _family(found) and item == found
                for item in (whole.tolist() if isinstance(whole, np.ndarray) else whole)
            )
        raise UnfitValueError(
            f"{source!r} looks for {shown(found)} ({kind_of(found)}) in {kind_of(whole)}"
        )

    return is_part


def calculate(function: Operator, left: Value, right: Value, source: str) -> Value:
    """Return the function of arithmetic on two numbers.

    Null where one is, where it divides by zero, and where the result is beyond all bounds.
    """

    def result(fields: Fields) -> Any:
        one, other = left(fields), right(fields)
        if one is None or other is None:
            return None
        for number in (one, other):
            if _family(number) != "number":
                raise UnfitValueError(
                    f"{source!r} calculates with {shown(number)} ({kind_of(number)})"
                )
        try:
            found = function(one, other)
        except (ZeroDivisionError, OverflowError):
            return None
        if isinstance(found, int) and found.bit_length() > _DIGITS_BITS_MAX:
            return None
        return found

    return result


def call(name: str, arguments: list[Value], source: str) -> Value:
    """Return the function of a call; null where its argument is."""
    if name == "len":
        return _length(arguments[0], source)
    if name == "number":
        return _number(arguments[0], source)
    if name in ("lower", "upper"):
        change = str.lower if name == "lower" else str.upper
        return lambda fields: _text_call(change, [part(fields) for part in arguments], source)
    ask = str.startswith if name == "startswith" else str.endswith
    return lambda fields: _text_call(ask, [part(fields) for part in arguments], source)


def _length(value: Value, source: str) -> Value:
    def length(fields: Fields) -> int | None:
        found = value(fields)
        if found is None:
            return None
        if not isinstance(found, (str, bytes, list, tuple, dict, np.ndarray)):
            raise UnfitValueError(f"{source!r} takes {kind_of(found)}, which has no length")
        return len(found)

    return length


def _number(value: Value, source: str) -> Value:
    """Return the function of a number, or of a text that is one as JSON writes them."""

    def number(fields: Fields) -> Any:
        found = value(fields)
        if found is None or _family(found) == "number":
            return found
        if not isinstance(found, str):
            raise UnfitValueError(f"{source!r} takes {kind_of(found)}, not a text or number")
        text = found.strip(" \t\r\n")
        match = _NUMBER.fullmatch(text) if len(text) <= _NUMBER_CHARACTERS_MAX else None
        if match is None:
            raise UnfitValueError(f"{source!r} takes {shown(found)}, which is no number")
        return float(text) if match[1] or match[2] else int(text)

    return number


def _text_call(function: Callable[..., Any], values: list[Any], source: str) -> Any:
    if any(value is None for value in values):
        return None
    for value in values:
        if not isinstance(value, str):
            raise UnfitValueError(f"{source!r} takes {kind_of(value)}, not a string")
    return function(*values)


def _family(value: Any) -> str:
    """Return what a value can be compared with; empty: nothing."""
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, (int, float)):
        return "number"
    return "text" if isinstance(value, str) else ""
