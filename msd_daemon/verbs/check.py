"""`msdctl check`: resolve a job and say everything that is wrong with it, before anything starts."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule, RampPoint, ResolvedJob
from federation.planning.costs import activation_bytes
from msd_client.contract.errors import ConfigError, JobError
from msd_client.contract.plain import encode_plain
from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.job_argument import parse_mesh
from msd_client.msdctl.output import format_size, format_table, json_option, print_json
from msd_daemon.config.daemon_config import DaemonConfig


@click.command(name="check", short_help="Check a job file, all faults at once.")
@click.argument("job")
@click.option("--mesh", help="Also check that this mesh fits, as dp=2,tp=2.")
@click.option("--resolved", is_flag=True, help="Print resolved.yaml: every default written out.")
@click.option("--no-read", is_flag=True, help="Read no record.")
@json_option
def command(job: str, mesh: str | None, resolved: bool, no_read: bool, as_json: bool) -> None:
    """Check the job file JOB: keys, numbers, files, tokenizer, and with --mesh the mesh.

    Then read 8 records of every source through its recipe, say what became of them, and run code of
    your own on them twice; a strategy of your own plans a few made-up steps.

    Exit code 78 if something is wrong; each fault is one line with its key, value and remedy.
    """
    from msd_daemon.config.resolve import check_mesh, render_resolved_yaml
    from msd_daemon.verbs.check_samples import (
        compare_user_code,
        refuse_faults,
        trial_lines,
        trial_maps,
        try_sources,
    )
    from msd_daemon.verbs.check_strategy import check_strategy
    from msd_daemon.verbs.local_job import resolve_local_job

    axes = None if mesh is None else parsed(parse_mesh, mesh, "--mesh")
    try:
        found, config = resolve_local_job(job)
        places = None if axes is None else check_mesh(found, axes)
        memory = None if axes is None else check_memory(found, axes, config)
        trials = [] if no_read or resolved else try_sources(found)
        compared = compare_user_code(trials)
        strategy = None if no_read or resolved else check_strategy(found, axes)
        refuse_faults(found, trials, compared)
    except ConfigError as error:
        if as_json:
            faults = error.faults if isinstance(error, JobError) else []
            print_json("check", {"ok": False, "faults": faults or [error.message]})
        raise
    if resolved:
        click.echo(render_resolved_yaml(found), nl=False)
    elif as_json:
        print_json("check", {"ok": True} | summary(found, axes) | trial_maps(trials, compared))
    else:
        click.echo(describe(found))
        if places is not None:
            click.echo(f"mesh      {places}\nmemory    {memory}")
        if strategy is not None:
            click.echo(f"strategy  {strategy}")
        for line in trial_lines(trials, compared):
            click.echo(line)


def check_memory(job: ResolvedJob, mesh: dict[str, int], config: DaemonConfig) -> str:
    """Return the job's pool and ring sums on this node, one node serving the whole mesh.

    Raises:
        BudgetError: They exceed this daemon configuration's budget; the sums are in the message.
    """
    from msd_client.machine_memory import usable_memory_bytes
    from msd_daemon.services.job_memory import check_job_memory

    needed, rings = check_job_memory(job, list(mesh.items()), config, usable_memory_bytes())
    names = {"rings": f"{rings} rings"}
    parts = " + ".join(
        f"{names.get(what, what)} {format_size(size)}" for what, size in needed.items() if size
    )
    return f"{parts} of {format_size(config.memory_bytes)}"


def summary(job: ResolvedJob, mesh: dict[str, int] | None) -> dict[str, Any]:
    """Return the resolved job for JSON."""
    from msd_daemon.verbs.check_samples import media_maps

    return {
        "job": job.name,
        "digest": job.digest(),
        "batch": {
            "rows": job.batch.rows,
            "row_tokens": job.batch.row_tokens,
            "rows_ramp": encode_plain(job.batch.rows_ramp),
            "row_tokens_ramp": encode_plain(job.batch.row_tokens_ramp),
            "microbatch_rows": job.batch.microbatch_rows,
            "packing": job.batch.packing,
        }
        | (_varlen_map(job.batch) if job.batch.is_varlen else {}),
        "mixture_unit": job.mixture.unit,
        "mesh": mesh,
        "sources": [
            {
                "name": source.name,
                "format": source.format,
                "compression": source.compression,
                "order_class": source.order_class,
                "shards": len(source.shards),
                "bytes": sum(shard.size_bytes for shard in source.shards),
                "first_weight": job.mixture.points[0].weights[source.name],
                "recipe": None if source.recipe is None else encode_plain(source.recipe),
                "group": None if source.group is None else encode_plain(source.group),
            }
            for source in job.sources
        ],
        "loaders": encode_plain(job.loaders),
        "fields": encode_plain(job.fields),
        "media": media_maps(job),
        "cost": encode_plain(job.cost)
        | {"microbatch_activation_bytes": microbatch_activations(job)},
        "calibration": encode_plain(job.calibration),
        "notes": list(job.notes),
    }


def describe(job: ResolvedJob) -> str:
    """Return the resolved job for people; the unit of the mixture is always said."""
    from msd_daemon.verbs.check_samples import sample_lines

    batch = job.batch
    total = sum(job.mixture.points[0].weights.values())
    table = format_table(
        ("source", "share", "format", "order", "shards", "size"),
        [
            (
                source.name,
                f"{100 * job.mixture.points[0].weights[source.name] / total:.2f}%",
                source.format + ("" if source.compression == "none" else f".{source.compression}"),
                source.order_class if source.shuffle.is_shuffled else "unshuffled",
                len(source.shards),
                format_size(sum(shard.size_bytes for shard in source.shards)),
            )
            for source in job.sources
        ],
    )
    lines = [
        f"job       {job.name}, digest {job.digest()}",
        f"step      {step_text(batch)}, {batch.packing}, long documents {batch.long}",
        (
            f"tokenizer {job.tokenizer.kind} {job.tokenizer.library}, "
            f"{job.tokenizer.vocabulary_count} ids, bos {job.tokenizer.bos_id}, "
            f"eos {job.tokenizer.eos_id}"
        ),
        f"mixture   by {job.mixture.unit}, {len(job.mixture.points)} points; from the first:",
        *("  " + line for line in table.splitlines()),
    ]
    lines += [
        f"loader    {loader.name}: {loader.part.replace('_', ' ')} of {', '.join(loader.sources)}, "
        + (f"{loader.step_tokens} tokens" if batch.is_varlen else f"{loader.rows} rows")
        + " a step"
        for loader in job.loaders
    ]
    if job.fields:
        fields = (f"{field.name} ({field.dtype} per {field.per})" for field in job.fields)
        lines.append(f"fields    {', '.join(fields)}")
    lines += cost_lines(job)
    lines += [f"cost      {note}" for note in job.notes if note.startswith("model.")]
    lines += sample_lines(job)
    lines += [f"chat      {note.removeprefix('chat: ')}" for note in job.notes if _is_chat(note)]
    return "\n".join(lines)


def microbatch_activations(job: ResolvedJob) -> int:
    """Return the bytes that a full microbatch keeps for the backward pass of an unsplit model."""
    rows = job.batch.microbatch_rows
    tokens = np.array([rows * max(job.batch.row_tokens_values)])
    units: dict[str, npt.NDArray[np.int64]] = {
        rule.modality: np.array([rows * rule.row_units_max]) for rule in job.media
    }
    return int(activation_bytes(job.cost, tokens, units)[0])


def cost_lines(job: ResolvedJob) -> list[str]:
    """Return what tokens and media cost beside each other, and what a microbatch keeps."""
    cost = job.cost
    if cost.kind != "transformer":
        return ["cost      every token the same; name model.backbone for that of attention"]
    terms = [f"{cost.linear} n"]
    terms += [f"{cost.quadratic} n^2"] if cost.quadratic else []
    terms += [f"{term.quadratic} n^2 in windows of {term.window_tokens}" for term in cost.windowed]
    lines = [f"cost      of a segment of n tokens: {' + '.join(terms)}"]
    for encoder in cost.encoders:
        parts = [f"{encoder.linear} u"]
        parts += [f"{span.quadratic} u min(u, {span.span_units})" for span in encoder.spans]
        lines.append(f"cost      of u units of {encoder.modality}: {' + '.join(parts)}")
    size = format_size(microbatch_activations(job))
    lines.append(
        f"backward  a full microbatch keeps about {size} of activations; tp and cp divide it"
    )
    return lines


def _is_chat(note: str) -> bool:
    return note.startswith("chat: ")


def _varlen_map(batch: BatchRule) -> dict[str, Any]:
    return {
        "step_tokens": batch.step_tokens,
        "step_tokens_ramp": encode_plain(batch.step_tokens_ramp),
        "microbatch_tokens": batch.row_tokens,
    }


def step_text(batch: BatchRule) -> str:
    """Return how large a step and its microbatches are."""
    length = ramp_text(batch.row_tokens, batch.row_tokens_ramp)
    if batch.is_varlen:
        tokens = ramp_text(batch.step_tokens, batch.step_tokens_ramp)
        return f"{tokens} tokens, microbatches of up to {length} tokens"
    rows = ramp_text(batch.rows, batch.rows_ramp)
    return f"{rows} rows x {length} tokens, microbatches of {batch.microbatch_rows}"


def ramp_text(first: int, ramp: tuple[RampPoint, ...]) -> str:
    """Return a value and what becomes of it: `8 (16 from step 100)`."""
    if not ramp:
        return str(first)
    later = (
        f"{point.value} from {'step' if point.start_unit == 'steps' else 'token'} {point.start}"
        for point in ramp
    )
    return f"{first} ({', '.join(later)})"
