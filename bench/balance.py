"""What balance reaches: packed rows, varlen, objectives, groups of ranks, even packing, CP, locality.

Length distributions: `real` (document lengths of ../shared/data, or of the folder that MSD_TEST_DATA
names; left out, and said so, where it is not there), log-normal, and web-like with a heavy tail. Cost
is that of an 8 B decoder. Pure arithmetic, nothing is read or run; `only` takes the name of a part.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench import balance_time
from bench.balance_layout import print_cp, print_even, print_locality
from bench.balance_lengths import (
    DATA,
    Lengths,
    bucketed,
    concat_costs,
    cost_of,
    crowded_bound,
    distributions,
    in_equal_tokens,
    max_over_mean,
    packed_costs,
    split,
)
from federation.planning.balance import (
    OBJECTIVES,
    BalanceRule,
    objective_of,
    place_balanced,
    place_in_turn,
)
from federation.planning.best_fit import best_fit_rows
from federation.planning.capped_deal import deal_capped
from federation.planning.costs import segment_costs
from federation.planning.deals import deal, least_load
from federation.planning.kernel import KERNEL

Say = Callable[..., None]
Figures = dict[str, float]

ROWS_A_RANK = (1, 2, 3, 4, 8)
CONTEXTS = (4096, 8192, 32768)
VARLEN_CONTEXTS = (4096, 16384, 32768, 131072)
STEP_TOKENS_MAX = 1 << 28


def run(*, is_quick: bool, say: Say, only: str | None) -> Figures:
    """Return the figures; `only` takes the name of a part."""
    parts = {
        "packed": packed,
        "varlen": varlen,
        "objectives": objectives,
        "groups": groups,
        "speed": speed,
        "even": print_even,
        "cp": print_cp,
        "locality": print_locality,
        "time": iteration_time,
    }
    if only not in (None, *parts):
        raise SystemExit(f"--only {only}: the parts of this bench are {', '.join(parts)}")
    found = distributions()
    say(f"kernel {KERNEL}; distributions {', '.join(found)}")
    if "real" not in found:
        say(f"no lengths/text_o200k.parquet in {DATA}: synthetic distributions alone")
    figures: Figures = {"has_real_lengths": float("real" in found)}
    for name, part in parts.items():
        if only in (None, name):
            say(f"\n{name}")
            figures |= part(found, is_quick=is_quick, say=say)
    return {key: round(value, 4) for key, value in figures.items()}


def ranks_of(*, is_quick: bool) -> tuple[int, ...]:
    return (8, 64, 256) if is_quick else (8, 64, 256, 1024)


def packed(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """Equal rows a rank by LPT and exchange, max over mean and over the bound; other orders beside."""
    worst = dict.fromkeys(ROWS_A_RANK, 0.0)
    say(
        "max/mean of rank costs (over the bound); random rows, concat, bucketed: in turn, no balance"
    )
    for name, lengths in found.items():
        for context in CONTEXTS:
            for ranks in ranks_of(is_quick=is_quick):
                rng = np.random.default_rng(ranks)
                line = []
                for each in ROWS_A_RANK:
                    rows = ranks * each
                    drawn = lengths(rng, rows * context * 33 // 32)
                    costs = packed_costs(split(drawn, context).lengths, rows, context)
                    falling = np.sort(costs)[::-1].copy()
                    loads = np.bincount(deal(falling, ranks), falling, ranks)
                    over = float(loads.max() / least_load(falling, ranks))
                    worst[each] = max(worst[each], over)
                    line.append(f"{each}: {max_over_mean(loads):.3f} ({over:.3f})")
                beside = (
                    max_over_mean(rng.permutation(costs).reshape(ranks, -1).sum(axis=1)),
                    max_over_mean(
                        concat_costs(drawn.lengths, rows, context).reshape(ranks, -1).sum(axis=1)
                    ),
                    bucketed_max(split(drawn, context).lengths, ranks, context),
                )
                say(
                    f"{name:>9} {context:>6} x {ranks:>4} ranks, rows a rank  {'  '.join(line)}"
                    f"  | 8 rows: random {beside[0]:.2f} concat {beside[1]:.2f} bucketed {beside[2]:.2f}"
                )
    figures = {f"rows_over_bound_{each}": worst[each] for each in ROWS_A_RANK}
    return figures | {"rows_over_bound_max": max(worst[each] for each in ROWS_A_RANK if each >= 4)}


def bucketed_max(fragments: np.ndarray, ranks: int, context: int) -> float:
    ordered = fragments[bucketed(fragments)]
    costs = segment_costs(cost_of(context, 1 << 12), ordered)
    return max_over_mean(in_equal_tokens(costs, ordered, ranks))


def varlen(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """Segments of at most C tokens, 4 and 8 C tokens a rank, at most mean + longest tokens a rank."""
    say("max/mean of rank costs (over the bound: t * ranks + 1 segments put t + 1 on one rank)")
    worst, over = 0.0, 0.0
    for name, lengths in found.items():
        for context in VARLEN_CONTEXTS:
            for ranks in ranks_of(is_quick=is_quick):
                for each in (4, 8):
                    tokens = ranks * each * context
                    if tokens > STEP_TOKENS_MAX >> (2 if is_quick else 0):
                        continue
                    segments = split(lengths(np.random.default_rng(each), tokens), context).lengths
                    costs = segment_costs(cost_of(context, ranks * each), segments)
                    cap = int(segments.sum()) // ranks + int(segments.max())
                    dealt = deal_capped(costs, segments, ranks, cap)
                    assert dealt is not None, "a cap of mean + longest always leaves room"
                    assert np.bincount(dealt, segments, ranks).max() <= cap
                    loads = np.bincount(dealt, costs, ranks)
                    ratio, bound = max_over_mean(loads), crowded_bound(costs, ranks)
                    worst, over = max(worst, ratio), max(over, float(loads.max()) / bound)
                    say(
                        f"{name:>9} {context:>6} x {ranks:>4} ranks, {each} C a rank, "
                        f"{len(segments):>7} segments: {ratio:.4f} ({loads.max() / bound:.4f})  | random "
                        f"{max_over_mean(in_equal_tokens(costs, segments, ranks)):.2f} bucketed "
                        f"{bucketed_max(segments, ranks, context):.2f}"
                    )
    return {"varlen_max_over_mean": worst, "varlen_over_bound": over}


def objectives(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """Each placement measured by each objective, 8 rows a rank, 4 stages, over the `step` placement."""
    ranks, stages = 64 if is_quick else 256, 4
    gained: dict[str, list[float]] = {"microbatch": [], "pipeline": []}
    say(
        f"{ranks} ranks; placement by: step, microbatch, pipeline objective over the step placement's"
    )
    for name, lengths in found.items():
        for context, each in ((4096, 1), (8192, 1), (8192, 2), (32768, 1), (32768, 2)):
            rng = np.random.default_rng(context)
            drawn = split(lengths(rng, ranks * 8 * context * 33 // 32), context)
            costs = rng.permutation(packed_costs(drawn.lengths, ranks * 8, context)) >> 8
            placements = {
                one: place_balanced(costs, ranks, each, BalanceRule(objective=one, stages=stages))
                for one in OBJECTIVES
            } | {"in turn": place_in_turn(len(costs), ranks, each)}
            values = {
                one: [objective_of(costs, placement, ranks, by, stages) for by in OBJECTIVES]
                for one, placement in placements.items()
            }
            parts = {
                one: [mine / step for mine, step in zip(value, values["step"], strict=True)]
                for one, value in values.items()
            }
            say(f"{name:>9} {context:>6}, {each} rows a microbatch")
            for one in ("microbatch", "pipeline", "in turn"):
                say(f"{one:>20}: {'  '.join(f'{part:.5f}' for part in parts[one])}")
            gained["microbatch"].append(parts["microbatch"][1])
            gained["pipeline"].append(parts["pipeline"][2])
    figures: Figures = {}
    for one, over in gained.items():
        figures[f"{one}_over_step_mean"] = float(np.mean(over))
        figures[f"{one}_over_step_max"] = max(over)
    return figures


def groups(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """What a first, coarse deal to groups of 64 ranks loses against one flat deal, 4 rows a rank."""
    figures: Figures = {}
    context = 8192
    for name, lengths in found.items():
        for ranks in (1024,) if is_quick else (1024, 4096):
            rng = np.random.default_rng(ranks)
            drawn = split(lengths(rng, ranks * 4 * context * 33 // 32), context)
            costs = packed_costs(drawn.lengths, ranks * 4, context)
            flat, grouped = (
                objective_of(costs, place_balanced(costs, ranks, 1, rule), ranks, "step")
                for rule in (BalanceRule(), BalanceRule(group_size=64))
            )
            say(f"{name:>9} {ranks} ranks: groups of 64 over flat {grouped / flat:.5f}")
            key = f"groups_over_flat_{ranks}"
            figures[key] = max(figures.get(key, 0.0), grouped / flat)
    return figures


def speed(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """CPU time of 65,536 fragments packed and of 65,536 rows dealt to 4,096 ranks."""
    rng = np.random.default_rng(1)
    lengths = next(iter(found.values()))
    fragments = np.resize(split(lengths(rng, 60_000_000), 4096).lengths, 65536)
    falling = np.sort(fragments)[::-1].copy()
    rows = int(falling.sum()) * 32 // 33 // 4096
    units = np.where(rng.random(65536) < 0.3, rng.integers(1, 4096, 65536), 0)[None]
    costs = np.sort(rng.lognormal(10, 0.6, 65536).astype(np.int64))[::-1].copy()
    sizes = rng.integers(1, 4096, 65536)
    cap = int(sizes.sum()) // 4096 + 4096
    few = costs[:4096]
    work: dict[str, Callable[[], object]] = {
        "pack_ms": lambda: best_fit_rows(falling, 0, rows, 4096, 64),
        "pack_units_ms": lambda: best_fit_rows(falling, 0, rows, 4096, 64, None, units, (16384,)),
        "deal_4096_ms": lambda: deal(costs, 4096),
        "deal_capped_4096_ms": lambda: deal_capped(costs, sizes, 4096, cap),
        "karmarkar_karp_64_ms": lambda: deal(few, 64, "karmarkar_karp"),
    }
    figures = {}
    for name, call in work.items():
        taken = []
        for _ in range(3 if is_quick else 9):
            begun = time.process_time()
            call()
            taken.append(time.process_time() - begun)
        figures[name] = float(np.median(taken) * 1e3)
        say(f"{name:>24} {figures[name]:.2f}")
    return figures


def iteration_time(found: dict[str, Lengths], *, is_quick: bool, say: Say) -> Figures:
    """Predicted step time against three unbalanced orders (see bench.balance_time)."""
    figures: Figures = {}
    say(
        f"dp {balance_time.DP} x pp {balance_time.PP}, {balance_time.MICROBATCHES} microbatches of one "
        "context each; time of each order over the balanced one's"
    )
    for name, lengths in found.items():
        for mix in ("text", "vlm"):
            rng = np.random.default_rng(0)
            times = balance_time.table(rng, lengths, mix, 1 if is_quick else 4)
            for context, one in times.items():
                native, shuffled, filled, beside = (part / one.balanced for part in one[:4])
                say(
                    f"{name:>9} {mix:>4} {context:>6}: native {native:6.2f}  shuffled {shuffled:.2f}  "
                    f"filled {filled:.2f}  images beside their text {beside:.2f}  | balanced over "
                    f"all alike {one.balanced / one.perfect:.3f}"
                )
                if context == 16384:
                    for key, value in (("", native), ("_shuffled", shuffled), ("_filled", filled)):
                        key = f"speedup_16k_{mix}{key}"
                        figures[key] = min(figures.get(key, np.inf), value)
    return figures
