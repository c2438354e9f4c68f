"""The inner loops of planning: the C kernel where it was built of these sources, else its Python twins.

`MSD_PLANNING=python` forces the twins. Both give the same results, so a plan is the same on every
machine. Arrays are C-contiguous int64, written in place where a docstring of the twins says so;
callers keep costs and their sums within 62 bits, sizes within 31.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from federation.kernel_stamp import load_kernel
from federation.planning import deal_twin, fill_twin, pipeline_twin

__all__ = [
    "KERNEL",
    "deal_differences",
    "deal_lightest",
    "deal_rounds",
    "exchange",
    "fill_tokens",
    "fill_units",
    "makespans",
]

_Twin = TypeVar("_Twin", bound=Callable[..., object])


def _load_kernel() -> Any:
    if os.environ.get("MSD_PLANNING", "") == "python":
        return None
    return load_kernel("federation.planning._kernel", Path(__file__).parent)


_kernel = _load_kernel()

KERNEL: Literal["c", "python"] = "python" if _kernel is None else "c"
"""Which of the two was chosen at import."""


def _chosen(twin: _Twin) -> _Twin:
    return twin if _kernel is None else cast(_Twin, getattr(_kernel, twin.__name__))


fill_tokens = _chosen(fill_twin.fill_tokens)
fill_units = _chosen(fill_twin.fill_units)
deal_rounds = _chosen(deal_twin.deal_rounds)
deal_lightest = _chosen(deal_twin.deal_lightest)
deal_differences = _chosen(deal_twin.deal_differences)
exchange = _chosen(deal_twin.exchange)
makespans = _chosen(pipeline_twin.makespans)
