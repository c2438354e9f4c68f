"""What tests leave in /dev/shm, while other tests of this machine use it, too."""

from __future__ import annotations

import os
import time

_WAIT_S = 5.0


def shm_names() -> set[str]:
    """Return the names that are there now; not semaphores: msd has none, other tests' trainers do."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def expect_no_names_left(before: set[str]) -> None:
    """Check that nothing stays that was not there `before`.

    A daemon of another test may just be making a segment: its name is gone in a moment.
    """
    left = shm_names() - before
    ends = time.monotonic() + _WAIT_S
    while left and time.monotonic() < ends:
        time.sleep(0.01)
        left &= shm_names()
    assert not left, f"left in /dev/shm: {left}"
