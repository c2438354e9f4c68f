"""A trainer on Ray: a rank on each node by turns; where one fails all begin again from the last state.

Run as `python -m tests.support.ray_trainer ADDRESS RANKS MODULE ARGUMENT...`: each rank runs the
module in a process below its actor, so it has what Ray sets and no more.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.support.sources import ROOT

ATTEMPTS = 4


class Rank:
    """One rank."""

    def run(self, command: list[str], environ: dict[str, str]) -> tuple[int, str]:
        """Run to the end; return status and the end of what it said."""
        import os

        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


def attempt(number: int, ranks: int, arguments: list[str], environ: dict[str, str]) -> bool:
    """Run all ranks once; tell whether all came to the end."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    actors: list[Any] = []
    calls = []
    for rank in range(ranks):
        place = NodeAffinitySchedulingStrategy(nodes[rank * len(nodes) // ranks], soft=False)
        actor = ray.remote(Rank).options(num_cpus=1, scheduling_strategy=place).remote()
        own = {
            "MSD_RANK": str(rank), "MSD_WORLD_SIZE": str(ranks), "MSD_RUN_ID": f"run-{number}",
            "RANK": str(rank), "WORLD_SIZE": str(ranks),
        }  # fmt: skip
        actors.append(actor)
        calls.append(actor.run.remote([sys.executable, "-m", *arguments], own | environ))
    is_good = True
    while calls and is_good:
        (done,), calls = ray.wait(calls, num_returns=1)
        status, said = ray.get(done)
        print(f"attempt {number}: a rank ended with {status}\n{said}", flush=True)
        is_good = status == 0
    for actor in actors:
        ray.kill(actor)  # its child with it
    return is_good


def main() -> int:
    address, ranks, *arguments = sys.argv[1:]
    ray.init(address, log_to_driver=False, logging_level="warning")
    environ = {"GLOO_SOCKET_IFNAME": "lo"}
    for number in range(ATTEMPTS):
        given = [word.replace("ATTEMPT", str(number)) for word in arguments]
        if attempt(number, int(ranks), given, environ):
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
