"""The demo's words: what it found, a line every few steps, and the report at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msd_client.msdctl.demo_progress import Progress
from msd_client.msdctl.demo_sources import DemoSource
from msd_client.msdctl.output import format_size, format_table

WAIT_PCT_WANTED = 2.0
INTERRUPTED = "interrupted"
_PHASE_NAMES = {
    "wait": "data wait",
    "compute": "forward and backward",
    "tp": "tensor-parallel all-reduce",
    "dp": "gradient all-reduce",
    "optimizer": "clipping and optimizer",
}


def sources_text(sources: Sequence[DemoSource], notes: Sequence[str]) -> str:
    """Return the sources of the job as a table, and what was left out."""
    rows = [(s.name, format_size(s.size_bytes), s.what) for s in sources]
    return "\n".join([format_table(("source", "bytes", "what"), rows), *notes])


def step_line(progress: Progress) -> str:
    """Return the newest step in one line."""
    view = progress.last
    assert view is not None
    anonymous, shared = progress.memory()
    rings = " ".join(f"{ready}/{slots}" for ready, slots in progress.ring_ready()) or "-"
    return (
        f"step {view.number + 1:>4}/{progress.steps}  loss {view.head['loss']:.3f}  "
        f"{caption_text(progress)}"
        f"{progress.rate(20):>7,.0f} tokens/s  wait {100 * progress.wait_ratio(20):.2f} % of step  "
        f"imbalance {view.head['imbalance']:.3f}  rings {rings}  "
        f"loader {format_size(anonymous + shared)}"
    )


def caption_text(progress: Progress) -> str:
    """Return the newest steps' loss on captions with two spaces behind it; empty for no pictures."""
    found = progress.caption_loss(at_end=True) if progress.has_pictures else None
    return "" if found is None else f"captions {found:.3f}  "


def mixture_line(progress: Progress) -> str:
    """Return realised against wanted shares since the last change, in one line."""
    shares = progress.shares(_regime_start(progress))
    if shares is None:
        return ""
    parts = [
        f"{name} {100 * shares['realised'][name]:.1f}/{100 * shares['wanted'][name]:.1f}"
        for name in progress.sources
    ]
    return "mixture, realised/wanted %: " + ", ".join(parts)


def mixture_rows(progress: Progress) -> list[tuple[str, float, float, int]]:
    """Return (source, wanted, realised, drawn tokens) since the last change."""
    shares = progress.shares(_regime_start(progress))
    if shares is None:
        return []
    return [
        (name, shares["wanted"][name], shares["realised"][name], shares["drawn_tokens"][name])
        for name in progress.sources
    ]


def _regime_start(progress: Progress) -> int:
    change, last = progress.change_step, progress.last
    return change if change is not None and last is not None and last.number >= change else 0


def report_text(report: dict[str, Any]) -> str:
    """Return the report for people.

    Args:
        report: `Progress.figures()` with `total_s`, `left_behind` and `faults`.
    """
    if not report["steps"]:
        return "\n".join(["", "Report: no step was completed", *_ending(report)])
    wait = report["wait_pct"]
    below = "below" if wait < WAIT_PCT_WANTED else "NOT below"
    model = "vision-language model" if "pictures" in report else "GPT"
    lines = [
        "",
        f"Report: {report['steps']} steps, {report['ranks']} ranks (dp 2 x tp 2), {model} of {report['parameters']:,} parameters",
        f"  loss        {report['loss_start']:.3f} at the start, {report['loss_end']:.3f} at the end",
        *_pictures(report),
        f"  speed       {report['tokens_per_s']:,.0f} tokens/s, {report['step_ms']:.0f} ms a step",
        (
            f"  data wait   {wait:.2f} % of step time after {report['warm_up_steps']} warm-up steps "
            f"({below} {WAIT_PCT_WANTED:g} %; of the slowest rank of each step {report['wait_pct_slowest_rank']:.2f} %); "
            f"median {report['wait_us_median']:.0f} us, longest {report['wait_ms_max']:.1f} ms"
        ),
        f"  packing     {report['fill_pct']:.2f} % full, imbalance {report['imbalance']:.3f} (slowest over mean cost)",
        (
            f"  loader      {format_size(report['memory_anonymous_bytes'])} anonymous + "
            f"{format_size(report['memory_shared_bytes'])} shared in {report['loader_processes']} processes, "
            f"at most {format_size(report['memory_bytes_max'])}; {report['loader_cpu_s']:.1f} s of CPU in all"
        ),
        "  time went   "
        + ", ".join(
            f"{_PHASE_NAMES[phase]} {pct:.1f} %" for phase, pct in report["time_pct"].items()
        ),
        "",
        *_mixture(report),
        "",
        *_ending(report),
    ]
    return "\n".join(lines)


def _pictures(report: dict[str, Any]) -> list[str]:
    if report.get("caption_loss_start") is None:
        return []
    start, end = report["caption_loss_start"], report["caption_loss_end"]
    blind = f"{report['caption_loss_blind']:.3f} is the least without a look at the pictures"
    return [
        f"  captions    {start:.3f} at the start, {end:.3f} at the end ({blind})",
        f"  pictures    {report['pictures']:,} seen, {report['caption_tokens']:,} trained tokens of captions",
    ]


def _mixture(report: dict[str, Any]) -> list[str]:
    before, after = report["mixture_before"], report["mixture_after"]
    changed = report["mixture_changed_at"]
    if changed is None:
        title = "Mixture (it was not changed)"
    elif after is None:
        title = f"Mixture (changed from step {changed} on, after the last one)"
    else:
        title = f"Mixture: new weights held from step {changed} on"
    spans = [
        (f"steps {part['first_step']}-{part['last_step']}", part)
        for part in (before, after)
        if part
    ]
    header = ["source"]
    for span, _ in spans:
        header += [f"{span}: wanted", "realised"]
    rows = []
    for name in before["wanted"] if before else ():
        row = [name]
        for _, part in spans:
            row += [f"{100 * part['wanted'][name]:.2f}%", f"{100 * part['realised'][name]:.2f}%"]
        rows.append(row)
    table = format_table(header, rows) if rows else ""
    return [title, *("  " + line for line in table.splitlines())]


def _ending(report: dict[str, Any]) -> list[str]:
    left = report["left_behind"]
    lines = [
        "Left behind: no process and no name in /dev/shm"
        if not left
        else f"LEFT BEHIND: {', '.join(left)}"
    ]
    faults = report["faults"]
    if faults == [INTERRUPTED]:
        lines.append(f"The demo was interrupted after {report['total_s']:.0f} s")
    elif faults:
        lines.append(f"The demo FAILED after {report['total_s']:.0f} s: " + "; ".join(faults))
    else:
        lines.append(f"The demo succeeded in {report['total_s']:.0f} s")
    return lines
