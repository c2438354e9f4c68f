"""daemon.toml and planner.toml as pages and as commented files, made from their models.

Meanings are the models' own docstrings, limits their own constraints, so a page can't say what the
daemon does not do. `python -m msd_daemon.config.toml_page FILE` writes docs/daemon.md.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from msd_daemon.config.daemon_file import ENVIRONMENT_PREFIX, DaemonFile, EndpointSection
from msd_daemon.config.planner_file import PlannerFile
from msd_daemon.config.reloading import effect_of
from msd_daemon.config.units import format_bytes

TABLE_OF_TABLES = "endpoints"
WIDTH = 100
_HEAD = """# daemon.toml

Every key of the daemon's file with its default, made from the models that read it
(`python -m msd_daemon.config.toml_page docs/daemon.md`). No file at all works: a daemon of one user.
Layers, the stronger last: defaults, the file (`msd-daemon --config`, else the one that `MSD_CONFIG`
names), `MSD__SECTION__KEY` in the environment, flags of `msd-daemon`. All faults of all layers are
told at once, with key, value and remedy, and the daemon ends with exit code 78.

`msdctl schema daemon` prints the JSON Schema for editors; `msdctl install-service` writes a file
with every key as a comment.

**Reload.** `systemctl reload msd-daemon`, SIGHUP and `msdctl reload` read file and environment again. A
key marked *now* is in force at once, *next job* for jobs that begin later, *restart* only in another
daemon: such a change is named, and the old value stays. A file with faults changes nothing.
"""
_TOML_HEAD = "# {name}: every key with its default; docs/{page} says more.\n"


@dataclass(frozen=True)
class Key:
    """One key of a file."""

    name: str
    kind: str
    """For people: `bytes`, `seconds, > 0`, `auto | shm | memfd`."""
    default: object
    """None: derived or unset."""
    takes_auto: bool
    meaning: str


def keys_of(model: type[BaseModel]) -> Iterator[Key]:
    """Yield the keys of a table in the order in which the model has them.

    Raises:
        ValueError: A key has no docstring: it would be a page without a meaning.
    """
    properties = model.model_json_schema().get("properties", {})
    for name, field in model.model_fields.items():
        if not field.description:
            raise ValueError(f"{model.__name__}.{name} has no docstring")
        shape = properties[name]
        takes_auto = "anyOf" in shape and any(
            option.get("type") == "string" for option in shape["anyOf"]
        )
        default = field.get_default(call_default_factory=True)
        # A path or name that may be left out is a string as well, and no `auto`.
        takes_auto = takes_auto and default is None and not _is_text(shape)
        meaning = " ".join(field.description.split())
        yield Key(name, _kind(name, shape), default, takes_auto, meaning)


def _is_text(shape: dict[str, Any]) -> bool:
    options = [it for it in shape.get("anyOf", [shape]) if it.get("type") != "null"]
    return all(it.get("type") == "string" for it in options)


def _kind(name: str, shape: dict[str, Any]) -> str:
    options = [it for it in shape.get("anyOf", [shape]) if it.get("type") != "null"]
    if "enum" in shape:
        return " or ".join(shape["enum"])
    if name.endswith("_bytes"):
        return "bytes: 64Mi, 8Gi"
    number = next((it for it in options if it.get("type") in ("integer", "number")), None)
    if number is not None:
        what = "whole number" if number["type"] == "integer" else "number"
        return ("seconds" if name.endswith("_s") else what) + _limits(number)
    if shape.get("type") == "array":
        item = shape["items"].get("type")
        return "list of numbers" if item == "integer" else "list of strings"
    if shape.get("type") == "boolean":
        return "true or false"
    return "table" if shape.get("type") == "object" else "string"


def _limits(shape: dict[str, Any]) -> str:
    least, above = shape.get("minimum"), shape.get("exclusiveMinimum")
    most = shape.get("maximum")
    low = "" if least is None else _number(least)
    if above is not None:
        low = f"above {_number(above)}"
    if most is None:
        return f", {low} or more" if least is not None else f", {low}" if low else ""
    return f", {low} to {_number(most)}" if low else f", at most {_number(most)}"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def _default_text(key: Key) -> str:
    if key.default is None:
        return '"auto"' if key.takes_auto else ""
    if key.name.endswith("_bytes") and isinstance(key.default, int) and key.default:
        return f'"{format_bytes(key.default)}"'.replace("iB", "i").replace(" ", "")
    if isinstance(key.default, BaseModel) or key.default == {}:
        return ""
    return json.dumps(key.default)


def daemon_page() -> str:
    """Return docs/daemon.md."""
    parts = [_HEAD]
    for section, field in DaemonFile.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        parts.append(f"\n## [{section}]\n\n{(model.__doc__ or '').strip()}\n\n")
        parts.append("| key | default | value | meaning | reload |\n|---|---|---|---|---|\n")
        for key in keys_of(model):
            effect = effect_of(f"{section}.{key.name}")
            default = f"`{_default_text(key)}`" if _default_text(key) else ""
            parts.append(f"| `{key.name}` | {default} | {key.kind} | {key.meaning} | {effect} |\n")
        first = next(keys_of(model)).name
        variable = f"{ENVIRONMENT_PREFIX}{section}__{first}".upper()
        parts.append(f"\nIn the environment: `{variable}`, and so on.\n")
        if TABLE_OF_TABLES in model.model_fields:
            parts.append(_endpoints())
    parts.append(_planner_part())
    return "".join(parts)


def _endpoints() -> str:
    head = (
        '\n### [stores.endpoints.s3], [stores.endpoints."s3://bucket"]\n\n'
        f"{(EndpointSection.__doc__ or '').strip()}\n\n| key | value | meaning |\n|---|---|---|\n"
    )
    lines = [head]
    lines += [
        f"| `{key.name}` | {key.kind} | {key.meaning} |\n" for key in keys_of(EndpointSection)
    ]
    return "".join(lines)


def _planner_part() -> str:
    head = (
        "\n# planner.toml\n\nThe planner of a cluster (`msd-planner --config`, else the file that "
        "`MSD_PLANNER_CONFIG` names). Every key may\nalso be a flag. Changes need a restart; where "
        "several planners share a store, restart one after another.\n\n"
        "| key | default | value | meaning |\n|---|---|---|---|\n"
    )
    lines = [head]
    for key in keys_of(PlannerFile):
        default = f"`{_default_text(key)}`" if _default_text(key) else ""
        lines.append(f"| `{key.name}` | {default} | {key.kind} | {key.meaning} |\n")
    return "".join(lines)


def daemon_toml() -> str:
    """Return a daemon.toml in which every key is a comment with its default."""
    parts = [_TOML_HEAD.format(name="daemon.toml", page="daemon.md")]
    for section, field in DaemonFile.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        parts.append(f"\n[{section}]\n")
        parts += [_comment(key) for key in keys_of(model)]
    return "".join(parts)


def planner_toml() -> str:
    """Return a planner.toml in which every key is a comment with its default."""
    parts = [_TOML_HEAD.format(name="planner.toml", page="daemon.md"), "\n"]
    return "".join([*parts, *(_comment(key) for key in keys_of(PlannerFile))])


def _comment(key: Key) -> str:
    told = textwrap.wrap(f"{key.meaning} ({key.kind})", WIDTH - 3)
    lines = [f"# {line}\n" for line in told]
    lines.append(f"# {key.name} = {_default_text(key) or '...'}\n")
    return "".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(daemon_page(), encoding="utf-8")
