"""torch's distributed checkpoint saves and loads a loader as it is, on another number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Node, run_ranks, text_job, write_job
from tests.support.sources import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.processes

# Ranks are forked from a process that imported torch once and did nothing with it.
RANKS = """
import hashlib, json, os, signal, sys
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import numpy as np
import msd_client
from msd_client.control import request
from msd_client.errors import DaemonUnavailableError

ask = json.loads(sys.argv[1])


def rank_main(rank):
    world = ask["world"]
    dist.init_process_group("gloo", init_method="file://" + ask["store"], rank=rank, world_size=world)
    rows = {}
    data = msd_client.connect(ask["job"], mesh={"dp": world}, rank=rank, daemon=ask["daemon"], as_="numpy")
    if ask["load"]:
        dcp.load({"data": data.train}, checkpoint_id=ask["load"])
    for step in data.train:
        rows[step.number] = [row.tobytes().hex() for mb in step for row in np.asarray(mb.tokens)]
        if len(rows) == ask["steps"]:
            break
    if ask["save"]:
        dcp.save({"data": data.train}, checkpoint_id=ask["save"])
    dist.barrier()
    if ask["kill"]:
        if rank == 0:
            os.kill(ask["kill"], signal.SIGKILL)
        try:
            while True:
                request(ask["daemon"], {"verb": "ping"})
        except DaemonUnavailableError:
            pass
        dcp.save({"data": data.train}, checkpoint_id=ask["save_after_death"])
    state = data.train.state_dict()["msd"]
    with open(ask["out"] + "." + str(rank), "w") as file:
        json.dump({"rows": rows, "state": state.hex()}, file)
    dist.barrier()
    data.close()
    dist.destroy_process_group()


pids = []
for rank in range(ask["world"]):
    pid = os.fork()
    if not pid:
        status = 1
        try:
            rank_main(rank)
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    pids.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
"""

Phase = Callable[..., tuple[dict[int, list[bytes]], bytes]]


@pytest.fixture
def phase(tmp_path: Path) -> Iterator[Phase]:
    """Run so many ranks for some steps; return each step's rows of all ranks, and the state."""
    numbers = iter(range(10))

    def run(node: Node, job: Path, world: int, steps: int, **options: Any) -> Any:
        number = next(numbers)
        ask = {
            "world": world, "steps": steps, "job": str(job), "daemon": str(node.socket),
            "store": str(tmp_path / f"store{number}"), "out": str(tmp_path / f"out{number}"),
            "load": "", "save": "", "kill": 0, **options,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RANKS, json.dumps(ask)],
            cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:] + node.log[-2000:]
        parts = [json.loads(Path(f"{ask['out']}.{rank}").read_text()) for rank in range(world)]
        assert len({part["state"] for part in parts}) == 1
        rows = {
            int(step): sorted(bytes.fromhex(row) for part in parts for row in part["rows"][step])
            for step in parts[0]["rows"]
        }
        return rows, bytes.fromhex(parts[0]["state"])

    yield run


def test_a_checkpoint_of_four_ranks_is_loaded_by_two_and_by_eight(
    start_node: Any, tmp_path: Path, phase: Phase
) -> None:
    """One is saved while the daemon lives, one after its death; a new daemon continues both."""
    node = start_node(folder=tmp_path / "n")
    job = write_job(tmp_path / "small.yaml", text_job(tmp_path))
    (oracle,) = run_ranks(node, job, {"dp": 1}, 14, keep_states=True)
    wanted = {step: sorted(rows) for step, rows in oracle.rows.items()}
    alive, dead = str(tmp_path / "alive"), str(tmp_path / "dead")
    rows, state = phase(node, job, 4, 5, save=alive, kill=node.process.pid, save_after_death=dead)
    assert rows == {step: wanted[step] for step in range(5)}
    assert state == oracle.states[5]["msd"]
    node.process.wait(10)
    second = start_node(folder=tmp_path / "n")
    for world, steps, saved in ((2, 3, dead), (8, 9, alive)):
        rows, state = phase(second, job, world, steps, load=saved)
        assert rows == {step: wanted[step] for step in range(5, 5 + steps)}
        assert state == oracle.states[5 + steps]["msd"]
