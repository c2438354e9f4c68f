"""`msdctl gc`: remove what nobody needs any more of a daemon's state folder."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import AvailabilityError, PermissionDeniedError
from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.output import format_size, format_table, json_option, print_json, say
from msd_daemon.history.garbage import KINDS, Garbage, find_garbage, remove
from msd_daemon.verbs.local_stores import configure_local_stores

_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@click.command(name="gc", short_help="Remove old runs, indexes and copies of code.")
@click.option("--older-than", default="30d", show_default=True, help="Age: 12h, 30d, 8w.")
@click.option("--keep-runs", type=click.IntRange(min=0), default=1, show_default=True,
              help="Newest runs of each job that stay, however old.")  # fmt: skip
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="These alone.")
@click.option("--dry-run", is_flag=True, help="Show what would go.")
@click.option("--state-dir", type=click.Path(file_okay=False, path_type=Path),
              help="Of which daemon; default: of the one that answers, else of this node's configuration.")  # fmt: skip
@socket_option
@json_option
def command(
    older_than: str,
    keep_runs: int,
    kinds: tuple[str, ...],
    dry_run: bool,
    state_dir: Path | None,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Remove what was not used for so long: folders of runs, indexes, copies of code, leftovers.

    Jobs that run, and the newest run of each job, stay. A stream never depends on what goes: indexes
    are made anew; of a run that went `lineage`, `find` and `rewind` know nothing any more, and its
    trainer's states resume it still.
    """
    older_s = parsed(parse_age, older_than, "--older-than")
    folder, running = _place(state_dir, socket_path)
    found = [
        it
        for it in find_garbage(folder, time.time(), older_s, running, keep_runs)
        if not kinds or it.kind in kinds
    ]
    if not dry_run:
        for one in found:
            _remove(one)
    _tell(found, folder, dry_run, as_json)


def _tell(found: list[Garbage], folder: Path, dry_run: bool, as_json: bool) -> None:
    total_bytes = sum(one.bytes for one in found)
    if as_json:
        rows: list[dict[str, Any]] = [one._asdict() | {"path": str(one.path)} for one in found]
        told = {
            "state_dir": str(folder),
            "removed": not dry_run,
            "bytes": total_bytes,
            "found": rows,
        }
        print_json("gc", told)
        return
    rows_shown = [
        (one.kind, f"{one.age_s / 86_400:.1f} d", format_size(one.bytes), one.path.name, one.what)
        for one in found
    ]
    if rows_shown:
        click.echo(format_table(("kind", "unused for", "bytes", "name", "what"), rows_shown))
    counts = ", ".join(
        f"{count} {kind}" for kind, count in Counter(it.kind for it in found).items()
    )
    verb = "would free" if dry_run else "freed"
    say(f"{folder}: {verb} {format_size(total_bytes)} ({counts or 'nothing is so old'})")


def _place(state_dir: Path | None, socket_path: Path | None) -> tuple[Path, set[str]]:
    """Return the state folder, and the jobs that the daemon which owns it has now."""
    try:
        daemon = call(socket_path, "status")
    except AvailabilityError:
        if socket_path is not None:
            raise
        return state_dir or configure_local_stores().state_dir, set()
    own = Path(daemon["daemon"]["state_dir"])
    return state_dir or own, {str(job["id"]) for job in daemon["jobs"]}


def _remove(garbage: Garbage) -> None:
    try:
        remove(garbage)
    except PermissionError as error:
        raise PermissionDeniedError(
            f"{garbage.path} can't be removed ({error.strerror}): run msdctl gc as the daemon's user"
        ) from error


def parse_age(text: str) -> float:
    """Return the seconds of an age.

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no age: write 12h, 30d or 8w")
    return float(match[1]) * _UNITS[match[2]]
