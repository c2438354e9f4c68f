"""What all sections of a job file are made of: a strict model, and the kinds of its values."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from msd_daemon.config.units import parse_bytes, parse_count

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "not a name; use 1 to 64 letters, digits, '_', '-' or '.', beginning with no '-' or '.'"
        )
    return name


def as_list(value: object) -> object:
    """Return a text as a list of one."""
    return [value] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=int | str), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(ge=1)]
Name = Annotated[str, AfterValidator(_check_name)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]


class Section(BaseModel):
    """Part of a job file: no unknown key, no silent conversion; docstrings are in its JSON Schema."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )
