"""Who am I: mesh axes, rank and run, from arguments, a torch DeviceMesh, or the launcher's environment.

Order: explicit arguments, `MSD_*`, the launcher's variables (`launcher.py`), a single process.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsIndex

from msd_client.contract.errors import MeshMismatchError
from msd_client.launcher import Launch, find_launch, find_run

DP_AXES = ("dp", "dp_replicate", "dp_shard")
"""Axes along which ranks read different rows."""


class Place(NamedTuple):
    """This process among the trainer's ranks."""

    axes: tuple[tuple[str, int], ...]
    """Mesh axes in order with their sizes; ranks count row-major, the last axis fastest."""
    rank: int
    run: str
    """Launcher's run id: ranks of one run join one session."""


def find_place(
    mesh: Mapping[str, int] | Any | None,
    rank: int | str | None,
    environ: Mapping[str, str] = os.environ,
) -> Place:
    """Return the place of this process.

    Args:
        mesh: `{"dp": 2, "tp": 2}` in axis order, a torch `DeviceMesh` with named dimensions, or
            None for one `dp` axis over the launcher's world.
        rank: Global rank, also as a launcher's text; None takes the launcher's.
        environ: The environment.

    Raises:
        MeshMismatchError: Sizes are not positive, the rank is none or outside, the launcher's world
            differs from the mesh, or one of its variables is no number.
    """
    if mesh is not None and rank is not None:  # RANK may be anybody's word for anything
        launch = Launch("", None, None, find_run(environ))
    else:
        launch = find_launch(environ)
    world = launch.world
    found_rank = _given_rank(rank) if rank is not None else launch.rank
    axes = _axes(mesh) if mesh is not None else (("dp", world or 1),)
    for name, size in axes:
        if size < 1:
            raise MeshMismatchError(f"mesh axis {name} has size {size}: sizes start at 1")
    ranks = 1
    for _, size in axes:
        ranks *= size
    if found_rank is None:
        if ranks > 1:
            raise MeshMismatchError(
                f"mesh {_text(axes)} has {ranks} ranks and this process does not know its own: pass "
                "rank=, or start it by torchrun, srun or mpirun"
            )
        found_rank = 0
    if rank is None and world is not None and world != ranks:
        raise MeshMismatchError(
            f"mesh {_text(axes)} has {ranks} ranks, {_started(launch)}: make them equal",
            mesh_ranks=ranks,
            world=world,
        )
    if not 0 <= found_rank < ranks:
        raise MeshMismatchError(
            f"rank {found_rank} is outside mesh {_text(axes)} of {ranks} ranks",
            rank=found_rank,
            mesh_ranks=ranks,
        )
    return Place(axes, found_rank, launch.run)


def dp_peers(mesh: Mapping[str, int] | Any) -> list[list[int]]:
    """Return the groups of ranks that differ along the dp axes alone, each by its dp group's number.

    They exchange embeddings where media may be encoded anywhere. Every rank is in one of them:
    `group, _ = torch.distributed.new_subgroups_by_enumeration(dp_peers(mesh))`.

    Args:
        mesh: As `connect` takes it.

    Raises:
        MeshMismatchError: See `find_place`.
    """
    axes = _axes(mesh)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, places in enumerate(itertools.product(*(range(size) for _, size in axes))):
        others = (
            place for (name, _), place in zip(axes, places, strict=True) if name not in DP_AXES
        )
        groups.setdefault(tuple(others), []).append(rank)
    return list(groups.values())


def _given_rank(rank: object) -> int:
    if isinstance(rank, str) and rank.isascii() and rank.isdecimal():
        return int(rank)
    if isinstance(rank, (str, bool)) or not isinstance(rank, SupportsIndex):
        raise MeshMismatchError(
            f"rank is {rank!r}: write a whole number, like rank=0 or rank=int(os.environ['RANK'])"
        )
    return operator.index(rank)


def _axes(mesh: Any) -> tuple[tuple[str, int], ...]:
    if isinstance(mesh, Mapping):
        for name, size in mesh.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise MeshMismatchError(f"mesh axis {name} has size {size!r}: write an integer")
        return tuple((str(name), size) for name, size in mesh.items())
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        raise MeshMismatchError(
            f"mesh of type {type(mesh).__name__} has no mesh_dim_names: pass a dict like "
            '{"dp": 2, "tp": 2}, or a DeviceMesh with named dimensions'
        )
    sizes = tuple(int(size) for size in mesh.mesh.shape)
    return tuple(zip(map(str, names), sizes, strict=True))


def _started(launch: Launch) -> str:
    return f"the launcher ({launch.launcher}) started {launch.world}"


def _text(axes: tuple[tuple[str, int], ...]) -> str:
    return " x ".join(f"{name} {size}" for name, size in axes)
