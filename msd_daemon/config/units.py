"""Numbers as people write them in job and daemon files: `250B` tokens, `512Ki` bytes, step 1000.

Counts of tokens take the decimal suffixes M, B and T; sizes in bytes take the binary suffixes Ki,
Mi, Gi and Ti. `K` and `k` are refused everywhere: half the field means 1000 by it, half 1024.
Pure: strings and numbers in, exact integers out.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal, NamedTuple

DECIMAL = {"M": 10**6, "B": 10**9, "T": 10**12}
BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

# 2**62 leaves a bit of headroom in every signed 64-bit sum of two such numbers.
COUNT_MAX = 1 << 62

_NUMBER = re.compile(r"([0-9](?:[0-9_]*[0-9])?(?:\.[0-9]+)?)[ ]?([A-Za-z]*)")


class SchedulePoint(NamedTuple):
    """Where an entry of a schedule begins."""

    start: int
    unit: Literal["steps", "tokens"]


def parse_count(value: object) -> int:
    """Return a count of tokens, rows or steps.

    Args:
        value: An int, or a string such as `4M`, `1.5B`, `8Ki`.

    Raises:
        ValueError: Not a whole count; the message ends with the remedy.
    """
    return _parse(value, DECIMAL | BINARY, "write a whole number, or one with M, B or T (decimal)")


def parse_bytes(value: object) -> int:
    """Return a size in bytes.

    Args:
        value: An int, or a string such as `512Ki`, `1.5Gi`.

    Raises:
        ValueError: Not a whole number of bytes; the message ends with the remedy.
    """
    return _parse(value, BINARY, "write bytes as a whole number, or with Ki, Mi, Gi or Ti (binary)")


def parse_schedule_key(key: object) -> SchedulePoint:
    """Return where a schedule entry begins: a bare number is a step, `M`, `B`, `T` are tokens.

    Raises:
        ValueError: Neither of the two; the message ends with the remedy.
    """
    remedy = "write a step (0, 1000) or tokens placed in rows (250B, 1.8T)"
    if isinstance(key, str) and key.strip()[-1:] in DECIMAL:
        return SchedulePoint(_parse(key, DECIMAL, remedy), "tokens")
    return SchedulePoint(_parse(key, {}, remedy), "steps")


def format_bytes(count: int) -> str:
    """Return a size for people, in the largest binary unit that keeps it at 1 or more."""
    for suffix in ("Ti", "Gi", "Mi", "Ki"):
        if count >= BINARY[suffix]:
            return f"{count / BINARY[suffix]:.4g} {suffix}B"
    return f"{count} B"


def _parse(value: object, suffixes: dict[str, int], remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected a number, got {type(value).__name__}; {remedy}")
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"is not a whole number; {remedy}")
        return _bounded(int(value), remedy)
    if isinstance(value, int):
        return _bounded(value, remedy)
    match = _NUMBER.fullmatch(value.strip())
    if match is None or len(value) > 40:
        raise ValueError(f"is not a number; {remedy}")
    digits, suffix = match.groups()
    if suffix in ("k", "K"):
        raise ValueError(
            "K and k are refused, they mean 1000 to some and 1024 to others; "
            "write the number out, or Ki for 1024"
        )
    if suffix and suffix not in suffixes:
        raise ValueError(f"unknown suffix {suffix!r}; {remedy}")
    exact = Decimal(digits.replace("_", "")) * suffixes.get(suffix, 1)
    if exact != exact.to_integral_value():
        raise ValueError(f"is not a whole number; {remedy}")
    return _bounded(int(exact), remedy)


def _bounded(count: int, remedy: str) -> int:
    if not 0 <= count <= COUNT_MAX:
        raise ValueError(f"is outside 0..2**62; {remedy}")
    return count
