"""A Slurm allocation for tests: what sbatch would set, and a srun that starts all tasks here."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.node import is_over, wait_until
from tests.support.sources import ROOT

STEPS = 20


@dataclass
class Allocation:
    """An allocation; everything in it ends with it."""

    folder: Path
    environ: dict[str, str]
    job: str

    @property
    def shared(self) -> Path:
        """Where its nodes meet."""
        return self.folder / ".msd" / f"slurm-{self.job}.0"

    def msdctl(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "msd_client.msdctl.main", *arguments],
            cwd=ROOT, env=self.environ | environ, capture_output=True, text=True, timeout=100,
            check=False,
        )  # fmt: skip

    def up(self, *arguments: str, interface: str = "lo") -> dict[str, dict[str, Any]]:
        """Start a daemon a node; return the nodes by name."""
        done = self.msdctl("up", "--slurm", "--interface", interface, "--json", *arguments)
        assert done.returncode == 0, done.stderr + self.logs()
        return {node["node"]: node for node in json.loads(done.stdout)["nodes"]}

    def start(self, *command: str, log: str = "job.log") -> subprocess.Popen[bytes]:
        """Start a command of the batch script."""
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environ, stdout=out, stderr=out, start_new_session=True
            )

    def start_ranks(
        self, job: dict[str, Any], a_node: int, *more: str, by: str = "srun"
    ) -> subprocess.Popen[bytes]:
        """Start ranks by srun or mpirun; they are told nothing but the job."""
        path = self.folder / "job.json"
        path.write_text(json.dumps(job))
        ranks = ("-m", "tests.support.launched_rank", str(path), str(self.folder), str(STEPS))
        return self.start(
            by, f"--ntasks-per-node={a_node}", sys.executable, *ranks, *more, log="ranks.log"
        )

    def rows(self, ranks: int) -> tuple[dict[int, list[str]], set[str]]:
        """Return the rows of each step, of the last time that a rank read it; and the runs."""
        found: dict[int, dict[int, list[str]]] = {}
        runs = set()
        for rank in range(ranks):
            for text in (self.folder / f"rank-{rank}.jsonl").read_text().splitlines():
                line = json.loads(text)
                found.setdefault(line["step"], {})[rank] = line["rows"]
                runs.add(line["run"])
        assert all(sorted(by_rank) == list(range(ranks)) for by_rank in found.values())
        return {step: sorted(itertools.chain(*by.values())) for step, by in found.items()}, runs

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the job."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_JOB_ID") == self.job and not is_over(process):
                    found.append(process)
        return found

    def process(self, *words: str) -> psutil.Process:
        """Return the one process with all of these words in its command line."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                # The daemon's children have its command line, too.
                parent = process.parent()
                is_child = parent is not None and " ".join(parent.cmdline()) == line
                if all(word in line for word in words) and not is_child:
                    found.append(process)
        assert len(found) == 1, (words, found, self.logs())
        return found[0]

    def logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.folder.glob(".msd/*/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-2500:]}" for path in paths)


@contextlib.contextmanager
def allocation(
    folder: Path, nodes: str = "n[01-02]", hosts: Mapping[str, Sequence[str]] | None = None
) -> Iterator[Allocation]:
    """Be a batch script in an allocation of nodes; at the end kill what is left, as Slurm does.

    Args:
        folder: The user's home, which all nodes see.
        nodes: As Slurm lists them.
        hosts: By node: what executes a command there; None: all are this machine.
    """
    prefixes = folder / "hosts.json"
    prefixes.write_text(json.dumps(dict(hosts or {})))
    commands = folder / "commands"
    commands.mkdir()
    for name in ("srun", "mpirun"):
        command = commands / name
        module = f"tests.support.stand_in_{name}"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    local = Path(tempfile.mkdtemp(prefix="msd-t", dir="/tmp"))  # sockets need short paths
    job = f"{os.getpid()}{folder.stat().st_ino}"
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "MSD_", "RANK", "WORLD_SIZE"))
    }
    environ = kept | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "MSD_TEST_HOSTS": str(prefixes),
        "SLURM_TMPDIR": str(local),
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_MEM_PER_CPU": "1000",
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "0",
        "SLURMD_NODENAME": "n01",
        "MSD__MEMORY__MEMORY_BYTES": "512Mi",
        "MSD__WORKERS__LOADER_WORKERS": "1",
        "MSD__DEADLINES__RESTART_GRACE_S": "0",
    }
    made = Allocation(folder, environ, job)
    try:
        yield made
    finally:
        left = made.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: all(map(is_over, left)), f"{left} to end")
        shutil.rmtree(local)
