"""Plain SVG charts from numbers, for pages that load nothing else. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 720, 150
LEFT, RIGHT, TOP, BOTTOM = 64, 8, 10, 22
GAP_S = 60.0
"""Points further apart are not joined by a line: nothing was seen between them."""
POINTS_MAX = 1500
"""Drawn of a line; more are thinned, keeping the largest of each run."""


def line_chart(
    title: str,
    times: Sequence[float],
    values: Sequence[float],
    *,
    unit: str = "",
    top: float | None = None,
    labels: tuple[str, str] = ("", ""),
) -> str:
    """Return a line over time.

    Args:
        title: Above it.
        times: Unix seconds, ascending.
        values: One a time.
        unit: Behind the numbers of the axis.
        top: Value of the upper edge; default: the largest.
        labels: Of the first and the last time.
    """
    points = thinned(list(zip(times, values, strict=True)))
    if not points:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>nothing was seen</p></figure>"
    begin, end = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    highest = top if top is not None else (max(value for _, value in points) or 1.0)

    def place(at: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (at - begin) / (end - begin)
        part = min(max(value / highest, 0.0), 1.0)
        return f"{x:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part:.1f}"

    lines, run = [], [place(*points[0])]
    for before, point in itertools.pairwise(points):
        if point[0] - before[0] > max(GAP_S, 3 * (end - begin) / len(points)):
            lines.append(run)
            run = []
        run.append(place(*point))
    lines.append(run)
    paths = "".join(f'<polyline points="{" ".join(run)}"/>' for run in lines)
    axis = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(value))}{escape(unit)}</text>'
        for value, y in (
            (highest * part, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part)
            for part in (0.0, 0.5, 1.0)
        )
    )
    ends = (
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{escape(labels[0])}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(labels[1])}</text>'
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{axis}{paths}{ends}</svg></figure>"
    )


def band_chart(
    title: str, spans: Sequence[tuple[float, float, str, str]], legend: Sequence[tuple[str, str]]
) -> str:
    """Return a band of coloured spans over time.

    Args:
        title: Above it.
        spans: (begin, end, class, text that shows on it), ascending.
        legend: (class, text).
    """
    if not spans:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>nothing was seen</p></figure>"
    begin, end = spans[0][0], max(spans[-1][1], spans[0][0] + 1e-9)
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    parts = "".join(
        f'<rect class="{escape(kind)}" x="{LEFT + scale * (first - begin):.2f}" y="4" height="22" '
        f'width="{max(scale * (last - first), 0.7):.2f}"><title>{escape(text)}</title></rect>'
        for first, last, kind, text in spans
    )
    keys = " ".join(
        f'<span class="key {escape(kind)}"></span>{escape(text)}' for kind, text in legend
    )
    return (
        f"<figure><figcaption>{escape(title)} <small>{keys}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} 30" role="img" aria-label="{escape(title)}">{parts}</svg></figure>'
    )


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most POINTS_MAX of some points: of each run the largest one, and the last of all."""
    if len(points) <= POINTS_MAX:
        return points
    step = -(-len(points) // (POINTS_MAX - 1))
    kept = [
        max(points[first : first + step], key=lambda it: it[1])
        for first in range(0, len(points), step)
    ]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _short(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:.3g}"
