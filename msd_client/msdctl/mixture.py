"""`msdctl mixture`: show a job's wanted and realised shares, or change its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import NotFoundError
from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.job_argument import parse_weights
from msd_client.msdctl.output import format_table, json_option, print_json


@click.group(name="mixture", short_help="Show or change the weights of a job.")
def command() -> None:
    """Show or change the weights of a job's sources."""


@command.command(name="show")
@click.argument("job")
@socket_option
@json_option
def show(job: str, socket_path: Path | None, as_json: bool) -> None:
    """Show wanted and realised shares of JOB, by tokens and by samples."""
    found = find_job(call(socket_path, "status"), job)
    sources = found.get("sources", [])
    if as_json:
        print_json("mixture", {"job": job, "step": found.get("step"), "sources": sources})
    else:
        click.echo(mixture_table(sources))


@command.command(name="set")
@click.argument("job")
@click.argument("weights")
@click.option("--at-step", type=click.IntRange(min=0), help="First step; default: the next one.")
@socket_option
@json_option
def change(
    job: str, weights: str, at_step: int | None, socket_path: Path | None, as_json: bool
) -> None:
    """Set the weights of JOB, such as web=4,code=2; a source not named gets none.

    The change is an event of the stream: it is journalled before a plan uses it.
    """
    fields: dict[str, Any] = {"job": job, "weights": parsed(parse_weights, weights, "WEIGHTS")}
    if at_step is not None:
        fields["at_step"] = at_step
    answer = call(socket_path, "mixture", **fields)
    if as_json:
        print_json("mixture_set", answer)
    else:
        click.echo(f"job {job}: new weights from step {answer.get('at_step', at_step)}")


def find_job(status: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a job of a status answer.

    Raises:
        NotFoundError: The daemon has no job of that name (exit code 4); known ones are named.
    """
    for job in status.get("jobs", []):
        if job.get("name") == name:
            found: dict[str, Any] = job
            return found
    known = ", ".join(str(job.get("name")) for job in status.get("jobs", [])) or "none"
    raise NotFoundError(f"no job {name!r} on this node (known: {known}): see msdctl jobs", job=name)


def mixture_table(sources: list[dict[str, Any]]) -> str:
    """Return shares by source as a table."""
    return format_table(
        ("source", "wanted", "tokens", "samples", "epoch", "dropped"),
        [
            (
                source.get("name"),
                _percent(source.get("wanted_share")),
                _percent(source.get("token_share")),
                _percent(source.get("sample_share")),
                source.get("epoch"),
                source.get("dropped_records"),
            )
            for source in sources
        ],
    )


def _percent(share: object) -> str | None:
    return f"{100 * share:.2f}%" if isinstance(share, (int, float)) else None
