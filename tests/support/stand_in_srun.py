"""srun for tests: starts a command once per task, all on this machine, with what Slurm sets.

Each task has its node's name in SLURMD_NODENAME, and is killed when this process ends. An option
that srun has not is refused, so a mistaken one is found without Slurm. MSD_TEST_LOST_NODE names a
node that starts nothing; MSD_TEST_HOSTS a file with the command, by node, that executes another
one on that host.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from msd_daemon.launch.hostlist import expand_hostlist

KNOWN = (
    "cpu-bind", "cpus-per-task", "export", "input", "job-name", "kill-on-bad-exit", "mem", "mpi",
    "nodes", "ntasks", "ntasks-per-node", "output",
)  # fmt: skip


def parsed(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for name in KNOWN:
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    found = vars(parser.parse_args(arguments))
    command = found.pop("command")
    return found, command


def die_with_us() -> None:
    """As slurmstepd ends the tasks of a srun that is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    options, command = parsed(sys.argv[1:])
    nodes = expand_hostlist(os.environ["SLURM_JOB_NODELIST"])
    for name in os.environ:
        if name.startswith("SLURM_MEM_PER_CPU") and options["mem"]:
            sys.exit("srun: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive")
    per_node = int(options["ntasks_per_node"] or os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    count = per_node * len(nodes)
    lost = os.environ.get("MSD_TEST_LOST_NODE")
    hosts = json.loads(Path(os.environ["MSD_TEST_HOSTS"]).read_text())
    tasks = []
    for rank in range(count):
        node = nodes[rank // per_node]
        if node == lost:
            continue
        output = options["output"].replace("%N", node)
        with open(output, "ab") if output else os.fdopen(os.dup(1), "ab") as out:
            tasks.append(
                subprocess.Popen(
                    [*hosts.get(node, ()), *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, preexec_fn=die_with_us,  # noqa: PLW1509 - one thread
                    env={
                        **os.environ,
                        "SLURMD_NODENAME": node,
                        "SLURM_PROCID": str(rank),
                        "SLURM_LOCALID": str(rank % per_node),
                        "SLURM_NODEID": str(rank // per_node),
                        "SLURM_NTASKS": str(count),
                        "SLURM_STEP_NUM_TASKS": str(count),
                        "SLURM_STEP_ID": str(os.getpid()),
                    },
                )
            )  # fmt: skip

    def forward(number: int, _: object) -> None:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    return max((abs(task.wait()) for task in tasks), default=0)


if __name__ == "__main__":
    sys.exit(main())
