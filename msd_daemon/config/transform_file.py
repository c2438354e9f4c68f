"""Key `transform` of a source, and a step of the user's own among those of images and sounds."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from msd_daemon.config.section import Bytes, Count, Name, Section, Text, as_list

OPTIONS_BYTES_MAX = 32 << 10
"""They go to the process as a part of its one argument."""
_CALL = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_OWN_KEYS = frozenset({"python", "call", "files", "use", "options", "sample_s", "memory"})


def _check_call(call: str) -> str:
    if not _CALL.fullmatch(call):
        raise ValueError("not module:function; write `ocrlab:jitter` or `pkg.mod:fn`")
    return call


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"options are not plain ({error}); write numbers, texts, lists") from error
    if len(text) > OPTIONS_BYTES_MAX:
        raise ValueError(
            f"options of {len(text)} bytes, over {OPTIONS_BYTES_MAX}; put them into a file"
        )
    if json.loads(text) != options:
        raise ValueError("options have keys that are no text; put them in quotes")
    bad = [name for name in options if not name.isidentifier()]
    if bad:
        raise ValueError(f"{bad[0]!r} names no argument; write a Python name")
    return options


def _as_transform(value: object) -> object:
    """Turn `pkg:fn` into a call, a bare name into `use`, and other keys beside `use` into options."""
    if isinstance(value, str):
        return {"call": value} if ":" in value else {"use": value}
    if not isinstance(value, dict) or "use" not in value:
        return value
    own = {key: item for key, item in value.items() if key in _OWN_KEYS}
    rest = {key: item for key, item in value.items() if key not in _OWN_KEYS}
    if rest and "options" not in own:
        own["options"] = rest
        return own
    return value


CallName = Annotated[Text, AfterValidator(_check_call)]
"""`module:function`."""


class TransformFile(Section):
    """The user's own function, `fn(sample, rng, **options) -> sample | list | None`."""

    call: CallName | None = None
    """`module:function`: of a file or folder beside the job file, of `files`, or installed."""
    python: Text | None = None
    """Interpreter it runs in, `venv/bin/python`; default: the daemon's."""
    files: Annotated[
        list[Text], BeforeValidator(as_list, json_schema_input_type=str | list[str])
    ] = Field(default_factory=list)
    """Files, folders and globs that it needs beside its own module; copied at submit."""
    use: Text | None = None
    """Name of an installed transform (entry point `msd.transforms`); keys beside it are options."""
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    sample_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 60.0
    """A record that takes longer is quarantined."""
    memory: Annotated[Bytes, Field(ge=64 << 20)] = 8 << 30
    """Of its process; a record that needs more is quarantined."""

    @model_validator(mode="after")
    def _check_one(self) -> TransformFile:
        if (self.call is None) == (self.use is None):
            raise ValueError("gives call and use, or neither; give one of them")
        if self.use is not None and (self.python is not None or self.files):
            raise ValueError(
                "an installed transform has its own files and runs in the daemon's interpreter; "
                "remove python and files"
            )
        return self


class FunctionFile(Section):
    """A function of the user's own that decides by numbers alone: a schedule, a hook, a strategy."""

    call: CallName
    """`module:function`: of a file or folder beside the job file, of `files`, or installed."""
    files: Annotated[
        list[Text], BeforeValidator(as_list, json_schema_input_type=str | list[str])
    ] = Field(default_factory=list)
    """Files, folders and globs that it needs beside its own module; copied at submit."""
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    def as_transform(self, python: str | None = None) -> TransformFile:
        """Return what copies and imports it as transforms are."""
        return TransformFile(call=self.call, python=python, files=self.files, options=self.options)


def as_function(value: object) -> object:
    """Return `package.module:function` as a section that says nothing else."""
    return {"call": value} if isinstance(value, str) else value


class ScheduleFile(FunctionFile):
    """The weights as a function `fn(step, **options) -> {source: weight}`; called at submit alone."""

    python: Text | None = None
    """Interpreter it runs in, `venv/bin/python`; default: the daemon's."""
    until: Count | None = None
    """First step that it is not asked for; default: the job's `steps`. The last weights stay."""


class HookFile(FunctionFile):
    """Weights by losses: `fn(step, losses, weights, **options) -> weights | None`."""

    python: Text | None = None
    """Interpreter it runs in, `venv/bin/python`; default: the daemon's."""
    every: Count = 100
    """Steps between two calls; it gets the mean of what was reported in between."""


Hook = Annotated[HookFile, BeforeValidator(as_function, json_schema_input_type=str | HookFile)]

Schedule = Annotated[
    ScheduleFile, BeforeValidator(as_function, json_schema_input_type=str | ScheduleFile)
]


def _strategy_tag(value: object) -> str:
    is_own = isinstance(value, dict) or (isinstance(value, str) and ":" in value)
    return OWN_TAG if is_own else NAME_TAG


NAME_TAG, OWN_TAG = "=name", "=function"
"""Tell a built-in strategy from a user's; nobody wrote them."""

Strategy = Annotated[
    Annotated[Name, Tag(NAME_TAG)]
    | Annotated[
        FunctionFile,
        BeforeValidator(as_function, json_schema_input_type=str | FunctionFile),
        Tag(OWN_TAG),
    ],
    Discriminator(_strategy_tag),
]

Transform = Annotated[
    TransformFile, BeforeValidator(_as_transform, json_schema_input_type=str | TransformFile)
]
