"""`msdctl mixture`: show a job's wanted and realised shares, or change its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import NotFoundError
from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.job_argument import parse_weights
from msd_client.msdctl.numbers import STEP
from msd_client.msdctl.output import format_table, json_option, print_json


@click.group(name="mixture", short_help="Show or change the weights of a job.")
def command() -> None:
    """Show or change the weights of a job's sources."""


@command.command(name="show")
@click.argument("job")
@socket_option
@json_option
def show(job: str, socket_path: Path | None, as_json: bool) -> None:
    """Show wanted and realised shares of JOB, by tokens, samples and trained labels."""
    found = only_job(call(socket_path, "status", job=job), job)
    sources, unit = found.get("sources", []), found.get("mixture_unit")
    if as_json:
        payload = {"job": job, "unit": unit, "step": found.get("step_released")}
        waiting = {key: found.get(key, []) for key in ("waiting_mixtures", "waiting_skips")}
        print_json("mixture", payload | {"sources": shares(sources)} | waiting)
    else:
        click.echo(f"{job}: weights are shares of {unit or 'nothing yet'}")
        click.echo(mixture_table(sources))
        for line in waiting_lines(found):
            click.echo(line)


@command.command(name="set")
@click.argument("job")
@click.argument("weights")
@click.option(
    "--at",
    type=STEP,
    help="Step from which they hold; default: the next possible.",
)
@socket_option
@json_option
def change(job: str, weights: str, at: int | None, socket_path: Path | None, as_json: bool) -> None:
    """Set the weights of JOB, such as web=4,code=2,math=0, all of its sources.

    The change is an event of the stream: it is journalled before a plan uses it, and holds on all
    ranks from the first step that is not planned yet, or from the step of --at on.
    """
    fields: dict[str, Any] = {"job": job, "weights": parsed(parse_weights, weights, "WEIGHTS")}
    if at is not None:
        fields["at"] = at
    answer = call(socket_path, "mixture", **fields)
    if as_json:
        print_json("mixture_set", answer)
    else:
        click.echo(f"job {job}: new weights from step {answer.get('step', '?')}")


def only_job(status: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the job of a status answer that was asked for one.

    Raises:
        NotFoundError: It has none (exit code 4).
    """
    for job in status.get("jobs", []):
        found: dict[str, Any] = job
        return found
    raise NotFoundError(f"no job {name!r} runs on this node: see msdctl jobs", job=name)


def shares(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sources with their realised shares of tokens, samples and labels added."""
    kinds = {
        "token_share": "drawn_tokens",
        "sample_share": "drawn_samples",
        "label_share": "valid_tokens",
    }
    totals = {
        key: sum(source.get(column, 0) for source in sources) for key, column in kinds.items()
    }
    return [
        source
        | {
            key: source.get(column, 0) / totals[key] if totals[key] else None
            for key, column in kinds.items()
        }
        for source in sources
    ]


def waiting_lines(job: dict[str, Any]) -> list[str]:
    """Return the accepted events that have yet to take effect."""
    lines = []
    for change in job.get("waiting_mixtures", []):
        shares = ", ".join(f"{name} {share:.4g}" for name, share in change["shares"].items())
        lines.append(f"to come: from plan step {change['plan_step']:,} on shares {shares}")
    for first, end in job.get("waiting_skips", []):
        lines.append(f"to come: plan steps {first:,} to {end - 1:,} are left out")
    return lines


def mixture_table(sources: list[dict[str, Any]]) -> str:
    """Return wanted and realised shares by source as a table."""
    return format_table(
        (
            "source",
            "wanted",
            "of tokens",
            "of samples",
            "of labels",
            "tokens",
            "samples",
            "dropped",
        ),
        [
            (
                source.get("name"),
                _percent(source.get("wanted")),
                _percent(source["token_share"]),
                _percent(source["sample_share"]),
                _percent(source["label_share"]),
                source.get("drawn_tokens"),
                source.get("drawn_samples"),
                _dropped(source),
            )
            for source in shares(sources)
        ],
    )


def _dropped(source: dict[str, Any]) -> str:
    """Return what was passed over since the stream's beginning, by reason."""
    reasons = source.get("dropped") or {}
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "0"


def _percent(share: object) -> str | None:
    return f"{100 * share:.2f}%" if isinstance(share, (int, float)) else None
