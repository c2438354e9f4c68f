"""Which records validation keeps: a hash of a record's key, or of its content, decides.

Neither the seed nor shard, order or place enters, so that training and validation stay disjoint
under any resharding (E18). Part of the stream's definition: a change raises the stream version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.job import Part, SourceSpec

Content = bytes | memoryview | npt.NDArray[Any]

_HASH_BYTES = 8


def content_hashes(contents: Iterable[Content]) -> npt.NDArray[np.uint64]:
    """Return the 64-bit hash of each content or key. Shape (contents,)."""
    digest: Callable[..., Any] = hashlib.blake2b  # takes any buffer, arrays too
    joined = b"".join([digest(content, digest_size=_HASH_BYTES).digest() for content in contents])
    return np.frombuffer(joined, dtype="<u8")


@dataclass(frozen=True)
class HoldOut:
    """Tells which records of a source are samples."""

    held_below: int
    """A record is held out where its hash is below; 0 to 2^64."""
    part: Part
    has_key: bool
    """True where a field of the record is hashed, False where its content is."""

    def are_samples(self, contents: Iterable[Content]) -> npt.NDArray[np.bool_]:
        """Return for each key or content whether its record is a sample. Shape (contents,)."""
        hashes = content_hashes(contents)
        if self.part == "all":
            return np.ones(len(hashes), dtype=np.bool_)
        is_held = hashes < self.held_below  # numpy compares with any Python integer exactly
        return is_held if self.part == "held_out" else ~is_held


def hold_out_of(spec: SourceSpec) -> HoldOut | None:
    """Return the rule of a source, None where every record is a sample and none needs a key."""
    has_key = bool(spec.key_field) and spec.hold_out > 0
    if spec.hold_out == 0 and spec.part != "held_out":
        return None
    if spec.part == "all" and not has_key:
        return None
    held_below = math.ceil(Fraction(spec.hold_out) * (1 << (8 * _HASH_BYTES)))
    return HoldOut(held_below, spec.part, has_key)
