"""`msdctl up` and `msdctl down`: a daemon on every node of a Slurm job or a Ray cluster, and its end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import click

from msd_client.contract.errors import ResourceError
from msd_client.contract.plain import encode_plain
from msd_client.msdctl.output import format_table, json_option, print_json, say
from msd_daemon.launch.launch_options import READY_S, LaunchOptions
from msd_daemon.launch.meeting import NodeNote

LOOK_S = 0.5


class Launch(Protocol):
    """A launch, whoever places its processes."""

    def up(self) -> Mapping[str, NodeNote]:
        """Start it; return the nodes once all are ready."""
        ...

    def notes(self) -> Mapping[str, NodeNote]:
        """Return what the nodes say."""
        ...

    def has_ended(self) -> bool:
        """True once it is over without our doing."""
        ...

    def down(self) -> None:
        """End it."""
        ...

    def let_go(self) -> None:
        """Leave it running."""
        ...


def _places(function: Any) -> Any:
    for option in (
        click.option(
            "--shared", default="", help="Slurm: folder that all nodes see; default ~/.msd."
        ),
        click.option("--ray", "ray_address", help="Address of a Ray cluster, or `auto`."),
        click.option("--slurm", "is_slurm", is_flag=True, help="The Slurm allocation we are in."),
    ):
        function = option(function)
    return function


@click.command(name="up", short_help="Start a daemon on every node of a Slurm job or Ray cluster.")
@_places
@click.option("--planners", default=1, show_default=True, help="Planners; above 1 with --store.")
@click.option("--store", default="", help="Store that planners share: etcd://h1:2379,h2,h3/prefix.")
@click.option("--interface", default="", help="Network interface by which nodes reach each other.")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="daemon.toml of all nodes; a path that all of them see.",
)  # fmt: skip
@click.option("--state-dir", default="", help="Folder on a local disk of each node.")
@click.option("--srun-option", "srun_options", multiple=True, help="Slurm: passed on to srun.")
@click.option("--timeout-s", default=READY_S, show_default=True, help="Until all nodes are ready.")
@click.option("--foreground", is_flag=True, help="Stay; Ctrl-C or SIGTERM ends all.")
@json_option
def up(
    is_slurm: bool, ray_address: str | None, foreground: bool, as_json: bool, **options: Any
) -> None:
    """Start a daemon on every node, and the planner on the first, and say where they are.

    Returns once all are ready; they end with the job, with `msdctl down`, or with Ctrl-C where
    --foreground is given. Ranks find their node's daemon by themselves.
    """
    config = options.pop("config")
    made = LaunchOptions(config="" if config is None else str(config.resolve()), **options)
    launch = _launch(is_slurm, ray_address, made)
    with _sigterm_as_interrupt():
        notes = launch.up()
        try:
            _print(notes, as_json)
            if foreground:
                _stay(launch)
        except KeyboardInterrupt:
            say("ending: daemons drain first")
            launch.down()
            return
    launch.let_go()


@click.command(name="down", short_help="End what msdctl up started.")
@_places
@json_option
def down(is_slurm: bool, ray_address: str | None, as_json: bool, shared: str) -> None:
    """End the daemons and planners that `msdctl up` started here: daemons drain first."""
    launch = _launch(is_slurm, ray_address, LaunchOptions(shared=shared))
    notes = launch.notes()
    launch.down()
    if as_json:
        print_json("down", {"nodes": sorted(notes)})
    else:
        click.echo(f"{len(notes)} nodes ended")


def _launch(is_slurm: bool, ray_address: str | None, options: LaunchOptions) -> Launch:
    if is_slurm == bool(ray_address):
        raise click.UsageError("give either --slurm or --ray ADDRESS")
    if ray_address:
        from msd_daemon.launch.ray_launch import RayLaunch

        return RayLaunch(ray_address, options)
    from msd_daemon.launch.slurm_launch import SlurmLaunch

    return SlurmLaunch(options)


def _print(notes: Mapping[str, NodeNote], as_json: bool) -> None:
    if as_json:
        print_json("up", {"nodes": [encode_plain(note) for note in notes.values()]})
        return
    header = ("node", "state", "address", "planner", "socket")
    rows = [
        (note.node, note.state, note.address, note.planner, note.socket) for note in notes.values()
    ]
    click.echo(format_table(header, rows))


def _stay(launch: Launch) -> None:
    """Stay until the launch ends, which it should not do by itself.

    Raises:
        ResourceError: It did.
    """
    while not launch.has_ended():
        time.sleep(LOOK_S)
    failed = [note for note in launch.notes().values() if note.error]
    why = "; ".join(f"{note.node}: {note.error}" for note in failed) or "see the nodes' logs"
    raise ResourceError(f"the launch ended: {why}")


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Return a context in which SIGTERM ends us as Ctrl-C does."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
