"""`where` on whole columns: the leading conditions that pyarrow can judge as exactly as Python does.

What cannot fault and means the same in both is translated: comparisons of a column of numbers,
text or truth values with a constant, lists of constants, None tests, lengths and beginnings. The
rest is asked row by row of what is left.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_daemon.sources.where import Where, constant_of, path_of, test_of
from msd_daemon.sources.where_values import COMPARISONS, Test

Mask = Callable[[Any], Any]
"""Gets a record batch, gives a boolean array without nulls."""
_FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_ARROW_NAMES = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
_FLOAT_EXACT_MAX = 1 << 53
_LISTED_NUMBERS_MAX = 64


@dataclass(frozen=True)
class Bound:
    """A condition `column operator constant` that every kept record fulfils."""

    column: str
    operator: str
    constant: Any

    def may_hold(self, least: Any, greatest: Any) -> bool:
        """Tell whether a value between two can fulfil it."""
        tests = {
            "<": lambda: least < self.constant,
            "<=": lambda: least <= self.constant,
            ">": lambda: greatest > self.constant,
            ">=": lambda: greatest >= self.constant,
            "==": lambda: least <= self.constant <= greatest,
        }
        return bool(tests.get(self.operator, lambda: True)())


@dataclass(frozen=True)
class ColumnFilter:
    """How a batch of the filter's columns is judged."""

    masks: tuple[Mask, ...]
    rest: Test | None
    """What is asked row by row of the records that the masks leave; None: nothing."""
    whole: Test
    """All of the expression, row by row: for batches that pyarrow cannot judge."""
    bounds: tuple[Bound, ...]

    def mask(self, batch: Any) -> npt.NDArray[np.bool_]:
        """Return which rows of a batch fulfil the leading conditions. Shape (rows,)."""
        kept = np.ones(batch.num_rows, dtype=np.bool_)
        for mask in self.masks:
            kept &= mask(batch).to_numpy(zero_copy_only=False)
        return kept


def column_filter(where: Where, arrow: Any, schema: Any) -> ColumnFilter:
    """Return how an expression is judged on batches of a schema.

    Args:
        where: The expression.
        arrow: The module pyarrow.
        schema: Of the file.
    """
    translator = _Translator(arrow, schema)
    parts = _conjuncts(where.tree)
    masks: list[Mask] = []
    bounds: list[Bound] = []
    for part in parts:
        mask = translator.mask(part)
        if mask is None:
            break
        masks.append(mask)
        bounds += translator.bounds(part)
    rest = parts[len(masks) :]
    return ColumnFilter(
        tuple(masks), test_of(where, rest) if rest else None, where.test, tuple(bounds)
    )


def _conjuncts(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return [leaf for part in tree.values for leaf in _conjuncts(part)]
    return [tree]


class _Translator:
    """Makes masks of conditions; None where pyarrow would not mean the same."""

    def __init__(self, arrow: Any, schema: Any) -> None:
        import pyarrow.compute

        self._arrow = arrow
        self._compute: Any = pyarrow.compute
        self._schema = schema

    def mask(self, node: ast.expr) -> Mask | None:
        if isinstance(node, ast.BoolOp):
            parts = [self.mask(part) for part in node.values]
            whole = [part for part in parts if part is not None]
            if len(whole) < len(parts):
                return None
            is_and = isinstance(node.op, ast.And)
            return self._joined(self._compute.and_ if is_and else self._compute.or_, whole)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = self.mask(node.operand)
            return None if part is None else lambda batch: self._compute.invert(part(batch))
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        return self._condition(node)

    def bounds(self, node: ast.expr) -> list[Bound]:
        """Return what a translated condition says of single columns."""
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return []
        name = COMPARISONS.get(type(node.ops[0]))
        for one, other, is_flipped in (
            (node.left, node.comparators[0], False),
            (node.comparators[0], node.left, True),
        ):
            path, (value, is_constant) = path_of(one), constant_of(other)
            if name and path is not None and len(path) == 1 and is_constant and value is not None:
                return [Bound(path[0], _FLIPPED[name] if is_flipped else name, value)]
        return []

    def _joined(self, join: Callable[[Any, Any], Any], parts: list[Mask]) -> Mask:
        def joined(batch: Any) -> Any:
            found = parts[0](batch)
            for part in parts[1:]:
                found = join(found, part(batch))
            return found

        return joined

    def _column(self, node: ast.expr) -> tuple[Mask, Any] | None:
        """Return the column that a node names, and its type."""
        path = path_of(node)
        if path is None or len(self._schema.get_all_field_indices(path[0])) != 1:
            return None
        if len(path) > 1 and self._schema.get_all_field_indices(".".join(path)):
            return None
        kind = self._schema.field(path[0]).type
        for key in path[1:]:
            if not self._arrow.types.is_struct(kind) or kind.get_field_index(key) < 0:
                return None
            kind = kind.field(key).type
        keys = list(path[1:])

        def column(batch: Any) -> Any:
            found = batch.column(path[0])
            return self._compute.struct_field(found, keys) if keys else found

        return column, kind

    def _condition(self, node: ast.expr) -> Mask | None:
        found = self._column(node)
        if found is not None:
            column, kind = found
            if not self._arrow.types.is_boolean(kind):
                return None
            return lambda batch: column(batch).fill_null(False)
        if not isinstance(node, ast.Call):
            return None
        return self._edge(node)

    def _edge(self, node: ast.Call) -> Mask | None:
        """Return the mask of a `startswith` or `endswith` with a constant."""
        arguments = list(node.args)
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            arguments.insert(0, node.func.value)
        else:
            name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in ("startswith", "endswith") or len(arguments) != 2:
            return None
        found, (pattern, is_constant) = self._column(arguments[0]), constant_of(arguments[1])
        if found is None or not is_constant or not self._is_text(found[1]) or not _fits(pattern):
            return None
        column = found[0]
        ask = self._compute.starts_with if name == "startswith" else self._compute.ends_with
        return lambda batch: ask(column(batch), pattern=pattern).fill_null(False)

    def _comparison(self, node: ast.Compare) -> Mask | None:
        parts: list[Mask] = []
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            mask = self._pair(left, operator, right)
            if mask is None:
                return None
            parts.append(mask)
            left = right
        return self._joined(self._compute.and_, parts)

    def _pair(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Mask | None:
        if isinstance(operator, (ast.In, ast.NotIn)):
            return self._listed(left, right, is_in=isinstance(operator, ast.In))
        name = COMPARISONS.get(type(operator), "")
        value, is_constant = constant_of(right)
        if not is_constant:
            left, (value, is_constant), name = right, constant_of(left), _FLIPPED.get(name, "")
        if not is_constant:
            return None
        if value is None:
            found = self._column(left)
            if found is None:
                return None
            column, is_wanted = found[0], isinstance(operator, (ast.Is, ast.Eq))
            if is_wanted:
                return lambda batch: column(batch).is_null()
            return lambda batch: column(batch).is_valid()
        found = self._column(left) or self._length(left)
        return None if found is None or not name else self._compared(*found, name, value)

    def _length(self, node: ast.expr) -> tuple[Mask, Any] | None:
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return None
        if not isinstance(node.func, ast.Name) or node.func.id != "len":
            return None
        found = self._column(node.args[0])
        if found is None:
            return None
        column, kind = found
        types = self._arrow.types
        if self._is_text(kind):
            measure = self._compute.utf8_length
        elif types.is_list(kind) or types.is_large_list(kind):
            measure = self._compute.list_value_length
        else:
            return None
        return lambda batch: measure(column(batch)).cast(self._arrow.int64()), self._arrow.int64()

    def _compared(self, column: Mask, kind: Any, name: str, value: Any) -> Mask | None:
        types = self._arrow.types
        ask = getattr(self._compute, _ARROW_NAMES[name])
        if self._is_text(kind):
            if not _fits(value):
                return None
            scalar = self._arrow.scalar(value, kind)
            return lambda batch: ask(column(batch), scalar).fill_null(False)
        if types.is_boolean(kind):
            if type(value) is not bool or name not in ("==", "!="):
                return None
            return lambda batch: ask(column(batch), value).fill_null(False)
        if type(value) not in (int, float):
            return None
        if types.is_integer(kind):
            return self._compared_integer(column, kind, name, value)
        if types.is_float64(kind) or types.is_float32(kind):
            if isinstance(value, int) and abs(value) > _FLOAT_EXACT_MAX:
                return None
            wide = self._arrow.float64()
            scalar = self._arrow.scalar(float(value), wide)
            return lambda batch: ask(column(batch).cast(wide), scalar).fill_null(False)
        return None

    def _compared_integer(self, column: Mask, kind: Any, name: str, value: float) -> Mask | None:
        """Return the comparison with the whole number that means the same as the constant."""
        if isinstance(value, float):
            if not math.isfinite(value):
                return None
            is_whole = value.is_integer()
            if name in ("==", "!=") and not is_whole:
                is_all = name == "!="
                return lambda batch: self._filled(column(batch), is_all=is_all)
            value = math.ceil(value) if name in ("<", ">=") else math.floor(value)
        bits = kind.bit_width
        signed = self._arrow.types.is_signed_integer(kind)
        least, greatest = (
            (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
            if signed
            else (
                0,
                (1 << bits) - 1,
            )
        )
        if not least <= value <= greatest:
            is_all = name == "!=" or (name in ("<", "<=")) == (value > greatest)
            if name == "==":
                is_all = False
            return lambda batch: self._filled(column(batch), is_all=is_all)
        ask = getattr(self._compute, _ARROW_NAMES[name])
        scalar = self._arrow.scalar(value, kind)
        return lambda batch: ask(column(batch), scalar).fill_null(False)

    def _filled(self, column: Any, *, is_all: bool) -> Any:
        """Return true for each value that is there, or false for all."""
        if is_all:
            return column.is_valid()
        return self._arrow.array(np.zeros(len(column), dtype=np.bool_))

    def _listed(self, left: ast.expr, right: ast.expr, *, is_in: bool) -> Mask | None:
        found = self._column(left)
        if found is None or not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
            return None
        column, kind = found
        values = [constant_of(part)[0] for part in right.elts]
        mask: Mask | None
        if self._is_text(kind):
            texts = [value for value in values if _fits(value)]
            if not texts or len(texts) < sum(isinstance(value, str) for value in values):
                return None
            listed = self._arrow.array(texts, kind)
            mask = partial(self._is_listed, column, listed)
        else:
            numbers = [value for value in values if type(value) in (int, float)]
            if not numbers or len(numbers) > _LISTED_NUMBERS_MAX:
                return None
            parts = [self._compared(column, kind, "==", number) for number in numbers]
            whole = [part for part in parts if part is not None]
            if len(whole) < len(parts):
                return None
            mask = self._joined(self._compute.or_, whole)
        if is_in:
            return mask
        inside = mask
        return lambda batch: self._compute.and_(
            self._compute.invert(inside(batch)), column(batch).is_valid()
        )

    def _is_listed(self, column: Mask, listed: Any, batch: Any) -> Any:
        return self._compute.is_in(column(batch), value_set=listed)

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_string(kind) or types.is_large_string(kind))


def _fits(value: object) -> bool:
    """Tell whether a constant is a text that pyarrow can hold."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
