"""Turns the daemon's status answer into text for people.

Fields may be absent: daemons one minor version apart talk, and a job has no step before its ranks
have started.
"""

from __future__ import annotations

from typing import Any

from msd_client.msdctl.mixture import mixture_table, waiting_lines
from msd_client.msdctl.output import format_size, format_table
from msd_client.msdctl.verdict_text import verdict_line

Map = dict[str, Any]


def daemon_text(daemon: Map) -> str:
    """Return the daemon's head lines and its own processes."""
    draining = ", draining" if daemon.get("is_draining") else ""
    lines = [
        (
            f"msd-daemon {daemon.get('version', '?')}, pid {daemon.get('pid', '?')}, "
            f"up {_duration(daemon.get('uptime_s'))}, {_number(daemon.get('clients'))} clients{draining}"
        ),
        f"  socket  {daemon.get('socket', '?')}",
        f"  state   {daemon.get('state_dir', '?')}",
        f"  budget  {_size(daemon.get('memory_budget_bytes'))} for pools and rings",
    ]
    if daemon.get("waiting_for"):
        lines.append(f"  waits for {daemon['waiting_for']}")
    if daemon.get("dashboard_error"):
        lines.append(f"  {daemon['dashboard_error']}")
    own = {key: daemon.get(key) for key in ("pid", "cpu_s", "memory")} | {"role": "daemon"}
    lines += _indented(processes_table([own, *daemon.get("processes", [])]))
    return "\n".join(lines)


def job_text(job: Map) -> str:
    """Return a job in a few lines: step, rings, pool, mixture, processes."""
    mesh = " * ".join(f"{axis} {size}" for axis, size in job.get("mesh", [])) or "no mesh"
    lines = [
        (
            f"job {job.get('name')}: {job.get('state', '?')}, {len(job.get('ranks', []))} ranks ({mesh}), "
            f"id {job.get('id', '?')}, digest {job.get('digest', '?')}"
        )
    ]
    if isinstance(job.get("verdict"), dict):
        lines.append(f"  {verdict_line(job['verdict'])}")
    lines += _progress_lines(job)
    if job.get("join_to_first_batch_ms") is not None:
        lines.append(f"  {_start_line(job)}")
    if "encoder_imbalance" in job:
        lines.append(
            f"  encoders' imbalance {_number(job['encoder_imbalance'])} "
            f"(last {_number(job.get('encoder_imbalance_last'))})"
        )
    if job.get("journal_stalled"):
        lines.append(f"  plans wait: {job['journal_stalled']}")
    if job.get("skipped_steps"):
        lines.append(f"  {_number(job['skipped_steps'])} plan steps left out so far")
    lines += [f"  {line}" for line in waiting_lines(job)]
    lines += [f"  {ring_line(ring)}" for ring in job.get("rings", [])]
    if job.get("pool"):
        lines.append(f"  {_pool_line(job['pool'])}")
    if job.get("standby"):
        lines.append(f"  {standby_line(job['standby'], job.get('workers', []))}")
    if job.get("sources"):
        lines.append(f"  mixture by {job.get('mixture_unit', '?')}")
        lines += _indented(mixture_table(job["sources"]))
    if job.get("calibration"):
        lines += calibration_lines(job["calibration"])
    if job.get("workers"):
        lines += _indented(processes_table(job["workers"]))
    return "\n".join(lines)


def _progress_lines(job: Map) -> list[str]:
    lines = []
    if job.get("waiting_for_ranks") and job.get("state") != "running":
        lines.append(f"  waits for ranks {_ranks(job['waiting_for_ranks'])}")
    if "step_planned" in job:
        lines += [
            (
                f"  step {_number(job.get('step_released'))} released, "
                f"{_number(job.get('step_planned'))} planned, {_number(job.get('tokens'))} tokens"
            ),
            (
                f"  rows {_percent(job.get('fill'))} full, imbalance {_number(job.get('imbalance'))} "
                f"(last {_number(job.get('imbalance_last'))})"
            ),
        ]
    return lines


def ring_line(ring: Map) -> str:
    """Return one line of a ring: a full one means the trainer, an empty one the loader."""
    ready, slots, free = ring.get("ready"), ring.get("slots"), ring.get("free")
    verdict = ""
    if isinstance(ready, int) and isinstance(slots, int) and isinstance(free, int):
        if free == 0:
            reader = ring.get("last_reader")
            verdict = ": full, the trainer is the slower side"
            verdict += "" if reader is None else f" (last to release: rank {reader})"
        elif ready == 0:
            verdict = ": empty, the loader is the slower side"
    held = f"{_number(ring['held'])} held, " if ring.get("held") else ""
    return (
        f"ring {ring.get('dp_group')}  {_number(ready)} of {_number(slots)} slots ready, {held}"
        f"{_size(ring.get('bytes'))} {ring.get('segment', '')}{verdict}"
    )


def standby_line(standby: Map, workers: list[Map]) -> str:
    """Return one line of who waits for the death of a loader worker, and what that costs."""

    def of_role(role: str) -> str:
        parts = [worker.get("memory") or {} for worker in workers if worker.get("role") == role]
        private = sum(memory.get("pss_anon", 0) for memory in parts)
        return f"{_number(standby.get(role + 's'))} {role}s ({_size(private)})"

    took = standby.get("took_over") or {}
    parts = [of_role("spare"), of_role("shadow")]
    if standby.get("shadow_budget_bytes"):
        ready, budget = standby.get("shadow_bytes"), standby["shadow_budget_bytes"]
        parts.append(f"{_size(ready)} of {_size(budget)} ready in the pool")
    if any(took.values()):
        parts.append("took over: " + ", ".join(f"{n} {role}" for role, n in took.items() if n))
    for key, what in (("late", "were late"), ("recycled", "had grown too large")):
        if standby.get(key):
            parts.append(f"{_number(standby[key])} {what}")
    return "standby " + ", ".join(parts)


def calibration_lines(calibration: Map) -> list[str]:
    """Return the factors of the cost, analytical and fitted, relative to the linear part's."""
    since, fit = calibration.get("since_step"), calibration.get("last_fit") or {}
    force = "analytical" if since is None else f"fitted, from step {_number(since)} on"
    lines = [
        (
            f"  cost {force}; {_number(calibration.get('reports_received'))} reports, "
            f"{_number(calibration.get('fits'))} fits"
        )
    ]
    if not fit:
        return lines
    verdict = "taken" if fit.get("is_accepted") else "not taken"
    lines.append(
        f"  last fit at step {_number(fit.get('step'))} of {_number(fit.get('observations'))} times: "
        f"{verdict}, error {_seconds(fit.get('error_fitted_s'))} beside "
        f"{_seconds(fit.get('error_present_s'))}, constant {_seconds(fit.get('constant_s'))} a step"
    )
    columns = (calibration.get("relative") or [], fit.get("relative") or [])
    rows = [
        (part, "1", _number(in_force), _number(fitted))
        for part, in_force, fitted in zip(calibration.get("parts") or [], *columns, strict=False)
    ]
    return lines + _indented(format_table(("cost of", "analytical", "in force", "last fit"), rows))


def processes_table(processes: list[Map]) -> str:
    """Return processes with their CPU seconds and memory (anonymous and shared, by share)."""
    rows = []
    for process in processes:
        memory = process.get("memory") or {}
        rows.append(
            (
                process.get("role"),
                process.get("pid"),
                f"{process.get('cpu_s') or 0:.1f}",
                _size(memory.get("pss_anon")),
                _size(memory.get("pss_shmem")),
            )
        )
    return format_table(("process", "pid", "cpu s", "anonymous", "shared"), rows)


def _start_line(job: Map) -> str:
    taken = job.get("taken_over") or {}
    found = "all was read anew"
    if taken.get("records") or taken.get("carried"):
        found = (
            f"{_number(taken.get('records'))} records and {_number(taken.get('carried'))} carried "
            f"fragments lay in the pool ({_size(taken.get('used_bytes'))})"
        )
    return (
        f"generation {_number(job.get('generation'))}: first batch "
        f"{_number(job.get('join_to_first_batch_ms'))} ms after the last rank joined, "
        f"{_number(job.get('start_to_first_batch_ms'))} ms after all asked for it; {found}"
    )


def _pool_line(pool: Map) -> str:
    capacity, free = pool.get("capacity_bytes"), pool.get("free_bytes")
    used = capacity - free if isinstance(capacity, int) and isinstance(free, int) else None
    return (
        f"pool    {_size(used)} of {_size(capacity)} in {_number(pool.get('chunks'))} chunks, "
        f"{_size(pool.get('undrawn_bytes'))} read ahead, {_number(pool.get('revocations'))} revoked"
    )


def _indented(table: str) -> list[str]:
    return ["    " + line for line in table.splitlines()]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return shown + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _percent(value: object) -> str:
    return f"{100 * value:.2f} %" if isinstance(value, (int, float)) else "-"


def _size(value: object) -> str:
    return format_size(value) if isinstance(value, (int, float)) else "-"


def _seconds(value: object) -> str:
    return f"{value:.4g} s" if isinstance(value, (int, float)) else "-"


def _duration(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
