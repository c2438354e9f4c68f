"""Reads counts out of a config.json: one that is there and can't be used is never taken as absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

NUMBER_MAX = 1 << 31
REMEDY = "add it"


@dataclass(frozen=True)
class Gap:
    """A number of a config that is missing (its value is None) or can't be used."""

    key: str
    value: object
    problem: str
    remedy: str


class ShapeError(ValueError):
    """A config does not tell a model's shape; all gaps are named, for whoever knows its file."""

    def __init__(self, gaps: list[Gap]) -> None:
        lines = [f"{gap.key}: {gap.value!r}: {gap.problem}; {gap.remedy}" for gap in gaps]
        super().__init__("\n".join(lines))
        self.gaps = gaps


def number_of(config: Config, spellings: tuple[str, ...], least: int = 0) -> int:
    """Return a count by any of its spellings, 0 where there is none or it is null.

    Raises:
        ShapeError: A value is no integer, below `least`, or not below NUMBER_MAX.
    """
    found = 0
    for spelling in spellings:
        value = config.get(spelling)
        if value is None:
            continue
        if not _is_count(value, least):
            problem = f"must be an integer of {least} or more"
            if isinstance(value, int) and value >= NUMBER_MAX:
                problem += f", and below {NUMBER_MAX}"
            raise ShapeError([Gap(spelling, value, problem, "correct it")])
        found = found or value
    return found


def usable_number(config: Config, spellings: tuple[str, ...]) -> int:
    """Return the first count of 1 or more by any of its spellings, 0 where there is none."""
    for spelling in spellings:
        value = config.get(spelling)
        if isinstance(value, int) and _is_count(value, 1):
            return value
    return 0


def needed_numbers(
    config: Config, spellings: Mapping[str, tuple[str, ...]], why: str
) -> dict[str, int]:
    """Return counts of 1 or more by their first names.

    Raises:
        ShapeError: Names all that are missing or can't be used.
    """
    found: dict[str, int] = {}
    gaps: list[Gap] = []
    for key, names in spellings.items():
        try:
            found[key] = number_of(config, names, 1)
        except ShapeError as error:
            gaps += error.gaps
            continue
        if not found[key]:
            gaps.append(Gap(key, None, why, REMEDY))
    if gaps:
        raise ShapeError(gaps)
    return found


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < NUMBER_MAX
