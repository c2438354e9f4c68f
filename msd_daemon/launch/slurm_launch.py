"""The life of a launch under Slurm: up, found again, down."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from msd_client.contract.errors import ConfigError, DeadlineError, MsdError, NotFoundError
from msd_daemon.launch.launch_options import LaunchOptions
from msd_daemon.launch.launch_plan import LaunchPlan, elect_planners, read_plan, write_plan
from msd_daemon.launch.meeting import Meeting, NodeNote
from msd_daemon.launch.slurm import SRUN_LOG, Allocation, find_allocation, start_srun
from msd_daemon.launch.waiting import wait_over, wait_ready

END_S = 60.0
TAIL_LINES = 8
OVER = ("ended", "failed")


class SlurmLaunch:
    """A launch in this process's allocation.

    Args:
        options: What the user asked for.
        environ: The environment.

    Raises:
        ConfigError: There is no allocation, or no folder that nodes can share.
    """

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str] = os.environ) -> None:
        self._options = options
        self.allocation: Allocation = find_allocation(environ)
        self._folder = shared_folder(options.shared, environ) / self.allocation.name
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """Where the nodes meet and their logs are."""
        return self._folder

    def up(self) -> Mapping[str, NodeNote]:
        """Start a daemon on every node, and return what they say once all are ready.

        Raises:
            ConfigError: The launch runs already, or can't be as it was asked for.
            ResourceError: A node failed; all are ended again.
            DeadlineError: Some node is not ready in time; all are ended again.
        """
        nodes, options = self.allocation.nodes, self._options
        plan = LaunchPlan(
            launcher="slurm",
            name=self.allocation.name,
            nodes=nodes,
            planners=elect_planners(nodes, options.planners, options.store),
            has_keys=len(nodes) > 1,
            interface=options.interface,
            store=options.store,
            config=options.config,
            state_dir=options.state_dir,
        )
        meeting = Meeting(self._folder)
        if read_plan(meeting) is not None:
            raise ConfigError(
                f"{self._folder} holds a launch of this job already: msdctl down ends it, then up again"
            )
        write_plan(meeting, plan)
        process = self._process = start_srun(self.allocation, self._folder, options.srun_options)

        def trouble() -> str:
            status = process.poll()
            return "" if status is None else f"srun ended with status {status}{self._tail()}"

        try:
            return wait_ready(
                meeting.nodes, nodes, trouble, options.timeout_s, f"logs: {self._folder}/NODE.log"
            )
        except (MsdError, KeyboardInterrupt):
            self.down()
            raise

    def notes(self) -> Mapping[str, NodeNote]:
        """Return what the nodes say of themselves."""
        return Meeting(self._folder).nodes()

    def has_ended(self) -> bool:
        """True where the step that was started here is over."""
        return self._process is None or self._process.poll() is not None

    def down(self) -> None:
        """End the launch: daemons drain, the planner goes last. What is left in the folder is logs.

        Raises:
            NotFoundError: There is no launch.
            DeadlineError: Some node does not end; they are named.
        """
        if not self._folder.is_dir() or read_plan(meeting := Meeting(self._folder)) is None:
            raise NotFoundError(f"{self._folder} holds no launch: msdctl up --slurm starts one")
        meeting.ask_to_stop()

        def is_over() -> bool:
            if self._process is not None:  # a node that died said nothing any more
                return self._process.poll() is not None
            return all(note.state in OVER for note in meeting.nodes().values())

        if not wait_over(is_over, END_S):
            living = [note.node for note in meeting.nodes().values() if note.state not in OVER]
            raise DeadlineError(
                f"nodes {', '.join(living)} do not end in {END_S:g} s: see their logs in "
                f"{self._folder}, or end their step by scancel"
            )
        meeting.remove()

    def let_go(self) -> None:
        """Leave the step running when this process ends."""
        if self._process is not None:
            self._process.returncode = 0  # nobody waits for it here: no ResourceWarning

    def _tail(self) -> str:
        try:
            text = (self._folder / SRUN_LOG).read_text(errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)


def shared_folder(given: str, environ: Mapping[str, str]) -> Path:
    """Return the folder that all nodes see: the one that was given, else `~/.msd`.

    Raises:
        ConfigError: None is known, or it is not absolute.
    """
    if given:
        path = Path(given)
        if not path.is_absolute():
            raise ConfigError(f"--shared {given}: nodes need an absolute path: begin it with /")
    elif environ.get("HOME", "").startswith("/"):
        path = Path(environ["HOME"]) / ".msd"
    else:
        raise ConfigError("no HOME: give a folder that all nodes see (--shared DIR)")
    if "%" in str(path):
        raise ConfigError(f"{path}: srun takes % in a path for a pattern: give another (--shared)")
    return path
