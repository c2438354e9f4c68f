"""Arithmetic over the sizes of an item: how many placeholder tokens it takes in the text.

`ceil(ceil(frames / 2) / 4)`: numbers, + - * / // %, ceil, floor, min, max and the names of NAMES;
nothing else is read, so that an expression can do no harm and always ends.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("frames", "patches", "t", "h", "w", "merge")
CHARACTERS_MAX = 200
RESULT_MAX = 1 << 24

Number = int | float
Expression = Callable[[Mapping[str, int]], int]

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "min": min,
    "max": max,
}
_ONE_ARGUMENT = frozenset({"ceil", "floor"})


def compile_expression(text: str) -> Expression:
    """Return a function from sizes to a whole count.

    The function raises ValueError where the count is no whole number of 0 to RESULT_MAX.

    Raises:
        ValueError: The text is no such expression; the message ends with the remedy.
    """
    if len(text) > CHARACTERS_MAX:
        raise ValueError(f"is longer than {CHARACTERS_MAX} characters; write it shorter")
    try:
        root = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("is no expression; write one such as ceil(frames / 8)") from error
    _check(root)
    return lambda sizes: _whole(text, root, sizes)


def _check(node: ast.expr) -> None:
    """Refuse whatever `_value` could not compute."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if abs(value) > RESULT_MAX:
                raise ValueError(f"has a number over {RESULT_MAX}; write a smaller one")
        case ast.Name(id=name):
            if name not in NAMES:
                raise ValueError(f"has no name {name!r}; use {', '.join(NAMES)}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            _check(left)
            _check(right)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            is_one = name in _ONE_ARGUMENT
            if (
                not arguments
                or (is_one and len(arguments) != 1)
                or (not is_one and len(arguments) < 2)
            ):
                raise ValueError(
                    f"gives {name} {len(arguments)} arguments; ceil and floor take one, "
                    "min and max two or more"
                )
            for argument in arguments:
                _check(argument)
        case _:
            raise ValueError(
                f"holds {ast.unparse(node)!r}; use numbers, + - * / // %, ceil, floor, min, max and "
                f"{', '.join(NAMES)}"
            )


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Number:
    match node:
        case ast.Constant(value=value):
            assert isinstance(value, (int, float))
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(operand=operand):
            return -_value(operand, sizes)
        case ast.BinOp(left=left, op=sign, right=right):
            found: Number = _OPERATORS[type(sign)](_value(left, sizes), _value(right, sizes))
            return found
        case ast.Call(func=ast.Name(id=name), args=arguments):
            result: Number = _FUNCTIONS[name](*(_value(argument, sizes) for argument in arguments))
            return result
        case _:
            raise AssertionError("checked before")


def _whole(text: str, root: ast.expr, sizes: Mapping[str, int]) -> int:
    try:
        count = _value(root, sizes)
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{text!r} of {dict(sizes)} divides by zero; change it") from error
    if count != count or not 0 <= count <= RESULT_MAX or count != int(count):
        raise ValueError(
            f"{text!r} of {dict(sizes)} gives {count}, no whole number from 0 to {RESULT_MAX}; "
            "round it with ceil or floor"
        )
    return int(count)
