"""`msdctl sources`: what each source of a job costs, as measured, and what its loaders do now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.daemon_call import call
from msd_client.msdctl.output import format_size, format_table, json_option, print_json
from msd_daemon.verbs.run_options import chosen_state_dir, run_options

_HEADER = (
    "source", "share", "measured", "records", "cpu/sample", "cpu s/Mtok", "user/sample",
    "read wait/sample", "tokens/sample", "read/sample", "open state", "bound",
)  # fmt: skip
_LIVE_HEADER = (
    "source", "loaders", "workers", "records", "tokens", "read", "cpu s", "user s", "read wait s",
    "awaited",
)  # fmt: skip


@click.command(name="sources", short_help="Show what sources cost, and what their loaders do.")
@click.argument("job")
@click.option("--probe", is_flag=True, help="Measure all sources now; JOB is a file.")
@run_options
@json_option
def command(
    job: str, probe: bool, state_dir: Path | None, socket_path: Path | None, as_json: bool
) -> None:
    """Show the profile of each source of JOB: a job file, or the name of a job that runs here.

    Of a file, sources that have a weight and were never measured are read for about a second each. Of
    a running job the counters of its loaders are shown beside what is kept.
    """
    if _is_file(job):
        answer = of_file(job, state_dir, socket_path, is_anew=probe)
    else:
        answer = call(socket_path, "sources", job=job)
    if as_json:
        print_json("sources", answer)
    else:
        click.echo(describe(answer))


def _is_file(job: str) -> bool:
    return Path(job).suffix in (".yaml", ".yml", ".json") or Path(job).is_file()


def of_file(
    path: str,
    state_dir: Path | None = None,
    socket_path: Path | None = None,
    *,
    is_anew: bool = False,
) -> dict[str, Any]:
    """Return the profiles of a job file's sources.

    Raises:
        ConfigError: The job or the daemon's configuration is faulty.
    """
    from msd_daemon.core.resource_needs import named_shares, point_shares, weighted_sources
    from msd_daemon.verbs.local_job import resolve_local_job
    from msd_daemon.verbs.profiling import measured_profiles

    job, config = resolve_local_job(path)
    config = replace(config, state_dir=chosen_state_dir(state_dir, socket_path, config))
    profiles = measured_profiles(job, config, weighted_sources(job), is_anew=is_anew)
    shares = named_shares(job, point_shares(job, job.mixture.points[0]))
    return {
        "job": job.name,
        "sources": [
            {
                "name": spec.name,
                "share": shares.get(spec.name, 0.0),
                "profile": None if profile is None else profile.figures(),
                "live": None,
            }
            for spec, profile in zip(job.sources, profiles, strict=True)
        ],
    }


def describe(answer: dict[str, Any]) -> str:
    """Return profiles and live counters for people."""
    lines = [format_table(_HEADER, [_row(entry) for entry in answer["sources"]])]
    live = [entry for entry in answer["sources"] if entry.get("live")]
    if live:
        lines += ["", format_table(_LIVE_HEADER, [_live_row(entry) for entry in live])]
    return "\n".join(lines)


def _row(entry: dict[str, Any]) -> tuple[object, ...]:
    figures, share = entry["profile"], f"{100 * entry['share']:.2f}%"
    if figures is None:
        return (entry["name"], share, "never", *[None] * (len(_HEADER) - 3))
    return (
        entry["name"],
        share,
        figures["origin"],
        figures["records"],
        _seconds(figures["cpu_s_per_sample"]),
        f"{figures['cpu_s_per_mtok']:.4g}",
        _seconds(figures["user_s_per_sample"]),
        _seconds(figures["read_wait_s_per_sample"]),
        f"{figures['tokens_per_sample']:.0f}",
        format_size(figures["read_bytes_per_sample"]),
        format_size(figures["open_bytes"]),
        figures["bound"],
    )


def _live_row(entry: dict[str, Any]) -> tuple[object, ...]:
    live = entry["live"]
    return (
        entry["name"],
        live["loaders"],
        ",".join(map(str, live["workers"])),
        live["records"],
        live["tokens"],
        format_size(live["read_bytes"]),
        f"{live['cpu_s']:.3f}",
        f"{live['user_s']:.3f}",
        f"{live['read_wait_s']:.3f}",
        "yes" if live["is_awaited"] else "-",
    )


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.0f} ns" if value else "0"
