"""`msdctl graph`: one step's way from sources to ranks, and the mesh's place tree, as text and picture."""

from __future__ import annotations

from itertools import groupby, islice
from pathlib import Path

import click

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.step_view import StepView
from msd_client.contract.errors import UsageError
from msd_client.msdctl.numbers import STEP
from msd_client.msdctl.output import format_table, json_option, print_json, say
from msd_daemon.verbs.mesh_options import mesh_on_nodes, node_ranks_option

MICROBATCHES_MAX = 8
"""Shown one by one in the text."""


@click.command(name="graph", short_help="Draw one step: sources, rows, groups and ranks.")
@click.argument("job")
@click.option("--mesh", default="dp=1", show_default=True, help="The trainer's mesh, as dp=2,tp=2.")
@click.option("--step", "number", type=STEP, default=0, show_default=True)
@node_ranks_option
@click.option(
    "--lengths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw records from these lengths (see simulate) instead of reading the real ones.",
)
@click.option(
    "--groups",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Most data-parallel groups shown one by one.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write graph.svg and graph.png there.",
)
@json_option
def command(
    job: str,
    mesh: str,
    number: int,
    node_ranks: int,
    lengths: Path | None,
    groups: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Plan JOB up to a step and show what it holds and who computes it.

    The records are the real ones, read in this process, so that the step is the one that training
    gets (without live changes); every step before it is planned too.
    """
    from msd_daemon.verbs.local_job import resolve_local_job

    resolved, _ = resolve_local_job(job)
    tree = mesh_on_nodes(resolved, mesh, node_ranks)
    plan, chain = plan_of_step(resolved, tree, number, lengths)
    view = view_of(resolved, tree, plan, chain)
    files = []
    if out is not None:
        from msd_daemon.verbs.graph_plot import write_graph

        files = write_graph(view, resolved.strategy, out, groups)
    if as_json:
        payload = {"job": resolved.name, "strategy": resolved.strategy} | view.plain()
        print_json("graph", payload | {"files": [str(file) for file in files]})
        return
    click.echo("\n".join(graph_lines(view, resolved.strategy, groups)))
    for file in files:
        say(f"wrote {file}")


def plan_of_step(
    job: ResolvedJob, tree: ClientPlaceTree, number: int, lengths: Path | None
) -> tuple[StepPlan, str]:
    """Return the plan of a step and the verbs that made it.

    Of real records, or of some that are drawn from lengths.

    Raises:
        UsageError: The stream ends before it.
        DataError: A source gives no sample, or ends that may not.
    """
    from federation.planning.strategies import WatchedStrategy, find_strategy
    from federation.user_strategy import load_strategy

    watched = WatchedStrategy(load_strategy(job) or find_strategy(job.strategy))
    if lengths is None:
        from msd_daemon.verbs.real_plans import real_plans

        found = next(islice(real_plans(job, tree, watched), number, None), None)
    else:
        from federation.simulation.simulation import simulate
        from msd_daemon.verbs.simulate import source_statistics

        last: list[StepPlan] = []
        statistics = source_statistics(job, lengths, 0)
        simulate(job, tree, statistics, number + 1, last.append, watched)
        found = last[-1] if len(last) > number else None
    if found is None:
        raise UsageError(f"the stream of {job.name} ends before step {number}", step=number)
    assert watched.graph is not None
    return found, watched.graph.chain


def view_of(job: ResolvedJob, tree: ClientPlaceTree, plan: StepPlan, chain: str) -> StepView:
    """Return a plan as people look at it."""
    from federation.planning.costs import plan_row_costs
    from federation.planning.step_view import view_step

    names = [source.name for source in job.sources]
    return view_step(plan, tree, names, plan_row_costs(job.cost, plan), chain)


def graph_lines(view: StepView, strategy: str, groups: int) -> list[str]:
    """Return the step and the place tree for people."""
    costs = view.cell_costs
    mean = costs.sum() / len(costs)
    lines = [
        (
            f"step {view.step}: {view.rows} rows x {view.row_tokens} tokens, "
            f"{100 * view.fill_ratio:.2f}% full, {view.valid_tokens} valid tokens; strategy {strategy}"
        ),
        f"verbs: {view.chain}",
        f"mix, in {view.unit}",
        *_indented(_source_table(view)),
        (
            f"carried: {view.from_pool_tokens} tokens of earlier steps are placed, "
            f"{view.carried_tokens} wait behind this one"
        ),
        f"balance: slowest rank / mean {view.imbalance:.4f}",
        *_encoder_lines(view),
        *_indented(_group_table(view, mean, groups)),
        f"place tree: {view.mesh}",
    ]
    for node, places in groupby(view.places, key=lambda place: place.node):
        own = list(places)
        lines.append(f"  node {node}")
        lines += [f"    dp {place.group}: {_rank_text(place.ranks)}" for place in own[:groups]]
        lines += [f"    ... {len(own) - groups} more groups"] if len(own) > groups else []
    return lines


def _encoder_lines(view: StepView) -> list[str]:
    if view.encoder_imbalance is None:
        return []
    return [
        (
            f"encoders: slowest rank / mean {view.encoder_imbalance:.4f}; the media of "
            f"{view.moved_segments} segments are encoded by another group than their text's"
        )
    ]


def _source_table(view: StepView) -> str:
    return format_table(
        ("source", "wanted", "drawn", "placed", "carried on"),
        [
            (flow.name, f"{100 * flow.wanted:.2f}%", flow.drawn, flow.placed, flow.carried)
            for flow in view.sources
        ],
    )


def _group_table(view: StepView, mean: float, groups: int) -> str:
    order = range(len(view.cell_costs))[:groups]
    rows = [
        (
            f"dp {group}",
            f"{view.cell_costs[group].sum() / mean if mean else 1.0:.4f}",
            int(view.cell_tokens[group].sum()),
            int(view.cell_segments[group].sum()),
            _microbatch_text(view, group),
        )
        for group in order
    ]
    table = format_table(
        ("group", "of mean", "tokens", "segments", "microbatches, of their mean"), rows
    )
    left = len(view.cell_costs) - groups
    return table if left <= 0 else f"{table}\n... {left} more groups"


def _microbatch_text(view: StepView, group: int) -> str:
    mean = float(view.cell_costs.mean()) or 1.0
    shown = view.cell_costs[group, :MICROBATCHES_MAX].tolist()
    left = view.cell_costs.shape[1] - len(shown)
    return " ".join(f"{cost / mean:.2f}" for cost in shown) + (f" +{left}" if left else "")


def _indented(text: str) -> list[str]:
    return ["  " + line for line in text.splitlines()]


def _rank_text(ranks: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    return "; ".join(
        (f"{stage} stage " if stage != "all" else "") + f"ranks {', '.join(map(str, own))}"
        for stage, own in ranks
    )
