"""Reads a job file as the daemon wants it: its text, the folder of its paths, a name by default."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msd_client.contract.errors import JobError
from msd_client.contract.step_numbers import STEP_MAX

TEXT_BYTES_MAX = 1 << 20


class WrittenJob(NamedTuple):
    """A job as it was written, not parsed."""

    text: str
    base_dir: str
    """Absolute folder that relative paths in the job start from."""
    name: str
    """Used where the job gives none."""


def read_job(path: str) -> WrittenJob:
    """Return the text of a job file.

    Raises:
        JobError: No such file, unreadable, not UTF-8, or over 1 MiB.
    """
    file = Path(path).absolute()
    try:
        with file.open("rb") as opened:
            data = opened.read(TEXT_BYTES_MAX + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise JobError(f"job file {path}: {error.strerror}; give the path of a job.yaml") from error
    except UnicodeDecodeError as error:
        raise JobError(
            f"job file {path}: byte {error.start} is not UTF-8; save it as UTF-8"
        ) from error
    if len(data) > TEXT_BYTES_MAX:
        raise JobError(f"job file {path}: over {TEXT_BYTES_MAX} bytes; shorten it, use globs")
    return WrittenJob(text, str(file.parent), file.stem)


def parse_assignments(text: str, what: str) -> dict[str, str]:
    """Return `dp=2,tp=2` as a map.

    Raises:
        ValueError: Not `name=value`, or a name twice; the message says what was expected.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, separator, value = part.strip().partition("=")
        if not separator or not name or not value:
            raise ValueError(f"{part.strip()!r} is not NAME=NUMBER; write {what}")
        if name in found:
            raise ValueError(f"{name!r} is given twice; write {what}")
        found[name] = value
    return found


def parse_mesh(text: str) -> dict[str, int]:
    """Return a mesh such as `dp=2,tp=2`, axes in the order given.

    Raises:
        ValueError: Malformed.
    """
    mesh: dict[str, int] = {}
    for axis, size in parse_assignments(text, "dp=2,tp=2").items():
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"{axis}={size} is not a size of 1 or more; write dp=2,tp=2")
        mesh[axis] = int(size)
    return mesh


def parse_weights(text: str) -> dict[str, float]:
    """Return weights such as `web=4,code=2`; the daemon checks names and sums.

    Raises:
        ValueError: Malformed.
    """
    weights: dict[str, float] = {}
    for name, value in parse_assignments(text, "web=4,code=2").items():
        try:
            weights[name] = float(value)
        except ValueError as error:
            raise ValueError(f"{name}={value} is not a number; write web=4,code=2") from error
    return weights


def parse_steps(text: str) -> list[int]:
    """Return first and end of a run of steps such as `4800:4850`, without the end.

    Raises:
        ValueError: Malformed, or without a step.
    """
    first, separator, end = text.partition(":")
    if not separator or not (first.isdecimal() and end.isdecimal()) or int(first) >= int(end):
        raise ValueError(f"{text!r} is no run of steps; write FIRST:END, 4800:4850 is 4800 to 4849")
    if int(end) > STEP_MAX:
        raise ValueError(f"{text!r} ends behind {STEP_MAX}, the largest number of a step")
    return [int(first), int(end)]
