"""Even packing, context-parallel layouts and bytes across nodes, as parts of the balance bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.balance_lengths import Documents, Lengths, cost_of, max_over_mean, split
from federation.model.job import BatchRule
from federation.planning.balance import BalanceRule, objective_of, place_balanced
from federation.planning.costs import segment_costs
from federation.planning.cp_balance import attention_pairs, chunk_pairs
from federation.planning.locality import crossing_bytes, place_locally
from federation.planning.packing import pack
from federation.planning.step_pool import LENGTH, Packed, Pool

Say = Callable[..., None]
Figures = dict[str, float]


def packed_rows(drawn: Documents, rule: BatchRule, **options: Any) -> Packed:
    pool = np.zeros((6, len(drawn.lengths)), np.int64)
    pool[2] = np.arange(len(drawn.lengths))
    pool[LENGTH] = drawn.lengths
    return pack(Pool(pool, 0, **options), rule)


def print_even(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """Row costs under best_fit and best_fit_even; documents of at most a part of a row, and of any length."""
    figures: Figures = {}
    say(
        "rows x row_tokens, documents up to: max/mean of row costs and fill, best_fit -> best_fit_even"
    )
    for name, lengths in found.items():
        for row_tokens, most in ((8192, 8192), (32768, 32768), (32768, 16384), (131072, 32768)):
            rows = 64 if is_quick or row_tokens > 32768 else 256
            rng = np.random.default_rng(most)
            drawn = split(lengths(rng, rows * row_tokens * 33 // 32), most)
            spec = cost_of(row_tokens, rows)
            spread, fill = [], []
            for packing in ("best_fit", "best_fit_even"):
                rule = BatchRule(
                    rows, row_tokens, packing=packing, row_segments_max=row_tokens // 8
                )
                packed = packed_rows(drawn, rule, cost=spec)
                held = packed.segments[LENGTH]
                spread.append(
                    max_over_mean(np.add.reduceat(segment_costs(spec, held), packed.row_starts))
                )
                fill.append(float(held.sum()) / (rows * row_tokens))
            say(
                f"{name:>9} {rows} x {row_tokens}, {most:>6}: {spread[0]:.3f} -> {spread[1]:.3f}, fill "
                f"{fill[0]:.4f} -> {fill[1]:.4f}"
            )
            if most < row_tokens:
                for key, value in (("best_fit", spread[0]), ("best_fit_even", spread[1])):
                    key = f"row_max_over_mean_{key}"
                    figures[key] = max(figures.get(key, 0.0), value)
    return figures


def print_cp(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """Attention of the slowest CP rank over the mean, all rows of a step together and the worst row."""
    figures: Figures = {}
    row_tokens, rows = 32768, 64 if is_quick else 256
    say(
        "attention pairs of the slowest rank over the mean, step (worst row); `two by cost`: two of the "
        "row's chunks each, chosen by their pairs"
    )
    for name, lengths in found.items():
        drawn = split(lengths(np.random.default_rng(7), rows * row_tokens * 33 // 32), row_tokens)
        for cp_count in (2, 4, 8, 16):
            multiple = 2 * cp_count
            line = []
            for layout in ("contiguous", "zigzag_row", "zigzag_document"):
                rule = BatchRule(
                    rows,
                    row_tokens,
                    segment_multiple=multiple if layout == "zigzag_document" else 1,
                    row_segments_max=row_tokens // 8,
                )
                packed = packed_rows(drawn, rule)
                segments = packed.row, packed.column, packed.segments[LENGTH]
                shape = (rows, row_tokens)
                pairs = attention_pairs(layout, cp_count, *segments, shape, rule.segment_multiple)
                line.append(f"{layout} {evenness(pairs)}")
                if layout == "zigzag_row":
                    chunks = chunk_pairs(layout, cp_count, *segments, shape)
                    line.append(f"two by cost {evenness(two_by_cost(chunks))}")
                key = f"cp_{layout}_max_over_mean"
                figures[key] = max(figures.get(key, 0.0), max_over_mean(pairs.sum(axis=0)))
                if layout == "zigzag_document":
                    padding = 1 - float(packed.segments[LENGTH].sum()) / (rows * row_tokens)
            say(f"{name:>9} cp {cp_count:>2}: {', '.join(line)}; its padding {padding:.2%}")
    return figures


def evenness(pairs: np.ndarray) -> str:
    worst = (pairs.max(axis=1) / np.maximum(pairs.mean(axis=1), 1)).max()
    return f"{max_over_mean(pairs.sum(axis=0)):.4f} ({worst:.3f})"


def two_by_cost(chunks: np.ndarray) -> np.ndarray:
    """Return the pairs of each rank where it gets the dearest and the cheapest chunk that are left."""
    falling = -np.sort(-chunks, axis=1)
    half = falling.shape[1] // 2
    sums: np.ndarray = falling[:, :half] + falling[:, : half - 1 : -1]
    sums[1::2] = sums[1::2, ::-1]  # no rank is first in every row
    return sums


def print_locality(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """Bytes across nodes of 8 ranks where each segment lies on a random node, before and after."""
    figures: Figures = {}
    ranks, nodes, context = 64 if is_quick else 256, 8 if is_quick else 32, 8192
    for name, lengths in found.items():
        rng = np.random.default_rng(5)
        drawn = split(lengths(rng, ranks * 8 * context * 33 // 32), context)
        rule = BatchRule(ranks * 8, context, row_segments_max=context // 8)
        packed = packed_rows(drawn, rule)
        held = packed.segments[LENGTH]
        costs = np.add.reduceat(segment_costs(cost_of(context, ranks * 8), held), packed.row_starts)
        node = rng.integers(0, nodes, len(held))
        local = np.zeros((ranks * 8, nodes), np.int64)
        np.add.at(local, (packed.row, node), held * 4)
        reads = np.repeat(np.eye(nodes, dtype=np.int64), ranks // nodes, axis=0)
        placement = place_balanced(costs, ranks, 1, BalanceRule())
        before = crossing_bytes(placement, local, reads)
        line = []
        for tolerance in (0, 1000, 10_000):
            balance = BalanceRule(tolerance_ppm=tolerance)
            there = place_locally(costs, placement, local, reads, balance)
            saved = 1 - crossing_bytes(there, local, reads) / before
            lost = objective_of(costs, there, ranks, "step") / objective_of(
                costs, placement, ranks, "step"
            )
            line.append(f"{tolerance / 1e4:.1f} %: {saved:.1%} saved (max x {lost:.4f})")
            key = f"bytes_saved_{tolerance}_ppm"
            figures[key] = min(figures.get(key, 1.0), saved)
        say(f"{name:>9} tolerance {', '.join(line)}")
    return figures
