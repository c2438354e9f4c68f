"""`msdctl start-state`: a state in mid-stream from another loader's count."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import ResourceError
from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.job_argument import parse_assignments
from msd_client.msdctl.numbers import STEP
from msd_client.msdctl.output import format_size, format_table, json_option, print_json, say
from msd_client.msdctl.whole_file import write_whole


@click.command(name="start-state", short_help="Make a state from another loader's count.")
@click.argument("job")
@click.option(
    "--consumed",
    required=True,
    help="web=120000samples,code=1.5Btokens, or a JSON file: "
    '{"web": {"samples": 120000}, "code": {"tokens": 1500000000}}.',
)
@click.option("--step", type=STEP, default=0, show_default=True)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The state goes there.",
)
@json_option
def command(job: str, consumed: str, step: int, out: Path, as_json: bool) -> None:
    """Write the state of JOB behind what another loader consumed of its sources.

    Each source is gone through in msd's own order, in this process. The trainer then calls
    `data.train.load_state_dict({"msd": Path("FILE").read_bytes()})` before its first step.
    """
    from msd_daemon.history.start_state import start_state, summary
    from msd_daemon.verbs.index import INDEX_FOLDER
    from msd_daemon.verbs.local_job import resolve_local_job

    counts = parsed(_read_counts, consumed, "--consumed")
    resolved, config = resolve_local_job(job)
    index_dir = config.state_dir / INDEX_FOLDER
    with _counting() as tell:
        state = start_state(resolved, counts, step, index_dir if index_dir.is_dir() else None, tell)
    content = state.encode()
    _write(out, content)
    sources = summary(state)
    if as_json:
        told = {"job": resolved.name, "file": str(out), "bytes": len(content), "step": step}
        print_json("start_state", told | {"sources": sources})
        return
    header = ("source", "pass", "samples", "tokens", "dropped records")
    click.echo(format_table(header, [tuple(source.values()) for source in sources]))
    say(f"wrote {out}, {format_size(len(content))}: the stream goes on with step {step}")


def _read_counts(text: str) -> Mapping[str, Any]:
    if not text.endswith(".json"):
        return parse_assignments(text, "web=120000samples,code=1.5Btokens")
    try:
        found = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{text} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f'{text} is no map of sources: write {{"web": {{"samples": 120000}}}}')
    return found


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise ResourceError(f"{path} can't be written: {error.strerror}", path=str(path)) from error


@contextmanager
def _counting() -> Iterator[Callable[[str, int, int], None]]:
    """Show what was gone through on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn(
        "{task.description}: {task.fields[samples]:,} samples, {task.completed:,} tokens"
    )
    with Progress(
        SpinnerColumn(), text, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("", total=None, samples=0)

        def tell(source: str, samples: int, tokens: int) -> None:
            progress.update(task, description=source, samples=samples, completed=tokens)

        yield tell
