"""Runs chat templates: Jinja as transformers sets it up, with a bound on work and nothing of chance.

A template may come with a model from anywhere. Jinja's sandbox keeps it from Python; here every
loop turn, every character put out or copied costs a unit of a budget, so that neither a loop nor a
growing text can take a worker's time or memory. What could differ between two runs is not there:
no clock, no random choice, no address of an object.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_WORK_MAX = 1 << 25
"""Units that one rendering may take: characters, and TURN_WORK for a loop turn or macro call."""
TURN_WORK = 32
_PART_WORK = 16
"""Of a part of a text that was split: an object of its own."""
TEMPLATE_CHARACTERS_MAX = 1 << 20
INDENT_MAX = 64
NUMBER_BITS_MAX = 4096
OPEN_NAME, CLOSE_NAME = "msd_generation_opens", "msd_generation_closes"
"""Variables with the characters that `{% generation %}` puts around its text."""

_TEXT_METHODS_NAMES = (
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
    "islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper"
)
_TEXT_METHODS = frozenset(_TEXT_METHODS_NAMES.split())
_MAP_METHODS = frozenset({"items", "keys", "values", "get"})
_LIST_METHODS = frozenset({"index", "count"})
_FILTER_NAMES = (
    "abs attr capitalize count d default dictsort e escape first float groupby int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select "
    "selectattr sort string sum title trim unique upper wordcount"
)
_SPELLING = frozenset({"join", "string", "tojson", "indent", "sum", "escape", "e"})
"""Filters that write a value out, shared parts wherever they stand."""
_LISTING = frozenset({"list", "sort", "reverse", "unique", "dictsort"})


class TemplateWorkError(TemplateError):
    """A template took more than it may."""


class GenerationExtension(Extension):
    """`{% generation %} ... {% endgeneration %}` around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements of a tag: its body between two marks, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens = nodes.Output([nodes.Name(OPEN_NAME, "load")], lineno=line)
        closes = nodes.Output([nodes.Name(CLOSE_NAME, "load")], lineno=line)
        return [opens, nodes.Scope(body, lineno=line), closes]


class _Meter(NodeTransformer):
    """Puts the counting of work into a template."""

    def _with_turn(self, node: Any) -> Any:
        self.generic_visit(node)
        turn = nodes.ExprStmt(_filtered(nodes.Const(TURN_WORK), "msd_turn"), lineno=node.lineno)
        node.body.insert(0, turn)
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_turn  # noqa: N815 - Jinja's names

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)  # goes through finalize, which counts

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "msd_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "msd_copy") if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template; not for several threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is worked out while the template is read, uncounted
            extensions=[GenerationExtension, loopcontrols],
            finalize=_put_out,
        )
        self.work_left = RENDER_WORK_MAX
        self.break_mark = ""
        """Character that stands inside names of special tokens which are plain text."""
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = raise_exception
        known = {name: self.filters[name] for name in _FILTER_NAMES.split()}
        known |= {"tojson": self._to_json, "indent": _indented(self.filters["indent"])}
        self.filters = {name: self._counted(name, function) for name, function in known.items()}
        self.filters |= {
            "msd_turn": pass_context(lambda _, work: self.charge(work)),
            "msd_concat": pass_context(lambda _, parts: self._join("", parts)),
            "msd_copy": pass_context(lambda _, value: self._copied(value)),
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        return super()._generate(_Meter().visit(source), *args, **kwargs)

    def charge(self, work: int) -> None:
        """Take units from what is left.

        Raises:
            TemplateWorkError: There are not so many.
        """
        self.work_left -= work
        if self.work_left < 0:
            raise TemplateWorkError(
                f"takes more than {RENDER_WORK_MAX} units of work (characters and loop turns)"
            )

    def charge_text(self, value: object) -> None:
        """Take what a value would be as text: shared parts count wherever they stand."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, (str, bytes)):
                self.charge(1 + len(one))
            elif isinstance(one, Mapping):
                self.charge(8)
                waiting += [*one.keys(), *one.values()]
            elif isinstance(one, Sequence):
                self.charge(8 + len(one))
                waiting += one
            else:
                self.charge(8 + (one.bit_length() // 3 if isinstance(one, int) else 0))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Tell whether a template may have an attribute: those that make no longer text."""
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, Mapping):
            return attr in _MAP_METHODS
        if isinstance(obj, (list, tuple)):
            return attr in _LIST_METHODS
        if isinstance(obj, (int, float, bytes)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the value of an operator, its size paid before."""
        if operator == "%" and isinstance(left, (str, bytes)):
            raise SecurityError("formats a text by %, which chat templates may not")
        is_whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" or (operator == "*" and is_whole):
            times = right if operator == "**" and isinstance(right, int) else 1
            if _bits(left) * max(1, times) + _bits(right) > NUMBER_BITS_MAX:
                raise SecurityError(f"makes a number of more than {NUMBER_BITS_MAX} bits")
        elif operator == "*":
            times = right if isinstance(right, int) else left if isinstance(left, int) else 1
            self.charge(max(_length(left), _length(right)) * max(0, times))
        elif operator == "+":
            self.charge(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return what a call gives, its size paid."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and len(args) == 1:
                return self._join(owner, args[0])
            if name == "replace":
                self._charge_replace(owner, *args)
            if name in {"split", "rsplit", "splitlines"}:
                separator = args[0] if args and isinstance(args[0], str) else None
                parts = owner.count(separator) if separator else len(owner) // 2
                self.charge(_PART_WORK * parts)
        return self._copied(super().call(context, obj, *args, **kwargs))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that takes its work from what is left; the size of its result before."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            own = args[at:]
            if name in _LISTING:
                self.charge(8 * _length(own[0]))
            if name in _SPELLING:
                value = own[0] if isinstance(own[0], (Mapping, str)) else _listed(own[0])
                if name == "join":
                    separator = kwargs.get("d", own[1] if len(own) > 1 else "")
                    self.charge(_length(separator) * _length(value))
                self.charge_text(value)
                args = (*args[:at], value, *own[1:])
            if name == "replace" and len(own) >= 3:
                self._charge_replace(str(own[0]), *own[1:3])
            return self._copied(function(*args, **kwargs))

        return counted

    def _to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON as transformers' filter of this name does: no HTML in it is masked."""
        _check_indent(indent)
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        if ensure_ascii and self.break_mark:
            masked = rf"(?<!\\)((?:\\\\)*)\\u{ord(self.break_mark):04x}"
            text = re.sub(masked, lambda found: found.group(1) + self.break_mark, text)
        return text

    def _charge_replace(self, text: str, old: object = "", new: object = "", *_: object) -> None:
        found = text.count(str(old))
        self.charge(len(text) + found * _length(new))

    def _join(self, separator: str, parts: Any) -> str:
        listed = _listed(parts)
        self.charge(len(separator) * len(listed))
        self.charge_text(listed)
        return separator.join(str(part) for part in listed)

    def _copied(self, value: Any) -> Any:
        self.charge(1 + (_length(value) if isinstance(value, (str, list, tuple, dict)) else 0))
        return value


def raise_exception(message: object = "") -> NoReturn:
    """Refuse the messages: what templates call.

    Raises:
        TemplateError: Always.
    """
    raise TemplateError(str(message))


@pass_context
def _put_out(context: Context, value: object) -> object:
    environment = context.environment
    assert isinstance(environment, ChatEnvironment)
    if type(value) is str:
        environment.charge(len(value))
    elif value is None or isinstance(value, (str, int, float, Undefined, Mapping, list, tuple)):
        environment.charge_text(value if value is not None else "None")
    else:
        raise SecurityError(f"puts out a {type(value).__name__}, which is no text")
    return value


def _indented(function: Callable[..., str]) -> Callable[..., str]:
    def indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        _check_indent(len(width) if isinstance(width, str) else width)
        return function(text, width, first, blank)

    return indented


def _check_indent(indent: int | None) -> None:
    if indent is not None and indent > INDENT_MAX:
        raise SecurityError(f"indents by {indent}, more than {INDENT_MAX}")


def _listed(value: Any) -> Any:
    return value if isinstance(value, Sequence) else list(value)


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 1


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 64
