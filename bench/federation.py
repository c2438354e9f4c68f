"""What a cluster costs: samples that move between nodes, its planner, a standby that takes over."""

from __future__ import annotations

from collections.abc import Callable

from bench.cluster_planner import run_planner
from bench.exchange import run_exchange
from bench.takeover import run_takeover

PARTS = {
    "exchange": (
        "16 MiB parcels from pool to pool over loopback, against a plain TCP socket pair",
        run_exchange,
    ),
    "planner": ("one planner for 4,096 ranks on 64 nodes, 306 sources", run_planner),
    "takeover": ("a planner is killed, or stands still, and a standby leads", run_takeover),
}


def run(*, is_quick: bool, say: Callable[..., None], only: str | None) -> dict[str, float]:
    """Return the federation's figures; `only` takes one part.

    Args:
        is_quick: Fewer and shorter rounds.
        say: Prints progress for people.
        only: exchange, planner or takeover.
    """
    if only not in (None, *PARTS):
        raise SystemExit(f"--only {only}: the federation bench has the parts {', '.join(PARTS)}")
    figures: dict[str, float] = {}
    for name, (what, measure) in PARTS.items():
        if only in (None, name):
            say(what)
            figures |= measure(is_quick=is_quick, say=say)
    return figures
