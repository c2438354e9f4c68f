"""A folder in which the nodes of a launch meet: what one publishes there the others read.

| file | holds |
|---|---|
| `keys/NAME.pub` | public key of a node or planner |
| `planners/NODE.json` | endpoint of the planner there |
| `nodes/NODE.json` | how far the node is |
| `launch.json` | the plan of the launch |
| `stop` | all shall end |

On a cluster it lies on a file system that all nodes see, so files are written beside and renamed:
whoever opens one reads all of it. Absence is looked up by listing the folder, since NFS answers for
a name that was not there from its cache for up to a minute, but asks anew when a folder is opened.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import decode_plain, encode_plain

FILE_BYTES_MAX = 64 << 10
KEYS, NODES, PLANNERS, STOP = "keys", "nodes", "planners", "stop"
PLAN_FILE = "launch.json"
PUBLISHED = (STOP, PLAN_FILE)
DIR_MODE = 0o700

NodeState = Literal["starting", "ready", "drained", "ended", "failed"]
"""`drained`: no daemon is there any more, a planner may be."""


@dataclass(frozen=True)
class NodeNote:
    """How far a node is."""

    node: str
    state: NodeState
    address: str = ""
    """By which other nodes reach it."""
    socket: str = ""
    """Of its daemon."""
    planner: str = ""
    """Endpoint of the planner there, if any."""
    error: str = ""
    """Why it failed."""
    starts: int = 0
    """How often its daemon was started."""


@dataclass(frozen=True)
class PlannerNote:
    """Where a planner listens."""

    endpoint: str


class Meeting:
    """The folder.

    Args:
        path: Of it; made, for its owner alone, where absent.

    Raises:
        ConfigError: It can't be made, or is another user's, or others may look into it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
            found = path.lstat()
            for name in (KEYS, NODES, PLANNERS):
                (path / name).mkdir(mode=DIR_MODE, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path} can't be made: {error.strerror}: give another folder that all nodes see "
                "(--shared)",
                path=str(path),
            ) from error
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"{path} belongs to uid {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}: "
                f"whom this folder lists is let in, so it has to be uid {os.geteuid()}'s with mode "
                "0700; remove it, or give another one (--shared)",
                path=str(path),
            )

    def publish(self, name: str, content: bytes) -> None:
        """Write a file whole: beside, then renamed.

        Raises:
            OSError: It can't be written.
        """
        target = self.path / name
        beside = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def names(self, folder: str) -> list[str]:
        """Return what is published in a folder, sorted; nothing where the folder is gone.

        Raises:
            OSError: The file system does not answer.
        """
        try:
            with os.scandir(self.path / folder) as entries:
                return sorted(entry.name for entry in entries if not entry.name.startswith("."))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # of NFS: removed by another node
                return []
            raise

    def read(self, name: str) -> bytes | None:
        """Return what a file holds; None where it is not there.

        Raises:
            ConfigError: It is larger than such files are.
        """
        try:
            with (self.path / name).open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(
                f"{self.path / name} is larger than {FILE_BYTES_MAX} bytes: remove it"
            )
        return content

    def ask_to_stop(self) -> None:
        """Tell all nodes to end."""
        self.publish(STOP, b"")

    @property
    def is_stopped(self) -> bool:
        """True once all nodes shall end, or the folder is gone."""
        names = self.names("")
        return STOP in names or NODES not in names

    @property
    def is_gone(self) -> bool:
        """True where the folder was removed."""
        return NODES not in self.names("")

    def write_node(self, note: NodeNote) -> None:
        """Publish how far a node is."""
        self.publish(f"{NODES}/{note.node}.json", _json(note))

    def write_planner(self, node: str, note: PlannerNote) -> None:
        """Publish where the planner of a node listens."""
        self.publish(f"{PLANNERS}/{node}.json", _json(note))

    def nodes(self) -> dict[str, NodeNote]:
        """Return what the nodes said of themselves, by name."""
        return self._notes(NODES, NodeNote)

    def planners(self) -> dict[str, PlannerNote]:
        """Return where planners listen, by node."""
        return self._notes(PLANNERS, PlannerNote)

    def _notes(self, folder: str, kind: type[Any]) -> dict[str, Any]:
        found = {}
        for name in self.names(folder):
            content = self.read(f"{folder}/{name}")
            if content is None:
                continue
            try:
                found[name.removesuffix(".json")] = decode_plain(kind, json.loads(content), name)
            except (ValueError, ConfigError) as error:
                raise ConfigError(f"{self.path / folder / name}: {error}: remove it") from error
        return found

    def remove(self) -> None:
        """Remove what is published here, and the folder where nothing else (a log) is in it."""
        for folder in (KEYS, NODES, PLANNERS):
            for name in self.names(folder):
                (self.path / folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in (KEYS, NODES, PLANNERS):
                (self.path / folder).rmdir()
            for name in PUBLISHED:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()


def _json(note: object) -> bytes:
    return json.dumps(encode_plain(note)).encode() + b"\n"
