"""What Ray keeps on each node: an object that has a node agent of its own as a child.

Ray places it, and makes it anew where its process dies; daemon and planner are ours, and so are
their wires. What nodes have to know of each other (public keys, the planner's endpoint) Ray carries
from one's folder to the others', which need not share a file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from typing import Any

from msd_client.contract.errors import ProtocolError
from msd_client.contract.paths import prepare_private_dir
from msd_client.contract.plain import decode_plain, encode_plain
from msd_daemon.launch.launch_plan import LaunchPlan, read_plan, write_plan
from msd_daemon.launch.meeting import KEYS, PLANNERS, Meeting
from msd_daemon.launch.node_place import runtime_dir

END_S = 45.0
LOG = "agent.log"
_NAME = re.compile(rf"(?:{KEYS}/[A-Za-z0-9._-]+\.pub|{PLANNERS}/[A-Za-z0-9._-]+\.json)")


class RayNode:
    """One node of a launch, inside an actor of Ray.

    Args:
        plan: Of the launch, in its plain form.
        node: This one's name.
    """

    def __init__(self, plan: dict[str, Any], node: str) -> None:
        self._node = node
        wanted = decode_plain(LaunchPlan, plan, "plan")
        folder = runtime_dir(os.environ, os.getuid())
        prepare_private_dir(folder, os.getuid())
        meeting = Meeting(folder / "meeting")
        if read_plan(meeting) != wanted:  # else Ray made us anew: all that is known still holds
            meeting.remove()
            meeting = Meeting(folder / "meeting")
            write_plan(meeting, wanted)
        self._meeting = meeting
        self.log = folder / LOG
        # Its standard input closes when this process dies, however it does: then the agent ends, its
        # daemon with it, and the one that Ray starts in our place begins again.
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                [
                    sys.executable, "-m", "msd_daemon.launch.node_agent",
                    "--meeting", str(meeting.path), "--node", node, "--end-with-stdin",
                ],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def published(self) -> dict[str, bytes]:
        """Return what this node has to tell the others, by name."""
        names = [f"{KEYS}/{name}" for name in self._meeting.names(KEYS)]
        names += [f"{PLANNERS}/{name}" for name in self._meeting.names(PLANNERS)]
        found = {name: self._meeting.read(name) for name in names}
        return {name: content for name, content in found.items() if content is not None}

    def take(self, files: dict[str, bytes]) -> None:
        """Publish here what others told.

        Raises:
            ProtocolError: A name is none of what nodes tell each other.
        """
        for name, content in files.items():
            if not _NAME.fullmatch(name):
                raise ProtocolError(f"{name!r} is nothing that nodes tell each other")
            if self._meeting.read(name) != content:
                self._meeting.publish(name, content)

    def note(self) -> dict[str, Any] | None:
        """Return how far the node is, in its plain form; None: it said nothing yet."""
        note = self._meeting.nodes().get(self._node)
        return None if note is None else dict(encode_plain(note))

    def trouble(self) -> str:
        """Return why the node will say nothing more; empty: it may."""
        status = self._agent.poll()
        return "" if status is None else f"its agent ended with status {status}, see {self.log}"

    def pid(self) -> int:
        """Return the process that Ray keeps."""
        return os.getpid()

    def stop(self) -> None:
        """End daemon and planner in order, and wait for it."""
        self._meeting.ask_to_stop()
        try:
            self._agent.wait(END_S)
        except subprocess.TimeoutExpired:
            self._close_stdin()
            self._agent.wait()
        self._close_stdin()
        self._meeting.remove()

    def _close_stdin(self) -> None:
        assert self._agent.stdin is not None
        with contextlib.suppress(OSError):
            self._agent.stdin.close()
