"""A value that holds for the steps from some step on, with those that held before. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class ByStep(Generic[T]):
    """What holds at each step.

    Args:
        now: For the steps that are planned next.
        former: Before: (first step for which it holds no longer, value), ascending.
    """

    def __init__(self, now: T, former: Sequence[tuple[int, T]] = ()) -> None:
        self.now = now
        self.former = list(former)

    def at(self, step: int) -> T:
        """Return what holds for a step."""
        return next((value for end, value in self.former if step < end), self.now)

    def change(self, value: T, from_step: int) -> None:
        """Let another value hold from a step on."""
        self.former = [(end, old) for end, old in self.former if end < from_step]
        self.former.append((from_step, self.now))
        self.now = value
