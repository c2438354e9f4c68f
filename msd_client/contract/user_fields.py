"""Columns of the records that batches carry under names of the job's own (E10). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from msd_client.contract.errors import ConfigError
from msd_client.contract.field_table import FIELD_TABLE
from msd_client.contract.media_fields import MODALITY_OF

Per = Literal["token", "segment", "row"]

USER_FIELDS_MAX = 24
USER_FIELD_NAME_BYTES_MAX = 64
"""So many of such names fit a slot's field table beside the built-in fields but those of media."""

BUILT_IN_NAMES = frozenset(line.name for line in FIELD_TABLE) | frozenset(MODALITY_OF)


@dataclass(frozen=True)
class UserField:
    """A column of the records that batches carry beside the built-in fields."""

    name: str
    per: Per
    dtype: str
    """numpy name: float32, float64, int32, int64."""
    fill: float
    """Value where no record gives one: padding, added BOS/EOS, sources without fields."""


def check_user_fields(user_fields: tuple[UserField, ...]) -> None:
    """Refuse fields that no batch can carry.

    Raises:
        ConfigError: A name is taken, too long or none, or a type or fill is none; or too many.
    """
    if len(user_fields) > USER_FIELDS_MAX:
        raise ConfigError(
            f"batch spec: {len(user_fields)} user fields, at most {USER_FIELDS_MAX}: leave some out"
        )
    seen = set(BUILT_IN_NAMES)
    for user in user_fields:
        if user.name in seen or not user.name.isidentifier():
            raise ConfigError(f"batch spec: user field {user.name!r} is taken or no Python name")
        if len(user.name.encode()) > USER_FIELD_NAME_BYTES_MAX:
            raise ConfigError(
                f"batch spec: the name of user field {user.name!r} is longer than "
                f"{USER_FIELD_NAME_BYTES_MAX} bytes: shorten it"
            )
        seen.add(user.name)
        if user.dtype not in ("float32", "float64", "int32", "int64"):
            raise ConfigError(f"batch spec: user field {user.name} has dtype {user.dtype!r}")
        if user.per not in ("token", "segment", "row"):
            raise ConfigError(f"batch spec: user field {user.name} is per {user.per!r}")
        if user.dtype.startswith("int") and not _fits(user.fill, user.dtype):
            raise ConfigError(
                f"batch spec: fill {user.fill} of user field {user.name} is no {user.dtype}"
            )


def _fits(value: float, dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
