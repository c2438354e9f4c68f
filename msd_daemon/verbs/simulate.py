"""`msdctl simulate`: what a job will be like on a mesh, from length statistics, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.simulation import Prediction
from msd_client.msdctl.output import format_size, format_table, json_option, print_json, say
from msd_daemon.core.node_memory import NodeMemory
from msd_daemon.verbs.mesh_options import mesh_on_nodes, node_ranks_option


class Simulated(NamedTuple):
    """A finished simulation and what it was of."""

    job: ResolvedJob
    tree: ClientPlaceTree
    statistics: list[SourceLengths]
    prediction: Prediction
    memories: list[NodeMemory]
    local: Prediction | None
    """The same steps by strategy `local`, where that was asked for."""


@click.command(name="simulate", short_help="Predict mixture, balance, padding and memory of a run.")
@click.argument("job")
@click.option("--mesh", required=True, help="The trainer's mesh, as dp=1024,pp=4.")
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True)
@node_ranks_option
@click.option(
    "--lengths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Lengths of records: parquet with columns source and tokens, or JSON; nothing is read.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Without --lengths: about so many records of each source are read.",
)
@click.option(
    "--locality",
    is_flag=True,
    help="Also plan by strategy local, and compare bytes between nodes and balance.",
)
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write simulation.svg and simulation.png there.",
)
@json_option
def command(
    job: str,
    mesh: str,
    steps: int,
    node_ranks: int,
    lengths: Path | None,
    sample: int,
    locality: bool,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Plan the first steps of JOB on a mesh and say what they are like; no payload is needed.

    Mixture, packing, balance and repetition are the planner's own, on records drawn from statistics
    of the sources. Memory is the shared memory of a node: rings and pool, as a daemon would refuse
    or take it. Bytes between nodes are token ids and media of samples that are read on another node
    than the one that trains on them, blocks dealt to nodes in turn.
    """
    found = run(job, mesh, steps, node_ranks, lengths, sample, locality)
    files = []
    if plots is not None:
        from msd_daemon.verbs.simulation_plot import write_plots

        files = write_plots(found.prediction, plots)
    if as_json:
        print_json("simulate", summary(found) | {"plots": [str(file) for file in files]})
        return
    click.echo(describe(found))
    for file in files:
        say(f"wrote {file}")


def run(
    path: str,
    mesh: str,
    steps: int,
    node_ranks: int,
    lengths: Path | None,
    sample: int,
    locality: bool = False,
) -> Simulated:
    """Simulate a job file; see `command`.

    Raises:
        ConfigError: The job, the mesh or the lengths are faulty.
        DataError: A source gives no sample, or ends that may not.
    """
    from federation.planning.strategies import find_strategy
    from federation.simulation.simulation import simulate
    from federation.user_strategy import load_strategy
    from msd_daemon.core.node_memory import node_memories
    from msd_daemon.verbs.local_job import resolve_local_job

    job, config = resolve_local_job(path)
    tree = mesh_on_nodes(job, mesh, node_ranks)
    statistics = source_statistics(job, lengths, sample)
    memories = list(
        node_memories(
            job,
            tree,
            horizon_steps=config.horizon_steps,
            ring_slots=config.ring_slots,
            pool_bytes=config.pool_bytes,
        )
    )
    prediction = simulate(job, tree, statistics, steps, strategy=load_strategy(job))
    local = None
    if locality:
        local = simulate(job, tree, statistics, steps, strategy=find_strategy("local"))
    return Simulated(job, tree, statistics, prediction, memories, local)


def source_statistics(job: ResolvedJob, lengths: Path | None, sample: int) -> list[SourceLengths]:
    """Return the statistics of a job's sources, given or sampled; says what it rests on.

    Raises:
        ConfigError: The file of lengths is faulty.
        DataError: A source gives no sample.
    """
    from msd_daemon.verbs.length_sampling import given_lengths, sampled_lengths

    if lengths is not None:
        return given_lengths(lengths, [source.name for source in job.sources])
    say(f"reading about {sample} records of each of {len(job.sources)} sources ...")
    return sampled_lengths(job, sample)


def summary(found: Simulated) -> dict[str, Any]:
    """Return the simulation for JSON."""
    tree = found.tree
    plain = found.prediction.plain()
    for entry, source in zip(plain["sources"], found.statistics, strict=True):
        entry["records"] = source.records
        entry["records_sampled"] = len(source.lengths)
        entry["epoch_tokens"] = source.epoch_tokens
    return {
        "job": found.job.name,
        "digest": found.job.digest(),
        "mesh": dict(zip(tree.axes, tree.sizes, strict=True)),
        "nodes": len(found.memories),
        **plain,
        "memory": [memory._asdict() for memory in found.memories],
        **_locality(found.local),
    }


def _locality(local: Prediction | None) -> dict[str, Any]:
    if local is None:
        return {}
    plain = local.plain()
    names = ("crossing_bytes", "imbalance", "speedup_over_native")
    return {"locality": {name: plain[name] for name in names}}


def describe(found: Simulated) -> str:
    """Return the simulation for people."""
    plain, tree = summary(found), found.tree
    sources = [
        (
            entry["name"],
            f"{100 * entry['wanted']:.2f}%",
            f"{100 * entry['token_share']:.2f}%",
            f"{100 * entry['sample_share']:.2f}%",
            entry["placed_tokens"],
            f"{entry['epochs']:.3f}",
            entry["records"],
            entry["records_sampled"],
        )
        for entry in plain["sources"]
    ]
    names = (
        "source",
        "wanted",
        "of tokens",
        "of samples",
        "tokens",
        "epochs",
        "records",
        "sampled",
    )
    lines = [
        f"{found.job.name} on {tree.describe()}, {plain['nodes']} nodes, {plain['steps']} steps",
        *([f"ended: {plain['ending']}"] if plain["ending"] else []),
        f"wanted shares are of {plain['unit']}",
        format_table(names, sources),
    ]
    if plain["steps"]:
        lines += _step_lines(plain)
    most = max(found.memories, key=lambda memory: memory.rings_bytes + memory.pool_bytes)
    lines.append(
        f"memory      at most {format_size(most.rings_bytes + most.pool_bytes)} shared on a node "
        f"(node {most.node}: {most.groups} groups, rings {format_size(most.rings_bytes)}, pool "
        f"{format_size(most.pool_bytes)})"
    )
    return "\n".join(lines)


def _step_lines(plain: dict[str, Any]) -> list[str]:
    padding, traffic, speedup = (
        plain[key] for key in ("padding", "crossing_bytes", "speedup_over_native")
    )
    ratios = [("imbalance", "slowest rank / mean", plain["imbalance"])]
    if "encoder_imbalance" in plain:
        name = "slowest group's encoders / mean, by microbatch"
        ratios.append(("encoders", name, plain["encoder_imbalance"]))
    return [
        *(
            f"{name:<12}{what}: mean {values['mean']:.4f}, p99 {values['p99']:.4f}, "
            f"max {values['max']:.4f}"
            for name, what, values in ratios
        ),
        (
            f"time        in native order a step takes {speedup['mean']:.3f} times as long, by one "
            "forward, one backward"
        ),
        f"padding     {100 * padding['mean']:.3f}% of the cells, at most {100 * padding['max']:.3f}%",
        (
            f"step        {plain['valid_tokens']['mean']:,.0f} valid tokens, "
            f"{plain['microbatches']['max']:.0f} microbatches a rank, "
            f"{plain['carried_tokens']['mean']:,.0f} tokens carried"
        ),
        f"nodes       {format_size(traffic['mean'])} of samples cross between nodes a step"
        + _local_text(plain),
    ]


def _local_text(plain: dict[str, Any]) -> str:
    if "locality" not in plain:
        return ""
    local = plain["locality"]
    return (
        f"; {format_size(local['crossing_bytes']['mean'])} by strategy local, slowest rank / mean "
        f"{local['imbalance']['mean']:.4f} by it"
    )
