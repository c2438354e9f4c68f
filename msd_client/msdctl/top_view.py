"""The full screen of `msdctl top`, made with rich from the daemon's snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from msd_client.msdctl.output import format_size
from msd_client.msdctl.top_state import HELP, Map, TopState
from msd_client.msdctl.verdict_text import clock, verdict_line

_SPARKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"fine": "green", "slow": "yellow", "stalled": "red"}
_BAR_CELLS = 24


def screen(snapshot: Map, state: TopState, rows: int) -> RenderableType:
    """Return the whole screen.

    Args:
        snapshot: The daemon's answer.
        state: What is to be shown of it.
        rows: Lines of the terminal.
    """
    layout = Layout()
    job = state.shown(snapshot)
    parts = [Layout(_head(snapshot, state), size=3)]
    if job is None:
        parts.append(Layout(Panel(Text("no job runs on this node"), border_style="dim")))
    else:
        parts.append(Layout(_verdict(job), size=4))
        parts.append(Layout(_body(snapshot, job, state, max(rows - 12, 4))))
    parts.append(Layout(Text(HELP, style="dim", overflow="ellipsis", no_wrap=True), size=1))
    layout.split_column(*parts)
    return layout


def svg(snapshot: Map, state: TopState, columns: int = 120, rows: int = 34) -> str:
    """Return the screen as an SVG picture, for documents."""
    import io

    console = Console(
        record=True, width=columns, height=rows, file=io.StringIO(), force_terminal=True
    )
    console.print(screen(snapshot, state, rows), height=rows)
    return console.export_svg(title="msdctl top")


def _head(snapshot: Map, state: TopState) -> RenderableType:
    daemon = snapshot.get("daemon") or {}
    shown = state.shown(snapshot) or {}
    tabs = Text.assemble(
        (f"{snapshot.get('node', '?')} ", "bold"),
        (
            (
                f"msd-daemon {daemon.get('version', '?')} · {_short(daemon.get('uptime_s'))} up · "
                f"{daemon.get('clients', 0)} clients · {clock(snapshot.get('at'))}   "
            ),
            "dim",
        ),
    )
    for job in snapshot.get("jobs", []):
        level = (job.get("verdict") or {}).get("level", "fine")
        is_shown = job.get("id") == shown.get("id")
        style = _COLOURS.get(level, "white") + (" reverse" if is_shown else "")
        tabs.append(f" {job.get('name', '?')} ", style)
        tabs.append(" ")
    return Panel(tabs, border_style="dim")


def _verdict(job: Map) -> RenderableType:
    verdict = job.get("verdict") or {}
    if not verdict:
        return Panel(Text("no look was taken yet"), border_style="dim")
    colour = _COLOURS.get(verdict.get("level", ""), "white")
    first = Text(verdict_line(verdict), style=f"bold {colour}", overflow="ellipsis", no_wrap=True)
    facts = "; ".join(verdict.get("evidence", [])[:2])
    second = Text(facts, style="dim", overflow="ellipsis", no_wrap=True)
    return Panel(Group(first, second), border_style=colour)


def _body(snapshot: Map, job: Map, state: TopState, rows: int) -> RenderableType:
    views = {
        "overview": lambda: _overview(job, state, rows),
        "sources": lambda: _sources(job, state.row, rows),
        "ranks": lambda: _ranks(job, state.row, rows),
        "nodes": lambda: _nodes(snapshot, state.row, rows),
        "workers": lambda: _workers(job, state.row, rows),
        "why": lambda: _why(job),
    }
    return views[state.view]()


# -- overview --------------------------------------------------------------------------------------


def _overview(job: Map, state: TopState, rows: int) -> RenderableType:
    now, points = job.get("now") or {}, list(state.looks.get(str(job.get("id")), ()))
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "step", f"{_count(job.get('step_released'))} of {_count(job.get('step_planned'))} planned",
        f"generation {_count(job.get('generation'))}, {len(job.get('ranks', []))} ranks here, "
        f"{job.get('state', '?')}",
    )  # fmt: skip
    facts.add_row(
        "tokens/s", _count(now.get("tokens_per_s")),
        sparkline([point.get("tokens_per_s", 0) for point in points]),
    )  # fmt: skip
    facts.add_row(
        "wait", f"{_percent(now.get('wait_ratio'))}, worst rank {_percent(now.get('wait_ratio_max'))}",
        sparkline([point.get("wait_ratio", 0) for point in points], top=1.0),
    )  # fmt: skip
    facts.add_row(
        "imbalance", f"{_decimal(job.get('imbalance_last'))}, mean {_decimal(job.get('imbalance'))}",
        f"rows {_percent(job.get('fill_last'))} full",
    )  # fmt: skip
    pool = job.get("pool") or {}
    capacity, free = pool.get("capacity_bytes"), pool.get("free_bytes")
    if isinstance(capacity, int) and isinstance(free, int) and capacity:
        facts.add_row(
            "pool", f"{format_size(capacity - free)} of {format_size(capacity)}",
            bar((capacity - free) / capacity),
        )  # fmt: skip
    facts.add_row("CPUs", _decimal(now.get("workers_cpus")), _roles(job))
    return Group(facts, Text(), _rings(job, 6), Text(), _mixture(job, max(rows - 15, 3)))


def _rings(job: Map, most: int) -> RenderableType:
    table = _table("ring of DP group", "stage", "slots ready", "", "gives back last")
    rings = job.get("rings") or []
    for ring in rings[:most]:
        ready, slots = ring.get("ready") or 0, ring.get("slots") or 1
        last, held = ring.get("last_reader"), ring.get("held")
        shown = f"{ready} of {slots}" + (f", {held} held" if held else "")
        table.add_row(
            str(ring.get("dp_group")), str(ring.get("stage", "")), shown,
            bar(ready / slots), "" if last is None else f"rank {last}",
        )  # fmt: skip
    if len(rings) > most:
        table.add_row(f"and {len(rings) - most} more")
    return table


def _mixture(job: Map, most: int) -> RenderableType:
    table = _table("source", "wanted", "realised", "", "waited for", "dropped")
    waits = {row.get("name"): row for row in job.get("sources_now") or []}
    sources = sorted(
        job.get("sources") or [],
        key=lambda it: (
            -float((waits.get(it.get("name")) or {}).get("is_waited_for") or 0),
            -float(it.get("wanted") or 0),
        ),
    )
    for source in sources[:most]:
        wait = waits.get(source.get("name")) or {}
        style = "yellow" if wait.get("is_waited_for") else ""
        table.add_row(
            str(source.get("name")), _percent(source.get("wanted")), _percent(source.get("realised")),
            bar(float(source.get("realised") or 0)), f"{wait.get('waited_for_s', 0):.1f} s",
            _count(source.get("dropped_records")), style=style,
        )  # fmt: skip
    if len(sources) > most:
        table.add_row(f"and {len(sources) - most} more: s")
    return table


def _roles(job: Map) -> str:
    counts: dict[str, int] = {}
    for worker in job.get("workers_now") or []:
        counts[worker["role"]] = counts.get(worker["role"], 0) + 1
    return ", ".join(f"{count} {role}" for role, count in counts.items())


# -- tables ----------------------------------------------------------------------------------------


def _sources(job: Map, first: int, rows: int) -> RenderableType:
    table = _table(
        "source", "wanted", "realised", "tokens", "samples", "dropped", "waited for", "workers", "host"
    )  # fmt: skip
    now = {row.get("name"): row for row in job.get("sources_now") or []}
    for source in (job.get("sources") or [])[first : first + rows]:
        look = now.get(source.get("name")) or {}
        dropped = ", ".join(f"{n} {why}" for why, n in (source.get("dropped") or {}).items())
        table.add_row(
            str(source.get("name")), _percent(source.get("wanted")), _percent(source.get("realised")),
            _count(source.get("placed_tokens")), _count(source.get("drawn_samples")),
            dropped or _count(source.get("dropped_records")), f"{look.get('waited_for_s', 0):.1f} s",
            " ".join(map(str, look.get("workers", []))), str(look.get("host") or "files"),
            style="yellow" if look.get("is_waited_for") else "",
        )  # fmt: skip
    return table


def _ranks(job: Map, first: int, rows: int) -> RenderableType:
    table = _table(
        "rank", "DP group", "state", "batches", "waited", "waits now", "gave back", "load", ""
    )
    for rank in (job.get("ranks_now") or [])[first : first + rows]:
        ago, load, waiting_s = (
            rank.get("released_ago_s"),
            rank.get("load"),
            rank.get("waiting_s", 0),
        )
        style = "red" if rank.get("state") in ("T", "t", "Z") else ("yellow" if waiting_s else "")
        table.add_row(
            str(rank.get("rank")), str(rank.get("dp_group")), str(rank.get("state") or "?"),
            _count(rank.get("batches")), f"{rank.get('waited_s', 0):.1f} s",
            f"{waiting_s:.0f} s" if waiting_s else "", "-" if ago is None else f"{ago:.1f} s ago",
            _percent(load), bar(load) if isinstance(load, float) else "", style=style,
        )  # fmt: skip
    return table


def _workers(job: Map, first: int, rows: int) -> RenderableType:
    table = _table("role", "number", "pid", "state", "CPU", "is at", "source", "for", "shard")
    for worker in (job.get("workers_now") or [])[first : first + rows]:
        is_at = worker.get("activity") or ""
        table.add_row(
            worker.get("role"), str(worker.get("number")), str(worker.get("pid")), worker.get("state"),
            f"{worker.get('cpu_s', 0):.1f} s", is_at, worker.get("source"),
            f"{worker.get('activity_s', 0):.1f} s" if is_at else "",
            str(worker.get("shard", "")).rsplit("/", 1)[-1],
            style="red" if worker.get("state") in ("T", "t", "Z") else "",
        )  # fmt: skip
    return table


def _nodes(snapshot: Map, first: int, rows: int) -> RenderableType:
    cluster = snapshot.get("cluster")
    if cluster is None:
        why = snapshot.get("cluster_error")
        return Text(why or f"{snapshot.get('node', '?')} is a node of its own: no cluster", "dim")
    table = _table("node", "state", "workers", "received", "sent", "exchange", "verdict")
    for node in cluster.get("nodes", [])[first : first + rows]:
        silent = node.get("silent_s") or 0
        state = (
            f"silent {silent:.0f} s" if silent else "drained" if node.get("is_drained") else "up"
        )
        table.add_row(
            str(node.get("node")), state, str(node.get("loader_workers", "")),
            format_size(node.get("received_bytes", 0)), format_size(node.get("sent_bytes", 0)),
            str(node.get("exchange", "")), _verdicts(node), style="red" if silent else "",
        )  # fmt: skip
    return table


def _verdicts(node: Map) -> str:
    return "; ".join(
        f"{job}: {side} ({level}), {cause}"
        for job, side, level, cause, _ in node.get("verdicts", [])
    )


def _why(job: Map) -> RenderableType:
    verdict = job.get("verdict") or {}
    lines = [verdict_line(verdict) if verdict else "no look was taken yet", ""]
    lines += [f"- {line}" for line in verdict.get("evidence", [])]
    if verdict.get("command"):
        lines += ["", f"next: {verdict['command']}"]
    return Text("\n".join(lines))


# -- small things ----------------------------------------------------------------------------------


def sparkline(values: Sequence[float], top: float | None = None, cells: int = 60) -> str:
    """Return the last values as a line of bars; `top` is a full one, by default the largest value."""
    values = list(values)[-cells:]
    highest = max(values, default=0.0) if top is None else top
    if highest <= 0:
        return _SPARKS[0] * len(values)
    last = len(_SPARKS) - 1
    return "".join(
        _SPARKS[min(int(max(value, 0) / highest * last + 0.5), last)] for value in values
    )


def bar(share: float) -> str:
    """Return a share of 1 as a bar."""
    full = round(max(0.0, min(share, 1.0)) * _BAR_CELLS)
    return "█" * full + "░" * (_BAR_CELLS - full)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _count(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    return f"{value:,.0f}"


def _decimal(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def _percent(value: object) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else "-"


def _short(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
