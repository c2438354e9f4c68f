"""The language of `where`: which records of a source are samples, asked of their fields.

A small part of Python's expressions, read by its parser and never run by it: comparisons, `in`,
`and`, `or`, `not`, arithmetic on numbers, `len`, `lower`, `upper`, `startswith`, `endswith`,
`number` of a text, and `field("odd name")` for names that are no identifiers. `meta.lang` is key
`lang` of field `meta`. A field that is absent or null makes a comparison false and a function null,
never an error: `not score > 1` is true for a record without a score. `x is None` asks for that
itself. A value of another type than it is compared with is a fault of its record.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.where_values import (
    ARITHMETIC,
    COMPARISONS,
    FUNCTIONS,
    Test,
    Value,
    both,
    calculate,
    call,
    compare,
    constant,
    either,
    is_true,
    lookup,
    membership,
    negate,
    none_test,
)

CHARACTERS_MAX = 16_384
NODES_MAX = 4_096
DEPTH_MAX = 48
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}
_TWO_ARGUMENTS = frozenset({"startswith", "endswith"})


@dataclass(frozen=True)
class Where:
    """A compiled expression."""

    text: str
    tree: ast.expr
    paths: tuple[tuple[str, ...], ...]
    """Fields that it asks for, each a name and keys inside of it; in order of first use."""
    test: Test

    def __call__(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether a record is kept.

        Raises:
            UnfitValueError: A field's value is of a type that the expression cannot take.
        """
        return self.test(fields)

    @property
    def columns(self) -> tuple[str, ...]:
        """Top-level fields that it asks for, in order of first use."""
        return tuple(dict.fromkeys(path[0] for path in self.paths))


def compile_where(text: str) -> Where:
    """Compile an expression.

    Raises:
        ConfigError: It is no expression of the language, or too large; says where and why.
    """
    tree = _parse(text)
    builder = _Builder(text)
    test = builder.test(tree)
    if not builder.paths:
        raise ConfigError(f"where: {_cut(text)!r} asks for no field: name one")
    return Where(text, tree, tuple(dict.fromkeys(builder.paths)), test)


def where_columns(text: str) -> tuple[str, ...]:
    """Return the top-level fields that an expression asks for.

    Raises:
        ConfigError: It is no expression of the language.
    """
    return compile_where(text).columns


def test_of(where: Where, nodes: list[ast.expr]) -> Test:
    """Return the function that is true where all of some parts of an expression are."""
    builder = _Builder(where.text)
    return both([builder.test(node) for node in nodes])


def _parse(text: str) -> ast.expr:
    if len(text) > CHARACTERS_MAX:
        raise ConfigError(
            f"where: {len(text)} characters, at most {CHARACTERS_MAX}: use an exclude list instead"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes, depth = _measure(tree)
    except SyntaxError as error:
        what = f"{error.msg} at column {error.offset}"
        raise ConfigError(f"where: {_cut(text)!r} is no expression: {what}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "nested too deeply"
        raise ConfigError(f"where: {_cut(text)!r} is no expression: {reason}") from None
    if nodes > NODES_MAX or depth > DEPTH_MAX:
        raise ConfigError(
            f"where: {nodes} parts nested {depth} deep, at most {NODES_MAX} and {DEPTH_MAX}: "
            "shorten it, or use an exclude list"
        )
    return tree


def _measure(tree: ast.expr) -> tuple[int, int]:
    """Return the nodes of a tree and its depth, without recursion."""
    nodes = deepest = 0
    waiting: list[tuple[ast.AST, int]] = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        nodes += 1
        deepest = max(deepest, depth)
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
    return nodes, deepest


def path_of(node: ast.expr) -> tuple[str, ...] | None:
    """Return the field that a node names, None where it names none."""
    keys: list[str] = []
    while isinstance(node, ast.Attribute):
        keys.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return None if node.id in _CONSTANTS and not keys else (node.id, *reversed(keys))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id != "field" or len(node.args) != 1 or node.keywords:
        return None
    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return (name, *reversed(keys)) if isinstance(name, str) else None


def constant_of(node: ast.expr) -> tuple[Any, bool]:
    """Return the value of a node that is a constant, and whether it is one."""
    if isinstance(node, ast.Constant):
        is_plain = node.value is None or type(node.value) in (bool, int, float, str)
        return node.value, is_plain
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id], True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value, is_constant = constant_of(node.operand)
        if is_constant and type(value) in (int, float):
            return (-value if isinstance(node.op, ast.USub) else value), True
    return None, False


class _Builder:
    """Makes functions of nodes; notes which fields they ask for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.paths: list[tuple[str, ...]] = []

    def test(self, node: ast.expr) -> Test:
        """Return the function of a node that is true or false."""
        if isinstance(node, ast.BoolOp):
            parts = [self.test(part) for part in node.values]
            return both(parts) if isinstance(node.op, ast.And) else either(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negate(self.test(node.operand))
        if isinstance(node, ast.Compare):
            return self._compare(node)
        return is_true(self.value(node), self._source(node))

    def value(self, node: ast.expr) -> Value:
        """Return the function of a node that gives a value."""
        plain, is_constant = constant_of(node)
        if is_constant:
            return constant(plain)
        path = path_of(node)
        if path is not None:
            self.paths.append(path)
            return lookup(path)
        if isinstance(node, (ast.BoolOp, ast.Compare)) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        ):
            return self.test(node)
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, right = self.value(node.left), self.value(node.right)
            return calculate(ARITHMETIC[type(node.op)], left, right, self._source(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            sign = ast.Sub if isinstance(node.op, ast.USub) else ast.Add
            zero = constant(0)
            return calculate(ARITHMETIC[sign], zero, self.value(node.operand), self._source(node))
        if isinstance(node, ast.Call):
            return self._call(node)
        raise self._refuse(node, "is not part of the language")

    def _call(self, node: ast.Call) -> Value:
        """Return `lower(x)` and `x.lower()` alike."""
        arguments = list(node.args)
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            arguments.insert(0, node.func.value)
        else:
            name = node.func.id if isinstance(node.func, ast.Name) else ""
        expected = 2 if name in _TWO_ARGUMENTS else 1
        if name not in FUNCTIONS or node.keywords or len(arguments) != expected:
            known = ", ".join(sorted(FUNCTIONS))
            raise self._refuse(node, f"is no call of {known} or field")
        return call(name, [self.value(part) for part in arguments], self._source(node))

    def _compare(self, node: ast.Compare) -> Test:
        parts: list[Test] = []
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            parts.append(self._pair(left, operator, right, node))
            left = right
        return parts[0] if len(parts) == 1 else both(parts)

    def _pair(
        self, left: ast.expr, operator: ast.cmpop, right: ast.expr, node: ast.Compare
    ) -> Test:
        source = self._source(node)
        if isinstance(operator, (ast.In, ast.NotIn)):
            test = membership(self.value(left), self._items(right), source)
            is_in = isinstance(operator, ast.In)
            return test if is_in else both([negate(test), _is_there(self.value(left))])
        for one, other in ((left, right), (right, left)):
            plain, is_constant = constant_of(one)
            if is_constant and plain is None:
                if not isinstance(operator, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
                    raise self._refuse(node, "compares with None: use `is None`")
                is_wanted = isinstance(operator, (ast.Is, ast.Eq))
                return none_test(self.value(other), is_wanted=is_wanted)
        if type(operator) not in COMPARISONS:
            raise self._refuse(node, "uses `is` for other than None: use ==")
        name = COMPARISONS[type(operator)]
        sides = self._source(left), self._source(right)
        return compare(name, self.value(left), self.value(right), source, sides)

    def _items(self, node: ast.expr) -> frozenset[Any] | Value:
        """Return the constants of a list, or what gives the text or list that is looked into."""
        if not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return self.value(node)
        found = [constant_of(part) for part in node.elts]
        if not all(is_constant and value is not None for value, is_constant in found):
            raise self._refuse(node, "holds others than numbers, texts and true or false")
        return frozenset((type(value) is bool, value) for value, _ in found)

    def _source(self, node: ast.expr) -> str:
        return _cut(ast.get_source_segment(self._text.strip(), node) or ast.unparse(node))

    def _refuse(self, node: ast.expr, what: str) -> ConfigError:
        return ConfigError(f"where: {self._source(node)!r} {what} in {_cut(self._text)!r}")


def _is_there(value: Value) -> Test:
    return none_test(value, is_wanted=False)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:76] + " ..."
