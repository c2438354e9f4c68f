"""Root of a launched node: keeps its daemon, and the planner that may be here, until the launch ends.

Started once a node by srun, or by an actor of Ray. It makes this node's keys, meets the other nodes
in the launch's folder, starts what belongs here with what they published, and says how far it is.
SIGTERM, which at the end of a batch job comes to every process at once, lets the daemon drain, so
that ranks can still save; the planner goes last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from federation.addresses import Endpoint
from msd_client.contract.errors import ConfigError, DeadlineError, MsdError
from msd_client.contract.file_systems import NETWORK_FILE_SYSTEMS, file_system_of
from msd_client.contract.paths import (
    LAUNCHED,
    SOCKET_NAME,
    check_socket_path,
    prepare_private_dir,
)
from msd_daemon.launch.job_keys import JobKeys
from msd_daemon.launch.launch_plan import LaunchPlan, read_plan
from msd_daemon.launch.meeting import Meeting, NodeNote, NodeState, PlannerNote
from msd_daemon.launch.node_place import (
    child_environ,
    is_free,
    is_unlocked,
    node_address,
    runtime_dir,
    take_lock,
)
from msd_daemon.launch.supervised import Supervised

log = logging.getLogger("msd_daemon.launch")

LOOK_S = 0.25
SHARED_LOOK_S = 1.0
STOP_LOOK_S = 2.0
"""Between two looks into the folder that all nodes share: a thousand nodes ask one server there."""
LOCK_S = 60.0
"""Longest wait for an earlier agent of this node to end."""
MEET_S = 120.0
"""Longest wait for the other nodes: a node that waits longer has lost them."""
DRAIN_S = 28.0
"""The daemon's own grace is shorter; Slurm kills 30 s after its SIGTERM by default."""
ASK_S = 5.0
LIVING = ("starting", "ready")


class _Ended(Exception):  # noqa: N818 - no error
    """The launch is asked to end."""


class NodeAgent:
    """One node of a launch.

    Args:
        meeting: Where the nodes meet.
        plan: Of the launch.
        node: This one's name in it.
        ends_with_stdin: Whoever started us lives as long as standard input is open.

    Raises:
        ConfigError: The node is none of the plan's, or has no fitting folder.
    """

    def __init__(
        self, meeting: Meeting, plan: LaunchPlan, node: str, *, ends_with_stdin: bool = False
    ) -> None:
        if node not in plan.nodes:
            raise ConfigError(
                f"node {node!r} is none of this launch's: {', '.join(plan.nodes[:16])}"
            )
        self._meeting = meeting
        self._plan = plan
        self._node = node
        self._is_asked_to_end = False
        self._is_orphan = False
        self._drain_until = 0.0
        self._lock = -1
        self._stop_look_at = 0.0
        self._selector = selectors.DefaultSelector()
        if ends_with_stdin:
            self._selector.register(0, selectors.EVENT_READ, self._stdin_closed)
        self._dir = runtime_dir(os.environ, os.getuid())
        self._socket = self._dir / SOCKET_NAME
        self._state_dir = Path(plan.state_dir or self._dir / "state")
        self._address = ""
        self._keys: JobKeys | None = None
        self._planner: Supervised | None = None
        self._endpoint = ""
        self._daemon: Supervised | None = None
        self._note: NodeNote | None = None

    def run(self) -> int:
        """Live until the launch ends; return the exit code."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        self._selector.register(read_fd, selectors.EVENT_READ, lambda: os.read(read_fd, 64))
        code = 0
        state: NodeState = "ended"
        why = ""
        try:
            self._begin()
            self._until(lambda: False, "the end of the launch", None)
        except _Ended:
            pass
        except (MsdError, OSError) as error:
            why = error.message if isinstance(error, MsdError) else str(error)
            log.error("%s", why)
            state, code = "failed", getattr(error, "exit_code", 1)
        self._end()
        self._say(state, why)
        return code

    def _signalled(self, *_: object) -> None:
        self._is_asked_to_end = True

    def _stdin_closed(self) -> None:
        if not os.read(0, 4096):
            self._selector.unregister(0)
            self._is_orphan = self._is_asked_to_end = True

    # -- beginning ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        prepare_private_dir(self._dir, os.getuid())
        check_socket_path(self._socket)
        self._take_lock()
        self._prepare_state_dir()
        self._address = node_address(self._plan, self._node)
        (self._dir / LAUNCHED).write_text(f"{self._plan.name}\n{os.getpid()}\n")
        self._say("starting")
        if self._plan.has_keys:
            self._exchange_keys()
        if self._node in self._plan.planners:
            self._start_planner()
        self._until(
            lambda: set(self._plan.planners) <= set(self._meeting.planners()),
            lambda: f"the planner on {', '.join(self._plan.planners)}",
            MEET_S,
            SHARED_LOOK_S,
        )
        lock = self._dir / f"{SOCKET_NAME}.lock"
        self._until(lambda: is_unlocked(lock), f"an earlier daemon to leave {lock}", LOCK_S)
        self._daemon = self._made_daemon()
        self._until(self._answers, "this node's daemon to answer and to reach the planner", MEET_S)

    def _take_lock(self) -> None:
        """Wait for the agent before us, which Ray may have given up a moment ago."""
        self._lock = os.open(self._dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._until(lambda: take_lock(self._lock), f"another agent to leave {self._dir}", LOCK_S)

    def _prepare_state_dir(self) -> None:
        kind = file_system_of(self._state_dir)
        if kind in NETWORK_FILE_SYSTEMS:
            raise ConfigError(
                f"state folder {self._state_dir} of node {self._node} is on {kind}, a network file "
                "system, where SQLite's locks can't be trusted: give --state-dir on a local disk",
                path=str(self._state_dir),
                seen=kind,
            )
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _exchange_keys(self) -> None:
        own = [self._node]
        wanted = [self._plan.planner_name(node) for node in self._plan.planners]
        if self._node in self._plan.planners:
            own.append(self._plan.planner_name(self._node))
            wanted = self._plan.key_names()
        keys = JobKeys(self._dir / "keys", own, wanted)
        keys.publish(self._meeting)
        self._keys = keys
        self._until(
            lambda: not keys.missing(self._meeting),
            lambda: f"the keys of {', '.join(keys.missing(self._meeting)[:16])}",
            MEET_S,
            SHARED_LOOK_S,
        )

    def _start_planner(self) -> None:
        file = self._state_dir / "planner-endpoint"
        file.unlink(missing_ok=True)
        port = self._known_port()
        self._until(lambda: is_free(self._address, port), f"port {port} of {self._address}", LOCK_S)
        command = [
            sys.executable, "-m", "msd_daemon.planner_app",
            "--name", self._plan.planner_name(self._node),
            "--listen", Endpoint(self._address, port).zmq,
            "--state-dir", str(self._state_dir / "planner"),
            "--endpoint-file", str(file), "--end-with-stdin",
        ]  # fmt: skip
        if self._plan.store:
            command += ["--store", self._plan.store]
        if self._keys is not None:
            command += ["--keys-dir", str(self._keys.folder)]
        self._planner = Supervised("msd-planner", command, child_environ())
        self._until(file.exists, "this node's planner to listen", MEET_S)
        endpoint = file.read_text().strip()
        self._endpoint = endpoint
        self._meeting.write_planner(self._node, PlannerNote(endpoint))
        # Should it die, the next one has to be where the nodes look for it.
        command[command.index("--listen") + 1] = endpoint
        self._planner.command = command

    def _known_port(self) -> int:
        """Return the port that this node's planner had before this agent was started again."""
        note = self._meeting.planners().get(self._node)
        return 0 if note is None else int(note.endpoint.rpartition(":")[2])

    def _made_daemon(self) -> Supervised:
        known = self._meeting.planners()
        planners = []
        for node in self._plan.planners:
            name = f"{self._plan.planner_name(node)}@" if self._plan.has_keys else ""
            planners.append(f"{name}{known[node].endpoint}")
        command = [
            sys.executable, "-m", "msd_daemon", "--socket", str(self._socket),
            "--runtime-dir", str(self._dir), "--state-dir", str(self._state_dir),
            "--end-with-stdin",
        ]  # fmt: skip
        if self._plan.config:
            command += ["--config", self._plan.config]
        environ = child_environ() | {
            "MSD__FEDERATION__NODE": json.dumps(self._node),
            "MSD__FEDERATION__PLANNERS": json.dumps(planners),
            "MSD__FEDERATION__LISTEN": Endpoint(self._address, 0).zmq,
        }
        if self._keys is not None:
            environ["MSD__FEDERATION__KEYS_DIR"] = json.dumps(str(self._keys.folder))
        return Supervised("msd-daemon", command, environ)

    # -- living ------------------------------------------------------------------------------------

    def _until(
        self,
        is_done: Callable[[], bool],
        what: str | Callable[[], str],
        timeout_s: float | None,
        every_s: float = LOOK_S,
    ) -> None:
        """Keep the children running until a condition holds, which is looked at that often.

        Raises:
            _Ended: The launch ends before.
            DeadlineError: It does not come to hold.
            MsdError: A child can't be kept running.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_done():
            for key, _ in self._selector.select(every_s):
                key.data()
            if self._is_asked_to_end or self._is_stopped():
                raise _Ended
            if deadline is not None and time.monotonic() > deadline:
                missing = what if isinstance(what, str) else what()
                raise DeadlineError(
                    f"node {self._node} waited {timeout_s:g} s for {missing}: see their logs"
                )
            self._keep_running()

    def _is_stopped(self) -> bool:
        """Look now and then whether all shall end; a server that does not answer stops nobody."""
        now = time.monotonic()
        if now < self._stop_look_at:
            return False
        self._stop_look_at = now + STOP_LOOK_S
        try:
            return self._meeting.is_stopped
        except OSError as error:
            log.warning("%s does not answer: %s", self._meeting.path, error)
            return False

    def _keep_running(self) -> None:
        if self._planner is not None:
            self._planner.keep_running()
        if self._daemon is None:
            return
        was_ready = self._note is not None and self._note.state == "ready"
        if self._daemon.keep_running() and was_ready:
            self._say("starting")
        elif not was_ready and self._answers():
            self._say("ready")

    def _answers(self) -> bool:
        """True where the daemon answers and is at one with the planner."""
        from msd_client.control import request

        if self._daemon is None or self._daemon.has_ended:
            return False
        try:
            request(self._socket, {"verb": "cluster"}, timeout_s=ASK_S)
        except MsdError:
            return False
        return True

    def _say(self, state: NodeState, error: str = "") -> None:
        starts = 0 if self._daemon is None else self._daemon.starts
        note = NodeNote(
            self._node, state, self._address, str(self._socket), self._endpoint, error, starts
        )
        if note != self._note:
            log.info("node %s: %s%s", self._node, state, f": {error}" if error else "")
            try:
                if not self._meeting.is_gone:
                    self._meeting.write_node(note)
            except OSError as error:  # of no harm to what runs here
                log.warning("%s can't be written: %s", self._meeting.path, error)
        self._note = note

    # -- ending ------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._daemon is not None:
            if not self._is_orphan:
                self._drain(self._daemon)
            self._daemon.end(ASK_S)
        self._say("drained")
        if self._planner is not None:
            if not self._is_orphan:
                self._outlast()
            self._planner.end(ASK_S)
        (self._dir / LAUNCHED).unlink(missing_ok=True)
        if self._keys is not None and not self._is_orphan:  # the one after us goes on with them
            self._keys.remove()

    def _drain(self, daemon: Supervised) -> None:
        """Ask the daemon to drain, by message: the signal may have come to it already."""
        from msd_client.control import request

        try:
            request(self._socket, {"verb": "shutdown"}, timeout_s=ASK_S)
        except MsdError:
            return
        self._rest_until(lambda: daemon.has_ended)

    def _outlast(self) -> None:
        """Keep the planner until no node has a daemon."""
        with contextlib.suppress(OSError):
            self._rest_until(
                lambda: all(note.state not in LIVING for note in self._meeting.nodes().values()),
                SHARED_LOOK_S,
            )

    def _rest_until(self, is_done: Callable[[], bool], every_s: float = LOOK_S) -> None:
        """Wait while the launch ends."""
        self._drain_until = self._drain_until or time.monotonic() + DRAIN_S
        while not is_done() and not self._is_orphan and time.monotonic() < self._drain_until:
            for key, _ in self._selector.select(every_s):
                key.data()


def main(arguments: list[str] | None = None) -> int:
    """Run the agent of a node; return its exit code."""
    parser = argparse.ArgumentParser(prog="msd-node", description="a node that msdctl up started")
    parser.add_argument("--meeting", type=Path, required=True, help="folder where the nodes meet")
    parser.add_argument("--node", help="name; default: SLURMD_NODENAME")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when stdin closes")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        meeting = Meeting(options.meeting)
        plan = read_plan(meeting)
        if plan is None:
            raise ConfigError(f"{options.meeting} holds no launch: msdctl up makes it")
        node = options.node or os.environ.get("SLURMD_NODENAME", "")
        agent = NodeAgent(meeting, plan, node, ends_with_stdin=options.end_with_stdin)
    except MsdError as error:
        sys.stderr.write(f"msd-node: {error.message}\n")
        return error.exit_code
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
