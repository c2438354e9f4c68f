"""Turns a status answer into text. Every field may be absent: daemons one minor version apart talk.

daemon  version, pid, uptime_s, socket, memory_bytes, memory_used_bytes, workers: [worker]
worker  kind, pid, state, rss_bytes, cpu_s
job     name, state, step, digest, mesh, ranks, tokens, tokens_per_s, wait_ratio, imbalance,
        fill_ratio, ring_ready, ring_slots, pool_used_bytes, pool_bytes, error, sources: [source]
source  name, wanted_share, token_share, sample_share, epoch, dropped_records
"""

from __future__ import annotations

from typing import Any

from msd_client.msdctl.mixture import mixture_table
from msd_client.msdctl.output import format_size, format_table


def daemon_text(daemon: dict[str, Any]) -> str:
    """Return the daemon's head lines and its workers."""
    lines = [
        (
            f"msd-daemon {daemon.get('version', '?')}, pid {daemon.get('pid', '?')}, "
            f"up {_duration(daemon.get('uptime_s'))}"
        ),
        f"  socket  {daemon.get('socket', '?')}",
        (
            f"  memory  {_of(daemon.get('memory_used_bytes'), daemon.get('memory_bytes'))}"
            " for pools and rings"
        ),
    ]
    workers = daemon.get("workers", [])
    if workers:
        table = format_table(
            ("worker", "pid", "state", "memory", "cpu s"),
            [
                (
                    worker.get("kind"),
                    worker.get("pid"),
                    worker.get("state"),
                    _size(worker.get("rss_bytes")),
                    worker.get("cpu_s"),
                )
                for worker in workers
            ],
        )
        lines += ["  " + line for line in table.splitlines()]
    return "\n".join(lines)


def job_text(job: dict[str, Any]) -> str:
    """Return a job in a few lines, with its mixture."""
    lines = [
        (
            f"job {job.get('name')}: {job.get('state', '?')}, step {_number(job.get('step'))}, "
            f"{_number(job.get('tokens'))} tokens, {_number(job.get('tokens_per_s'))} tokens/s"
        ),
        (
            f"  ranks {_number(job.get('ranks'))} ({_mesh(job.get('mesh'))}), "
            f"digest {job.get('digest', '?')}"
        ),
        (
            f"  wait {_percent(job.get('wait_ratio'))} of step time, "
            f"imbalance {_number(job.get('imbalance'))}, rows {_percent(job.get('fill_ratio'))} full"
        ),
        (
            f"  ring {_number(job.get('ring_ready'))} of {_number(job.get('ring_slots'))} slots ready, "
            f"pool {_of(job.get('pool_used_bytes'), job.get('pool_bytes'))}"
        ),
    ]
    if job.get("error"):
        lines.append(f"  error: {job['error']}")
    if job.get("sources"):
        lines += ["  " + line for line in mixture_table(job["sources"]).splitlines()]
    return "\n".join(lines)


def jobs_table(jobs: list[dict[str, Any]]) -> str:
    """Return one line a job."""
    return format_table(
        ("job", "state", "step", "ranks", "tokens/s", "wait", "ring"),
        [
            (
                job.get("name"),
                job.get("state"),
                job.get("step"),
                job.get("ranks"),
                job.get("tokens_per_s"),
                _percent(job.get("wait_ratio")),
                f"{_number(job.get('ring_ready'))}/{_number(job.get('ring_slots'))}",
            )
            for job in jobs
        ],
    )


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _percent(value: object) -> str:
    return f"{100 * value:.1f}%" if isinstance(value, (int, float)) else "-"


def _size(value: object) -> str:
    return format_size(value) if isinstance(value, (int, float)) else "-"


def _of(used: object, total: object) -> str:
    return f"{_size(used)} of {_size(total)}"


def _mesh(mesh: object) -> str:
    if not isinstance(mesh, dict):
        return "no mesh yet"
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def _duration(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
