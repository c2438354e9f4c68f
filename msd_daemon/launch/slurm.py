"""`msdctl up --slurm`: a node agent on every node of the allocation, by one srun. No root, no scontrol."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msd_client.contract.errors import ConfigError
from msd_daemon.launch.hostlist import expand_hostlist

SRUN_LOG = "srun.log"
_SET_FOR_RANKS = (
    "SLURM_CPU_BIND", "SLURM_CPUS_PER", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_EXCLUSIVE",
    "SLURM_EXPORT_ENV", "SLURM_GPU", "SLURM_GRES", "SLURM_HINT", "SLURM_MEM_", "SLURM_NPROCS", "SLURM_NTASKS",
    "SLURM_OPEN_MODE", "SLURM_STEP_", "SLURM_TASKS_PER_NODE", "SLURM_THREADS_PER_CORE",
    "SLURM_TRES", "SRUN_",
)  # fmt: skip
"""Prefixes of variables that srun takes options from: they are the ranks' step's, and some of them
contradict what is asked for here (srun ends where both memory a CPU and memory a node are set)."""


@dataclass(frozen=True)
class Allocation:
    """The Slurm job that this process is in."""

    job: str
    restarts: str
    nodes: list[str]

    @property
    def name(self) -> str:
        """Of a launch in it; a job that is queued again gets another one."""
        return f"slurm-{self.job}.{self.restarts}"


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the allocation.

    Raises:
        ConfigError: There is none, or one of several components.
    """
    job = environ.get("SLURM_JOB_ID", "")
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if not job or not nodes:
        raise ConfigError(
            "msdctl up --slurm runs inside an allocation, and SLURM_JOB_ID or SLURM_JOB_NODELIST is not "
            "set: call it in a batch script (sbatch), or in the shell of salloc"
        )
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
        raise ConfigError(
            f"job {job} has {environ['SLURM_HET_SIZE']} heterogeneous components, and one srun reaches the "
            "nodes of one alone: ask for a plain allocation"
        )
    return Allocation(job, environ.get("SLURM_RESTART_COUNT") or "0", expand_hostlist(nodes))


def srun_command(allocation: Allocation, meeting: Path, options: Sequence[str]) -> list[str]:
    """Return the command that starts the agents: one task a node, beside the ranks' own step."""
    count = len(allocation.nodes)
    return [
        "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap",
        "--cpu-bind=none", "--mem=0", "--mpi=none", "--kill-on-bad-exit=0", "--input=none",
        "--export=ALL",
        "--job-name=msd", f"--output={meeting}/%N.log", *options,
        sys.executable, "-m", "msd_daemon.launch.node_agent", "--meeting", str(meeting),
    ]  # fmt: skip


def srun_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun: what the script asked for its ranks is none of this step's."""
    return {key: value for key, value in environ.items() if not key.startswith(_SET_FOR_RANKS)}


def start_srun(
    allocation: Allocation, meeting: Path, options: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the step; it lives until the launch or the job ends, not as long as this process.

    Raises:
        ConfigError: There is no srun.
    """
    with (meeting / SRUN_LOG).open("ab") as log:
        try:
            return subprocess.Popen(
                srun_command(allocation, meeting, options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=srun_environ(os.environ),
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise ConfigError(
                "srun is not on PATH: call msdctl up --slurm where Slurm's commands are, outside a "
                "container that lacks them"
            ) from error
