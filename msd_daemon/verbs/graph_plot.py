"""Draws a step: sources on the left, rows and what is carried in the middle, groups and nodes right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from federation.planning.step_view import SourceFlow, StepView
from msd_daemon.verbs.figures import new_figure, save_figure

SOURCES_MAX = 24
_X_SOURCE, _X_ROWS, _X_GROUP, _X_NODE = 0.0, 3.2, 6.0, 9.6
_BOX_WIDTH, _CELLS_WIDTH, _NODE_WIDTH = 2.0, 3.0, 2.6
_CHAIN_CHARACTERS_MAX = 140
_LINE_POINTS = 14.0
"""Width of the line of a source that gives everything."""


def write_graph(view: StepView, strategy: str, folder: Path, groups: int) -> list[Path]:
    """Write `graph.svg` and `graph.png` and return their paths.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    lines = max(min(len(view.sources), SOURCES_MAX), min(len(view.cell_costs), groups), 4)
    figure = new_figure(13, 1.6 + 0.42 * lines)
    axis = figure.subplots()
    axis.set(xlim=(-0.2, _X_NODE + _NODE_WIDTH + 0.1), ylim=(-0.12, 1.08))
    axis.axis("off")
    axis.set_title(
        f"step {view.step}: {view.mesh}, strategy {strategy}, slowest rank / mean "
        f"{view.imbalance:.4f}\n{_shortened(view.chain)}",
        fontsize=11,
    )
    _draw_sources(axis, view)
    _draw_rows(axis, view)
    _draw_groups(axis, view, groups)
    return save_figure(figure, folder, "graph")


def _shortened(chain: str) -> str:
    return (
        chain if len(chain) <= _CHAIN_CHARACTERS_MAX else f"{chain[: _CHAIN_CHARACTERS_MAX - 3]}..."
    )


def _box(axis: Any, x: float, y: float, width: float, height: float, text: str, color: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    axis.add_patch(
        FancyBboxPatch(
            (x, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0.0,rounding_size=0.02",
            facecolor=color,
            edgecolor="black",
            linewidth=0.7,
            mutation_aspect=0.3,
        )
    )
    axis.text(x + width / 2, y, text, ha="center", va="center", fontsize=8)


def _places(count: int) -> list[float]:
    return [1 - (number + 0.5) / count for number in range(count)]


def _arrow(axis: Any, begin: tuple[float, float], end: tuple[float, float], part: float) -> None:
    axis.plot(
        (begin[0], end[0]),
        (begin[1], end[1]),
        color="tab:blue",
        alpha=0.45,
        linewidth=0.4 + _LINE_POINTS * part,
        solid_capstyle="butt",
        zorder=0,
    )


def _shown(flows: tuple[SourceFlow, ...]) -> list[SourceFlow]:
    order = sorted(flows, key=lambda flow: -flow.drawn)
    shown, rest = order[: SOURCES_MAX - 1], order[SOURCES_MAX - 1 :]
    if len(rest) < 2:
        return order
    sums = [
        sum(getattr(flow, key) for flow in rest) for key in ("wanted", "drawn", "placed", "carried")
    ]
    return [*shown, SourceFlow(f"{len(rest)} more", *sums)]


def _draw_sources(axis: Any, view: StepView) -> None:
    flows = _shown(view.sources)
    drawn = max(1, sum(flow.drawn for flow in flows))
    height = min(0.12, 0.8 / len(flows))
    for flow, y in zip(flows, _places(len(flows)), strict=True):
        text = f"{flow.name}  {100 * flow.wanted:.1f}%\n{flow.drawn:,} drawn"
        _box(axis, _X_SOURCE, y, _BOX_WIDTH, height, text, "lightyellow")
        now = (flow.drawn - flow.carried) / drawn
        _arrow(axis, (_X_SOURCE + _BOX_WIDTH, y), (_X_ROWS, 0.62), now)
        _arrow(axis, (_X_SOURCE + _BOX_WIDTH, y), (_X_ROWS, 0.12), flow.carried / drawn)


def _draw_rows(axis: Any, view: StepView) -> None:
    placed = max(1, int(view.cell_tokens.sum()))
    text = (
        f"packed\n{view.rows:,} rows x {view.row_tokens:,}\n{100 * view.fill_ratio:.2f}% full\n"
        f"{view.valid_tokens:,} valid tokens"
    )
    _box(axis, _X_ROWS, 0.62, _BOX_WIDTH - 0.2, 0.34, text, "honeydew")
    text = f"carried\n{view.carried_tokens:,} tokens wait\n{view.from_pool_tokens:,} placed now"
    _box(axis, _X_ROWS, 0.12, _BOX_WIDTH - 0.2, 0.2, text, "lavender")
    middle = _X_ROWS + _BOX_WIDTH / 2 - 0.1
    _arrow(axis, (middle, 0.22), (middle, 0.45), view.from_pool_tokens / placed)


def _draw_groups(axis: Any, view: StepView, groups: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    count = len(view.cell_costs)
    shown = min(count, groups)
    costs = view.cell_costs[:shown]
    microbatches = costs.shape[1]
    colors = colormaps["YlOrRd"]
    most = max(1, int(view.cell_costs.max()))
    width, height = _CELLS_WIDTH / microbatches, min(0.12, 0.7 / shown)
    totals = view.cell_costs.sum(axis=1)
    tokens = max(1, int(view.cell_tokens.sum()))
    for group, y in enumerate(_places(shown)):
        part = int(view.cell_tokens[group].sum()) / tokens
        _arrow(axis, (_X_ROWS + _BOX_WIDTH - 0.2, 0.62), (_X_GROUP, y), part)
        for microbatch in range(microbatches):
            cost = int(costs[group, microbatch])
            axis.add_patch(
                Rectangle(
                    (_X_GROUP + microbatch * width, y - height / 2),
                    width,
                    height,
                    facecolor=colors(0.9 * cost / most),
                    edgecolor="grey",
                    linewidth=0.4,
                )
            )
        share = totals[group] / max(1.0, float(totals.mean()))
        axis.text(_X_GROUP + _CELLS_WIDTH + 0.05, y, f"{share:.3f}", va="center", fontsize=7)
        hosts = [place for place in view.places if place.group == group]
        text = f"dp {group}: " + "; ".join(
            f"node {place.node} ranks {_span([r for _, own in place.ranks for r in own])}"
            for place in hosts[:2]
        )
        text += " ..." if len(hosts) > 2 else ""
        _box(axis, _X_NODE, y, _NODE_WIDTH, height, text, "aliceblue")
    head = "microbatches, coloured by cost" + (
        f" ({count - shown} more groups)" if count > shown else ""
    )
    axis.text(_X_GROUP, 1.03, head, fontsize=8)


def _span(ranks: list[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:4])) + ("..." if len(ranks) > 4 else "")
