"""What it costs to move samples between nodes."""

from __future__ import annotations

from collections.abc import Callable

from bench.exchange import run_exchange

PARTS = ("exchange",)


def run(*, is_quick: bool, say: Callable[..., None], only: str | None) -> dict[str, float]:
    """Return the federation's figures; `only` takes one part.

    Args:
        is_quick: Fewer and shorter rounds.
        say: Prints progress for people.
        only: exchange.
    """
    if only not in (None, *PARTS):
        raise SystemExit(f"--only {only}: the federation bench has the parts {', '.join(PARTS)}")
    figures: dict[str, float] = {}
    if only in (None, "exchange"):
        say("16 MiB parcels from pool to pool over loopback, against a plain TCP socket pair")
        figures |= run_exchange(is_quick=is_quick, say=say)
    return figures
