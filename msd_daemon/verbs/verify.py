"""`msdctl verify`: a range of steps planned again and compared with what was journalled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.job_argument import parse_steps
from msd_client.msdctl.numbers import GENERATION
from msd_client.msdctl.output import json_option, print_json, say
from msd_daemon.verbs.run_options import run_of, run_options
from msd_daemon.verbs.step_progress import step_progress

if TYPE_CHECKING:
    from msd_daemon.history.verify_steps import Verification


@click.command(name="verify", short_help="Plan steps of a run again and compare their digests.")
@click.argument("job")
@click.option("--steps", required=True, help="Steps a:b, b not among them.")
@click.option("--generation", type=GENERATION, help="Of the journal; default: the newest.")
@click.option(
    "--content", "has_content", is_flag=True, help="Digest tokens, field values and media too."
)
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare content with what `verify --content --json` printed before.",
)
@run_options
@json_option
def command(
    job: str,
    steps: str,
    generation: int | None,
    has_content: bool,
    against: Path | None,
    state_dir: Path | None,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Plan the steps of JOB again from its journal and its sources; exit code 1 where one differs.

    Compared are the stream digest (which records, cut where, in which rows), cursors, counts of
    tokens and of dropped records; size and edges of every local shard. Tokens themselves are not in
    the journal: --content digests them, --against compares with a former digest.
    """
    from federation.journal_reader import JournalReader
    from msd_daemon.history.runs import naming_others
    from msd_daemon.history.verify_steps import StepVerifier

    first, end = parsed(parse_steps, steps, "--steps")
    former = None if against is None else parsed(_read_content, str(against), "--against")
    run = run_of(job, state_dir, socket_path)
    with (
        naming_others(run),
        JournalReader(run.journal) as reader,
        step_progress(end - first, "steps verified") as tell,
    ):
        verifier = StepVerifier(run, reader, has_content=has_content, against=former, tell=tell)
        found = verifier.verify(first, end, generation)
    if as_json:
        print_json("verify", {"job": run.name} | _plain(found))
    else:
        _tell(run.name, found, against)
    if not found.is_equal:
        raise click.exceptions.Exit(1)


def _read_content(path: str) -> dict[int, str]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))["content"]
        found = {int(entry["step"]): str(entry["digest"]) for entry in content}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not what `verify --content --json` printed: {error}"
        ) from error
    if not found:
        raise ValueError(f"{path} holds no digest: it was printed without --content")
    return found


def _plain(found: Verification) -> dict[str, object]:
    difference = found.difference
    return {
        "steps": list(found.steps),
        "is_equal": found.is_equal,
        "verified": found.verified,
        "passed_over": found.passed_over,
        "uncompared": found.uncompared,
        "first_difference": None if difference is None else difference._asdict(),
        "damaged_rows": [row._asdict() for row in found.damaged],
        "changed_shards": found.changed,
        "content": [{"step": step, "digest": digest} for step, digest in found.content.items()],
    }


def _tell(name: str, found: Verification, against: Path | None) -> None:
    first, end = found.steps
    equal = found.verified - len(found.uncompared)
    click.echo(f"job {name}: {equal:,} of {end - first:,} steps are what they were")
    if found.uncompared:
        steps = found.uncompared
        click.echo(
            f"not compared: the content of {len(steps):,} steps, {steps[0]} to {steps[-1]}, of which "
            f"{against} has no digest; else they are what they were"
        )
    for row in found.damaged:
        click.echo(f"damaged: generation {row.generation}, {row.what}")
    if found.passed_over:
        click.echo(f"passed over: {found.passed_over:,} steps that no whole row leads to")
    for text in found.changed:
        click.echo(f"changed: {text}")
    difference = found.difference
    if difference is not None:
        click.echo(
            f"first difference: step {difference.step}, generation {difference.generation}, "
            f"{difference.what}: expected {difference.expected}, actual {difference.actual}: "
            f"{difference.detail}"
        )
        unseen = end - difference.step - 1
        if unseen > 0:
            click.echo(f"the {unseen:,} steps behind it were not looked at: each is chained to it")
    if found.is_equal and not found.content:
        say("tokens themselves are in no journal: see --content")
