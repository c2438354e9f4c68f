"""Whether a user's transform gives the same for a record whatever came before it (E20)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.recipe import UserCall
from msd_client.contract.errors import TransformError
from msd_daemon.sources.record import MediaPath
from msd_daemon.transforms.user_frames import encode
from msd_daemon.transforms.user_process import START_S_MAX, UserProcess, open_user_call

RECORDS = 8


class CallFinding(NamedTuple):
    """What is to be said of one record."""

    is_difference: bool
    """False where the code failed on it."""
    line: str


def check_user_call(call: UserCall, samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each of the first 8 samples that fails or does not come out alike twice.

    Raises:
        ConfigError: The function cannot be called at all.
    """
    return [found.line for found in compare_calls(call, samples)]


def compare_calls(
    call: UserCall, values: Sequence[Mapping[str, Any] | npt.NDArray[Any]]
) -> list[CallFinding]:
    """Return what is to be said of the first 8 samples, or of pixels and waves, that are given.

    Two fresh processes make them, the second in reverse order: code that keeps something from one
    record to the next, or draws from a source of its own, gives other bytes then.

    Raises:
        ConfigError: The function cannot be called at all.
    """
    chosen = list(values[:RECORDS])
    found = []
    for numbers in (range(len(chosen)), reversed(range(len(chosen)))):
        opened = open_user_call(
            call,
            memory_bytes_max=call.memory_bytes_max,
            sample_s_max=call.sample_s_max,
            start_s_max=START_S_MAX,
        )
        with opened as process:
            found.append({number: _made(process, chosen[number], number) for number in numbers})
    first, second = found
    findings = []
    for number in range(len(chosen)):
        (is_made, one), (is_made_again, other) = first[number], second[number]
        if not is_made or not is_made_again:
            failure = one if not is_made else other
            findings.append(CallFinding(False, f"record {number}: {failure.decode()}"))
        elif one != other:
            line = (
                f"record {number}: {call.call} gives {len(one)} bytes, then other {len(other)} bytes "
                "in a fresh process: draw from rng alone and keep nothing between calls"
            )
            findings.append(CallFinding(True, line))
    return findings


def _made(
    process: UserProcess, value: Mapping[str, Any] | npt.NDArray[Any], number: int
) -> tuple[bool, bytes]:
    """Return whether there is a result, and its bytes or why there is none."""
    try:
        if isinstance(value, np.ndarray):
            return True, encode(process.call_array(value, number), MediaPath)
        return True, encode(process.call(value, number), MediaPath)
    except TransformError as error:
        return False, " ".join(error.message.split()).encode()
