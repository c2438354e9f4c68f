"""`msdctl rewind JOB --to N [--skip A:B]`: go back to a step, and around what made the loss jump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.job_argument import parse_steps
from msd_client.msdctl.numbers import STEP
from msd_client.msdctl.output import json_option, print_json
from msd_client.msdctl.whole_file import write_whole


@click.command(name="rewind", short_help="Go back to a step, with or without a skip.")
@click.argument("job")
@click.option("--to", "step", type=STEP, help="Step that comes next.")
@click.option("--skip", help="FIRST:END, plan steps that are left out from then on.")
@click.option("--forget-after", type=STEP, help="Drop events of plan steps behind this one.")
@click.option(
    "--state",
    "state_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the data's state there.",
)
@click.option("--state-only", is_flag=True, help="Write the state, rewind nothing.")
@click.option("--clear", is_flag=True, help="Take former rewinds back.")
@socket_option
@json_option
def command(
    job: str,
    step: int | None,
    skip: str | None,
    forget_after: int | None,
    state_path: Path | None,
    state_only: bool,
    clear: bool,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Have JOB go on from a state of step --to or before.

    A job that runs ends its generation: ranks get StreamRewoundError, load the checkpoint of that
    step and iterate again. Later states are refused from then on. Events behind the step stay, but
    for those that --forget-after drops. --state writes what data.train.load_state_dict takes as
    {"msd": bytes}.
    """
    if clear == (step is not None):
        raise click.UsageError("give --to STEP, or --clear alone")
    if (clear or state_only) and (skip or forget_after is not None):
        raise click.UsageError("--skip and --forget-after go with a rewind")
    if state_only and state_path is None:
        raise click.UsageError("--state-only needs --state FILE")
    if clear and state_path is not None:
        raise click.UsageError("--state goes with --to STEP")
    fields: dict[str, Any] = {"job": job, "clear": clear}
    fields |= {"to": step, "forget_after": forget_after}
    if skip is not None:
        fields["skip"] = parsed(parse_steps, skip, "--skip")
    written: dict[str, Any] = {}
    if state_path is not None:  # first: what can't be written is not rewound to
        answer = call(socket_path, "rewind", **fields | {"state_only": True, "wants_state": True})
        state = answer.pop("state")
        _write(state_path, state)
        written = {"state_file": str(state_path), "state_bytes": len(state)}
    if not state_only:
        answer = call(socket_path, "rewind", **fields)
    answer |= written
    if as_json:
        print_json("rewind", answer)
    else:
        click.echo("\n".join(_lines(answer, state_only)))


def _write(path: Path, state: bytes) -> None:
    """Write a state whole or not at all."""
    try:
        write_whole(path, state)
    except OSError as error:
        raise click.ClickException(
            f"--state {path}: {error.strerror}; nothing was rewound: give a path that can be written"
        ) from error


def _lines(answer: dict[str, Any], state_only: bool) -> list[str]:
    job = answer["job"]
    if "cleared" in answer:
        return [f"job {job}: {answer['cleared']} rewinds taken back, any state may be gone on from"]
    lines = []
    if not state_only:
        lines.append(
            f"job {job}: rewound to step {answer['step']}"
            + (", its ranks were told" if answer["was_running"] else "")
            + (f"; {answer['forgotten']} events dropped" if answer["forgotten"] else "")
        )
    if "state_file" in answer:
        lines.append(f"state of step {answer['step']}: {answer['state_file']}")
    return lines
