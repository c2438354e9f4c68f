"""Faults of a file that a user wrote, gathered so that all are told at once.

A fault is one line: `key.path: value: what is wrong; remedy`. Pydantic's own errors are turned
into the same form here, with a suggestion where a key looks misspelt.
"""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from msd_client.contract.errors import MsdError

VALUE_CHARACTERS_MAX = 80
MISSING = object()
"""Stands for a value that is not there."""

Location = tuple[str | int, ...]

_REMEDIES = {
    "int_type": "write a whole number",
    "float_type": "write a number",
    "string_type": "write a string, in quotes if YAML reads it as something else",
    "bool_type": "write true or false",
    "list_type": "write a list",
    "dict_type": "write a map",
    "model_type": "write a map",
    "greater_than": "write a larger number",
    "greater_than_equal": "write a larger number",
    "less_than": "write a smaller number",
    "less_than_equal": "write a smaller number",
    "too_short": "add at least one",
    "finite_number": "write a finite number",
    "literal_error": "write one of them",
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, where, and what to do."""

    path: str
    value: object
    problem: str
    remedy: str

    def line(self) -> str:
        """Return the fault as one printable line: a key may hold anything, a terminal shows it."""
        text = f"{self.path}: {_show(self.value)}: {self.problem}; {self.remedy}"
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fault_of_message(path: str, value: object, message: str) -> Fault:
    """Return a fault from a message of the form `problem; remedy`."""
    problem, _, remedy = message.rpartition("; ")
    if not problem:
        return Fault(path, value, remedy, "change it")
    return Fault(path, value, problem, remedy)


def faults_of_validation(
    error: ValidationError, model: type[BaseModel], hidden: frozenset[str] = frozenset()
) -> list[tuple[Location, Fault]]:
    """Return pydantic's errors as faults with their places.

    Args:
        error: What `model_validate` raised.
        model: The model, to suggest a known key for an unknown one.
        hidden: Parts of a place that exist in the model but not in the file.
    """
    return [_fault_of_detail(detail, model, hidden) for detail in error.errors(include_url=False)]


def _fault_of_detail(
    detail: Any, model: type[BaseModel], hidden: frozenset[str]
) -> tuple[Location, Fault]:
    place = tuple(part for part in detail["loc"] if part != "[key]")
    shown = _without_tags(tuple(part for part in place if part not in hidden))
    path, kind, value = show_path(shown), detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return shown, Fault(path, value, "unknown key", _suggestion(model, place))
    if kind == "missing":
        return shown, Fault(path, MISSING, "a required key is missing", "add it")
    if kind == "value_error":
        return shown, fault_of_message(path, value, str(detail["ctx"]["error"]))
    if kind == "literal_error":
        return shown, Fault(path, value, f"is none of {detail['ctx']['expected']}", _REMEDIES[kind])
    problem = detail["msg"].removeprefix("Input ").replace("should", "must")
    return shown, Fault(path, value, problem, _REMEDIES.get(kind, "change it"))


def _without_tags(place: Location) -> Location:
    """Leave out a step's tag before its key of the same name: nobody wrote `image[0].call.call`."""
    return tuple(
        part
        for index, part in enumerate(place)
        if index < 2 or part != place[index - 1] or not isinstance(place[index - 2], int)
    )


def show_path(place: Iterable[str | int]) -> str:
    """Return a place in a file as `sources.web.paths[2]`."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "(file)"


def _show(value: object) -> str:
    if value is MISSING:
        return "(nothing)"
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):
        text = repr(value)
    if len(text) <= VALUE_CHARACTERS_MAX:
        return text
    # Of a path the end says most, of a list its beginning: both stay.
    head = VALUE_CHARACTERS_MAX // 2 - 3
    return text[:head] + "..." + text[head + 3 - VALUE_CHARACTERS_MAX :]


def _suggestion(model: type[BaseModel], place: Location) -> str:
    owner = _model_at(model, place[:-1])
    known = [field.alias or name for name, field in owner.model_fields.items()] if owner else []
    close = difflib.get_close_matches(str(place[-1]), known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"remove it, known here: {', '.join(known)}" if known else "remove it"


def _model_at(model: type[BaseModel], place: Location) -> type[BaseModel] | None:
    """Return the model whose keys stand at a place; keys of plain dicts are passed over."""
    here: type[BaseModel] | None = model
    is_inside_dict = False
    for part in place:
        if is_inside_dict:
            is_inside_dict = False
            continue
        if here is None:
            return None
        by_key = {field.alias or name: field for name, field in here.model_fields.items()}
        if part not in by_key:
            return None
        annotation = by_key[str(part)].annotation
        is_inside_dict = _mentions(annotation, dict)
        here = _first_model(annotation)
    return here


def _first_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = _first_model(argument)
        if found is not None:
            return found
    return None


def _mentions(annotation: Any, kind: type) -> bool:
    if typing.get_origin(annotation) is kind:
        return True
    return any(_mentions(argument, kind) for argument in typing.get_args(annotation))


def told_fault(path: str, value: str, error: MsdError | OSError) -> Fault:
    """Return what an error says as a fault of a key: `what is wrong: remedy`."""
    if isinstance(error, OSError) and not isinstance(error, MsdError):
        return Fault(path, value, str(error.strerror), "mend the path or its rights")
    problem, separator, remedy = str(error).rpartition(": ")
    if not separator:
        return Fault(path, value, str(error), "mend the path or make the file")
    return Fault(path, value, problem, remedy)
