"""Document lengths, the orders in which loaders without balance deal them, and costs of real models."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from federation.model.cost import CostSpec
from federation.planning.best_fit import best_fit_rows
from federation.planning.costs import bounded_cost, segment_costs
from federation.planning.model_config import decoder_shape
from federation.planning.model_flops import decoder_cost

DATA = Path(os.environ.get("MSD_TEST_DATA", "../shared/data"))
REAL = DATA / "lengths/text_o200k.parquet"


class Documents(NamedTuple):
    """Documents in shuffled order: tokens, and number of the source. Shape (n,) each."""

    lengths: np.ndarray
    source: np.ndarray


Lengths = Callable[[np.random.Generator, int], Documents]

BACKBONE = decoder_cost(
    decoder_shape(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "hidden_act": "silu",
        }
    )
)
"""A decoder of 8 B weights."""


def distributions() -> dict[str, Lengths]:
    """Return what draws so many tokens of documents, by name; `real` where the file is here."""
    found: dict[str, Lengths] = {"lognormal": _lognormal, "web": _web}
    if REAL.exists():
        found = {"real": _real} | found
    return found


@cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    import pyarrow.parquet as pq

    table = pq.read_table(REAL)
    source = table["source"].combine_chunks().indices.to_numpy()
    return table["tokens"].to_numpy().astype(np.int64), source.astype(np.int64)


def _real(rng: np.random.Generator, tokens: int) -> Documents:
    lengths, source = _table()
    drawn = rng.integers(0, len(lengths), tokens // 200 + 99)
    return _until(Documents(lengths[drawn], source[drawn]), tokens)


def _lognormal(rng: np.random.Generator, tokens: int) -> Documents:
    lengths = (rng.lognormal(6.5, 1.3, tokens // 200 + 99) + 1).astype(np.int64)
    return _until(Documents(lengths, np.zeros_like(lengths)), tokens)


def _web(rng: np.random.Generator, tokens: int) -> Documents:
    """Log-normal pages, of which 3 % have a Pareto tail of index 1.05, to 300,000 tokens (real: 284,747)."""
    count = tokens // 200 + 99
    tail = (rng.pareto(1.05, count) + 1) * 2000
    lengths = np.where(rng.random(count) < 0.03, tail, rng.lognormal(6.2, 1.1, count))
    lengths = np.minimum(lengths + 1, 300_000).astype(np.int64)
    return _until(Documents(lengths, np.zeros_like(lengths)), tokens)


def _until(documents: Documents, tokens: int) -> Documents:
    count = int(np.searchsorted(np.cumsum(documents.lengths), tokens)) + 1
    return Documents(documents.lengths[:count], documents.source[:count])


def split(documents: Documents, most: int) -> Documents:
    """Cut documents into fragments of at most `most` tokens, in order."""
    parts = -(-documents.lengths // most)
    before = np.repeat(np.cumsum(parts) - parts, parts)
    left = np.repeat(documents.lengths, parts) - (np.arange(parts.sum()) - before) * most
    return Documents(np.minimum(left, most), np.repeat(documents.source, parts))


def cost_of(row_tokens: int, rows: int) -> CostSpec:
    return bounded_cost(BACKBONE, rows, row_tokens)


def packed_costs(fragments: np.ndarray, rows: int, row_tokens: int) -> np.ndarray:
    """Return the cost of each row that best fit fills, in the order of the rows. Shape (rows,)."""
    falling = np.sort(fragments)[::-1].copy()
    row_of = best_fit_rows(falling, 0, rows, row_tokens, max(64, row_tokens // 8))
    is_placed = row_of >= 0
    costs = np.zeros(rows, np.int64)
    spec = cost_of(row_tokens, rows)
    np.add.at(costs, row_of[is_placed], segment_costs(spec, falling[is_placed]))
    return costs


def in_equal_tokens(costs: np.ndarray, lengths: np.ndarray, ranks: int) -> np.ndarray:
    """Deal items as they stand, each rank until it has its part of the tokens. Shape (ranks,)."""
    middle = np.cumsum(lengths) - lengths // 2
    rank = np.minimum(middle * ranks // int(lengths.sum()), ranks - 1)
    return np.bincount(rank, costs, ranks)


def bucketed(lengths: np.ndarray) -> np.ndarray:
    """Return the order of loaders that batch by length: buckets of powers of two, as drawn within."""
    return np.argsort(np.floor(np.log2(lengths)), kind="stable")


def crowded_bound(costs: np.ndarray, buckets: int) -> float:
    """Return what the heaviest bucket holds at least: the mean, or t + 1 of the t * buckets + 1 dearest."""
    falling = np.sort(costs)[::-1]
    through = np.concatenate(([0], np.cumsum(falling)))
    many = np.arange((len(falling) - 1) // buckets + 1)
    last = many * buckets + 1
    return float(max(costs.sum() / buckets, (through[last] - through[last - many - 1]).max()))


def concat_costs(lengths: np.ndarray, rows: int, row_tokens: int) -> np.ndarray:
    """Return the cost of rows of one long text that is cut every `row_tokens`. Shape (rows,)."""
    ends = np.cumsum(lengths)
    cuts = np.arange(1, rows + 1) * row_tokens
    edges = np.unique(np.concatenate((ends[ends <= cuts[-1]], cuts)))
    pieces = np.diff(edges, prepend=0)
    row = (edges - 1) // row_tokens
    costs = np.zeros(rows, np.int64)
    np.add.at(costs, row, segment_costs(cost_of(row_tokens, rows), pieces))
    return costs


def max_over_mean(loads: np.ndarray) -> float:
    return float(loads.max() / loads.mean())
