"""What a slot costs: its fill against a memcpy, its way to the readers, its CPU."""

from __future__ import annotations

from collections.abc import Callable

from bench.ring_copies import run_copies
from bench.ring_exchange import run_exchanges, run_idle

PARTS = ("copies", "wake", "idle")


def run(*, is_quick: bool, say: Callable[..., None], only: str | None) -> dict[str, float]:
    """Return the ring's figures; `only` takes one of copies, wake, idle.

    Args:
        is_quick: Shorter runs, within 50 s.
        say: Prints progress for people.
        only: One part alone.
    """
    if only not in (None, *PARTS):
        raise SystemExit(f"--only {only}: the ring bench has the parts {', '.join(PARTS)}")
    figures: dict[str, float] = {}
    if only in (None, "copies"):
        say("fill and gather of a 64 MiB slot against a memcpy of the same bytes")
        figures |= run_copies(is_quick=is_quick, say=say)
    if only in (None, "wake"):
        say("16 MiB slots from the constructor to the last reader")
        figures |= run_exchanges(is_quick=is_quick, say=say)
    if only in (None, "idle"):
        say("a rank that waits")
        figures |= run_idle(is_quick=is_quick, say=say)
    return figures
