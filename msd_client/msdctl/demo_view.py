"""How the demo shows itself while it runs: a live panel on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO

from msd_client.msdctl.demo_progress import Progress
from msd_client.msdctl.demo_report import caption_text, mixture_line, mixture_rows, step_line
from msd_client.msdctl.output import format_size

LINE_EVERY_STEPS = 20
REDRAW_S = 0.25
_SPARKS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """Shows progress; `say` prints a line that stays."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def stepped(self, progress: Progress) -> None:
        """A step is complete."""

    def close(self) -> None:
        """Leave the screen as a plain text."""


def open_view(*, is_json: bool) -> View:
    """Return the live panel on a terminal with rich, else lines; on stderr where stdout is JSON."""
    out = sys.stderr if is_json else sys.stdout
    if out.isatty():
        try:
            return LiveView(out)
        except ImportError:
            pass
    return LineView(out)


class LineView:
    """A line every few steps."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def say(self, text: str) -> None:
        """See View."""
        self._out.write(text + "\n")
        self._out.flush()

    def stepped(self, progress: Progress) -> None:
        """See View."""
        count = len(progress.views)
        if count == 1 or count % LINE_EVERY_STEPS == 0 or count == progress.steps:
            self.say(step_line(progress))
            self.say("  " + mixture_line(progress))

    def close(self) -> None:
        """See View."""


class LiveView:
    """A panel that is drawn over itself.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._is_started = False
        self._drawn = 0.0

    def say(self, text: str) -> None:
        """See View."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stepped(self, progress: Progress) -> None:
        """See View."""
        if not self._is_started:
            self._is_started = True
            self._live.start()
        now = time.monotonic()
        if now - self._drawn >= REDRAW_S or len(progress.views) == progress.steps:
            self._drawn = now
            self._live.update(panel(progress), refresh=True)

    def close(self) -> None:
        """See View."""
        if self._is_started:
            self._live.stop()
            self._is_started = False


def panel(progress: Progress) -> Any:
    """Return the live panel as a rich renderable."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    view = progress.last
    assert view is not None
    done = len(progress.views)
    losses = [v.head["loss"] for v in progress.views]
    anonymous, shared = progress.memory()
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "step",
        f"{done_bar(done, progress.steps)} {done} of {progress.steps}, {1e3 * view.step_s:.0f} ms",
    )
    facts.add_row("loss", f"{losses[-1]:.3f}  {sparkline(losses)}")
    if captions := caption_text(progress):
        facts.add_row("captions", captions.removeprefix("captions ").rstrip())
    facts.add_row("speed", f"{progress.rate(20):,.0f} tokens/s")
    facts.add_row(
        "data wait",
        f"{100 * progress.wait_ratio(20):.2f} % of step time ({1e6 * view.wait_s:.0f} us now)",
    )
    facts.add_row(
        "imbalance", f"{view.head['imbalance']:.3f}; rows {100 * view.head['fill']:.1f} % full"
    )
    facts.add_row("rings", ring_text(progress.ring_ready()))
    facts.add_row("loader", f"{format_size(anonymous)} anonymous + {format_size(shared)} shared")
    mixture = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("source", "wanted", "realised", "", "tokens"):
        mixture.add_column(name, justify="left" if name in ("source", "") else "right")
    for name, wanted, realised, tokens in mixture_rows(progress):
        bar = "█" * round(24 * realised)
        mixture.add_row(
            name, f"{100 * wanted:.1f} %", f"{100 * realised:.1f} %", bar, f"{tokens:,}"
        )
    change = progress.change_step
    since = "since the start" if change is None or view.number < change else f"since step {change}"
    if change is not None and view.number < change:
        since += f"; changed, new weights hold from step {change}"
    body = Group(
        facts,
        Text(f"mixture {since}", style="dim"),
        mixture,
    )
    return Panel(body, title="msd demo: dp 2 x tp 2", width=min(96, _width()))


def _width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def ring_text(rings: list[tuple[int, int]]) -> str:
    """Return the slots of every ring, ready ones filled."""
    return "   ".join(
        f"{number}: {'■' * ready}{'□' * (slots - ready)} {ready} of {slots} ready"
        for number, (ready, slots) in enumerate(rings)
    )


def done_bar(done: int, total: int, width: int = 40) -> str:
    """Return a bar that is filled as far as the work is done."""
    filled = width * done // max(total, 1)
    return "━" * filled + "┄" * (width - filled)


def sparkline(values: list[float], width: int = 40) -> str:
    """Return values as a row of bars, the lowest value as the lowest bar."""
    if not values:
        return ""
    step = max(1, -(-len(values) // width))
    means = [
        sum(part) / len(part)
        for part in (values[i : i + step] for i in range(0, len(values), step))
    ]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)
