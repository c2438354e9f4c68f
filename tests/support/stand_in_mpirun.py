"""mpirun in an allocation, for tests: a helper a node by srun, and the ranks below those.

As Open MPI does it: the helper on a node is srun's task, so a rank there inherits SLURM_PROCID and
SLURM_NTASKS of its helper, and has variables of mpirun beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys


def helper(per_node: int, name: str, command: list[str]) -> int:
    """Be the helper of a node: start its ranks, and end as they do."""
    node, nodes = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    ranks = []
    for local in range(per_node):
        rank = node * per_node + local
        own = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(nodes * per_node),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "PMIX_NAMESPACE": name,
        }
        ranks.append(subprocess.Popen(command, env=os.environ | own))
    return max(rank.wait() for rank in ranks)


def main() -> int:
    """Start the helpers in our place."""
    if sys.argv[1] == "helper":
        return helper(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    per_node = sys.argv[1].rpartition("=")[2]
    again = [sys.executable, "-m", "tests.support.stand_in_mpirun", "helper", per_node]
    name = f"prterun-n01-{os.getpid()}@1"
    return os.execvp("srun", ["srun", "--ntasks-per-node=1", *again, name, *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
