"""What started this process, and as which rank of how many, from the launcher's environment.

| launcher | rank, world | run |
|---|---|---|
| torchrun | RANK, WORLD_SIZE | TORCHELASTIC_RUN_ID and restarts |
| Open MPI, MVAPICH, MPICH | OMPI_COMM_WORLD_*, MV2_COMM_WORLD_*, PMI_* | the launch's id, if any |
| Slurm | SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS | job, restarts and step |

The first that is there counts, and all of its values do: a rank of one launcher and a world of
another fit by accident only. MSD_RANK, MSD_WORLD_SIZE and MSD_RUN_ID are each stronger than any.
mpirun and mpiexec stand before Slurm, since they start their helpers by srun: below them Slurm's
variables are those of the helper, one a node. Where srun itself gives MPI's variables, both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msd_client.contract.errors import MeshMismatchError

NUMBER_DIGITS_MAX = 9
"""Of a rank; more is no rank of any machine, and int() of very long text is slow."""
NO_RUN_ID = "none"
"""What torchrun calls a run that was given no id."""


class _Names(NamedTuple):
    """Variables of a launcher."""

    launcher: str
    rank: str
    worlds: tuple[str, ...]
    """The first that is there counts."""


_LAUNCHERS = (
    _Names("torchrun", "RANK", ("WORLD_SIZE",)),
    _Names("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    _Names("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
    _Names("MPI", "PMI_RANK", ("PMI_SIZE",)),
    _Names("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
_OWN = _Names("MSD_RANK and MSD_WORLD_SIZE", "MSD_RANK", ("MSD_WORLD_SIZE",))
_MPI_RUNS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


class Launch(NamedTuple):
    """How this process was started."""

    launcher: str
    """For people; empty: by none that is known."""
    rank: int | None
    """None: the launcher does not say."""
    world: int | None
    """Ranks that it started; None: it does not say."""
    run: str
    """See `find_run`."""


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Return what the environment says of this process.

    Raises:
        MeshMismatchError: A variable that counts is no whole number, or the rank is not below the
            world; the variable is named.
    """
    found_by = _found_by(environ)
    rank_key = _OWN.rank if environ.get(_OWN.rank) else found_by.rank
    worlds = (*_OWN.worlds, *found_by.worlds)
    world_key = next((key for key in worlds if environ.get(key)), "")
    rank, world = _number(environ, rank_key), _number(environ, world_key)
    if world == 0:
        raise MeshMismatchError(f"{world_key} is 0: a launch has one rank at least")
    if rank is not None and world is not None and rank >= world:
        raise MeshMismatchError(
            f"{rank_key} is {rank} and {world_key} is {world}: ranks count from 0 to {world - 1}",
            rank=rank,
            world=world,
        )
    is_own = rank_key == _OWN.rank or world_key in _OWN.worlds
    launcher = _OWN.launcher if is_own else found_by.launcher
    return Launch(launcher, rank, world, find_run(environ))


def find_run(environ: Mapping[str, str]) -> str:
    """Return the run's id: one for all its ranks, another after a restart; empty: unknown."""
    launcher = _found_by(environ).launcher
    own = environ.get("MSD_RUN_ID")
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    if own:
        return f"{own}.{restarts}"
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    if elastic and elastic != NO_RUN_ID:
        return f"{elastic}.{restarts}"
    launch = next((environ[key] for key in _MPI_RUNS if environ.get(key)), "")
    if launch and launcher in ("Open MPI", "MPI"):
        return launch
    job = environ.get("SLURM_JOB_ID")
    if job:
        # A job that is queued again keeps its number. The step is told apart where srun started the
        # ranks; torchrun may be started by a step on each node.
        parts = [job, environ.get("SLURM_RESTART_COUNT") or "0"]
        parts.append(environ.get("SLURM_STEP_ID", "") if launcher == "Slurm" else restarts)
        return ".".join(filter(None, parts))
    address = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return ":".join(map(str, address)) if all(address) else ""


def _found_by(environ: Mapping[str, str]) -> _Names:
    return next((names for names in _LAUNCHERS if _is_there(environ, names)), _Names("", "", ()))


def _is_there(environ: Mapping[str, str], names: _Names) -> bool:
    # A shell of salloc has SLURM_NTASKS and is no rank; torchrun's world alone is a user's who
    # starts processes of his own and gives connect(rank=).
    keys = (names.rank, *names.worlds) if names.launcher == "torchrun" else (names.rank,)
    return any(environ.get(key) for key in keys)


def _number(environ: Mapping[str, str], key: str) -> int | None:
    text = environ.get(key) if key else None
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > NUMBER_DIGITS_MAX:
        raise MeshMismatchError(
            f"{key} is {text[:80]!r}: a launcher sets a whole number; unset it, or write one"
        )
    return int(text)
