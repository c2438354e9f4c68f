"""The page of `msdctl report`: one HTML file that loads nothing. Pure; everything shown is escaped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from msd_client.msdctl.output import format_size
from msd_client.msdctl.svg_chart import band_chart, line_chart
from msd_client.msdctl.verdict_text import verdict_line

Map = dict[str, Any]

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#66707b;--page:#fff;--line:#d9dee3;--mark:#1f6feb;
--fine:#2da44e;--slow:#d4a72c;--stalled:#cf222e;--off:#8c959f}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#8d96a0;--page:#0d1117;--line:#30363d;
--mark:#4493f8;--fine:#3fb950;--slow:#d29922;--stalled:#f85149;--off:#6e7681}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:860px;
margin:0 auto;padding:1.5rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}small,.dim{color:var(--dim)}
.verdict{border-left:4px solid var(--fine);padding:.4rem .8rem;margin:1rem 0}
.verdict.slow{border-color:var(--slow)}.verdict.stalled{border-color:var(--stalled)}
figure{margin:1rem 0}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font-size:11px;fill:var(--dim)}polyline{fill:none;stroke:var(--mark);stroke-width:1.5}
.grid{stroke:var(--line)}rect.fine,.key.fine{fill:var(--fine);background:var(--fine)}
rect.slow,.key.slow{fill:var(--slow);background:var(--slow)}
rect.stalled,.key.stalled{fill:var(--stalled);background:var(--stalled)}
rect.off,.key.off{fill:var(--off);background:var(--off)}
.key{display:inline-block;width:.7em;height:.7em;margin:0 .3em 0 .8em}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
td.n,th.n{text-align:right}meter{width:7rem}
"""

_CHARTS = (
    ("tokens/s", "tokens_per_s", "", None),
    ("time that ranks waited for data", "wait_ratio", " %", 100.0),
    ("worst rank's", "wait_ratio_max", " %", 100.0),
    ("slots of the rings that are ready or held", "ready_ratio", " %", 100.0),
    ("CPUs of loader workers and constructors", "workers_cpus", "", None),
    ("chunk memory in use", "pool_used_bytes", "B", None),
)
_RATIOS = ("wait_ratio", "wait_ratio_max", "ready_ratio")


def page(snapshot: Map, job: Map) -> str:
    """Return the report of a job.

    Args:
        snapshot: The daemon's answer, with history.
        job: The job of it.
    """
    name = str(job.get("name", "?"))
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(snapshot.get("at")))
    parts = [
        f"<h1>{escape(name)}</h1>",
        (
            f'<p class="dim">node {escape(str(snapshot.get("node", "?")))}, made {escape(made)}; '
            f"id {escape(str(job.get('id')))}, digest {escape(str(job.get('digest')))}</p>"
        ),
        _verdict(job),
        _facts(job),
        _timeline(job),
        _charts(job),
        _mixture(job),
        _ranks(job),
        _workers(job),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}: msd report</title><style>{_STYLE}</style></head><body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def _verdict(job: Map) -> str:
    verdict = job.get("verdict")
    if not isinstance(verdict, dict):
        return ""
    lines = "".join(f"<li>{escape(str(line))}</li>" for line in verdict.get("evidence", []))
    command = verdict.get("command")
    following = f"<p>next: <code>{escape(str(command))}</code></p>" if command else ""
    return (
        f'<div class="verdict {escape(str(verdict.get("level")))}"><strong>'
        f"{escape(verdict_line(verdict))}</strong><ul>{lines}</ul>{following}</div>"
    )


def _facts(job: Map) -> str:
    mesh = " * ".join(f"{axis} {size}" for axis, size in job.get("mesh") or [])
    pool = job.get("pool") or {}
    first_ms = job.get("join_to_first_batch_ms")
    rows = [
        ("state", job.get("state")),
        ("mesh", mesh or "none"),
        ("generation", job.get("generation")),
        (
            "steps released, planned",
            f"{_count(job.get('step_released'))}, {_count(job.get('step_planned'))}",
        ),
        ("tokens placed", _count(job.get("tokens"))),
        ("rows filled", _percent(job.get("fill"))),
        ("imbalance, slowest rank by the mean", _decimal(job.get("imbalance"))),
        ("first batch behind the last join", "-" if first_ms is None else f"{first_ms:,.0f} ms"),
        ("chunk memory", _size(pool.get("capacity_bytes"))),
        ("chunks given up and read again", _count(pool.get("revocations"))),
    ]
    return _table("The run", ("", ""), rows)


def _timeline(job: Map) -> str:
    points = [point for point in job.get("history") or [] if "at" in point]
    spans: list[tuple[float, float, str, str]] = []
    for point in points:
        begin, cause = point["at"] - point.get("span_s", 10), str(point.get("cause", "?"))
        kind = _kind(cause, point)
        if spans and spans[-1][2] == kind and spans[-1][3] == cause and begin - spans[-1][1] < 30:
            spans[-1] = (spans[-1][0], point["at"], kind, cause)
        else:
            spans.append((begin, point["at"], kind, cause))
    legend = (
        ("fine", "nobody waits"),
        ("slow", "waits"),
        ("stalled", "the trainer stands"),
        ("off", "off"),
    )
    return "<h2>The last day</h2>" + band_chart("verdicts", spans, legend)


_OFF = (
    "not_running", "waiting_for_ranks", "starting", "stream_ended", "job_failed", "job_stopped",
)  # fmt: skip
_TRAINER = ("rank_stopped", "rank_behind", "ranks_hang")


def _kind(cause: str, _point: Map) -> str:
    if cause in ("none", "trainer_paced"):
        return "fine"
    if cause in _OFF:
        return "off"
    return "stalled" if cause in _TRAINER else "slow"


def _charts(job: Map) -> str:
    points = [point for point in job.get("history") or [] if "at" in point]
    if not points:
        return "<p>There is no history yet: a point is kept every ten seconds.</p>"
    times = [float(point["at"]) for point in points]
    labels = (_clock(times[0]), _clock(times[-1]))
    found = []
    for title, key, unit, top in _CHARTS:
        factor = 100.0 if key in _RATIOS else 1.0
        values = [factor * float(point.get(key) or 0) for point in points]
        found.append(line_chart(title, times, values, unit=unit, top=top, labels=labels))
    return "".join(found)


def _mixture(job: Map) -> str:
    waits = {row.get("name"): row for row in job.get("sources_now") or []}
    rows: list[Sequence[object]] = []
    for source in job.get("sources") or []:
        dropped = ", ".join(f"{n:,} {why}" for why, n in (source.get("dropped") or {}).items())
        wait = waits.get(source.get("name")) or {}
        rows.append(
            (
                source.get("name"),
                _percent(source.get("wanted")),
                _percent(source.get("realised")),
                _count(source.get("placed_tokens")),
                _count(source.get("drawn_samples")),
                dropped or "-",
                f"{wait.get('waited_for_s', 0):.1f} s",
            )
        )
    header = ("source", "wanted", "realised", "tokens", "samples", "dropped", "waited for")
    return _table(f"Mixture by {job.get('mixture_unit', '?')}", header, rows)


def _ranks(job: Map) -> str:
    rows = [
        (
            rank.get("rank"),
            rank.get("dp_group"),
            rank.get("node"),
            _count(rank.get("batches")),
            f"{rank.get('waited_s', 0):.1f} s",
            _percent(rank.get("load")),
        )
        for rank in job.get("ranks_now") or []
    ]
    return _table(
        "Ranks of this node", ("rank", "DP group", "node", "batches", "waited", "load"), rows
    )


def _workers(job: Map) -> str:
    rows = []
    for worker in job.get("workers") or []:
        memory = worker.get("memory") or {}
        rows.append(
            (
                worker.get("role"),
                worker.get("pid"),
                f"{worker.get('cpu_s') or 0:.1f} s",
                _size(memory.get("pss_anon")),
                _size(memory.get("pss_shmem")),
            )
        )
    return _table("Processes", ("role", "pid", "CPU", "anonymous", "shared"), rows)


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape('-' if cell is None else str(cell))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _count(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    return f"{value:,.0f}"


def _decimal(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def _percent(value: object) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else "-"


def _size(value: object) -> str:
    return format_size(value) if isinstance(value, (int, float)) else "-"


def _clock(unix: float) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(unix))
