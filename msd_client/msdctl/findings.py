"""Checks of `msdctl doctor`: each looks at one thing of this machine and names the remedy.

Standard library only. A check never raises for what it finds, it returns a finding.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from msd_client.contract.errors import MsdError
from msd_client.contract.file_systems import NETWORK_FILE_SYSTEMS, file_system_of
from msd_client.contract.paths import (
    check_private_dir,
    check_socket_path,
    default_socket_path,
    default_state_dir,
)
from msd_client.machine_memory import cgroup_limit_bytes, ram_bytes, usable_memory_bytes

Level = Literal["ok", "warn", "fail"]

MIB = 1 << 20
SHM_DIR = "/dev/shm"  # noqa: S108 - the system's own mount
CONTAINER_SHM_BYTES = 64 * MIB
"""What container engines give /dev/shm unless told otherwise."""
SHM_BYTES_WANTED = 1 << 30
SMALL_MEMORY_BYTES = 2 << 30
FILES_WANTED = 4096
MEMLOCK_BYTES_WANTED = 256 * MIB

DAEMON_PACKAGES = (
    "pyzmq",
    "uvloop",
    "psutil",
    "pydantic",
    "PyYAML",
    "pyarrow",
    "zstandard",
    "tokenizers",
    "tiktoken",
    "click",
)


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do where it is not well."""

    name: str
    level: Level
    value: str
    remedy: str = ""

    def as_map(self) -> dict[str, str]:
        """Return the finding for JSON."""
        return asdict(self)


def find_all(socket_path: Path | None = None) -> list[Finding]:
    """Return the findings of all checks, in a fixed order.

    Args:
        socket_path: Of the daemon; None: this user's.
    """
    checks = [*CHECKS, lambda: check_socket(socket_path), check_state_dir, check_leftovers]
    return [finding for check in checks for finding in check()]


def check_python() -> Iterator[Finding]:
    """Check the interpreter's version and that asserts are on."""
    version = platform.python_version()
    if not __debug__:
        yield Finding("python", "fail", f"{version} -O", "start without -O: asserts stay on in msd")
    else:
        yield Finding("python", "ok", version)


def check_packages() -> Iterator[Finding]:
    """List the versions of msd and its libraries."""
    version = _version("msd")
    if version is None:
        yield Finding(
            "msd", "warn", "not installed, run from its source tree", "pip install 'msd[daemon]'"
        )
    else:
        yield Finding("msd", "ok", version)
    yield Finding(
        "trainer's side", "ok", f"numpy {_version('numpy')} msgpack {_version('msgpack')}"
    )
    missing = [name for name in DAEMON_PACKAGES if not _version(name)]
    present = " ".join(f"{name} {_version(name)}" for name in DAEMON_PACKAGES if _version(name))
    if missing:
        yield Finding(
            "daemon extra",
            "warn",
            f"missing {', '.join(missing)}",
            "where this node runs msd-daemon: pip install 'msd[daemon]'",
        )
    else:
        yield Finding("daemon extra", "ok", present)
    torch = _version("torch")
    yield Finding("torch", "ok", torch or "absent: batches are numpy arrays")


def check_shared_memory() -> Iterator[Finding]:
    """Check the size of /dev/shm; containers give 64 MiB."""
    try:
        found = os.statvfs(SHM_DIR)
    except OSError as error:
        yield Finding(
            "shared memory",
            "warn",
            f"{SHM_DIR}: {error.strerror}",
            "memory.segment = auto or memfd works without it; else mount a tmpfs there",
        )
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    value = f"{SHM_DIR} {size // MIB} MiB, {free // MIB} MiB free"
    if free >= SHM_BYTES_WANTED:
        yield Finding("shared memory", "ok", value)
        return
    mib = CONTAINER_SHM_BYTES // MIB
    hint = f"{mib} MiB is the container default, " if free <= CONTAINER_SHM_BYTES else ""
    yield Finding(
        "shared memory",
        "warn",
        value,
        f"{hint}small for rings: segment = auto falls back to memfd; or docker run --shm-size=8g, "
        "Kubernetes: an emptyDir with medium: Memory mounted at /dev/shm",
    )


def check_limits() -> Iterator[Finding]:
    """Check file descriptors and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft == resource.RLIM_INFINITY or soft >= FILES_WANTED
    yield Finding(
        "open files",
        "ok" if wanted else "warn",
        f"{_limit(soft)} (hard {_limit(hard)})",
        "" if wanted else f"ulimit -n {FILES_WANTED}, or LimitNOFILE= in the unit",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = soft == resource.RLIM_INFINITY or soft >= MEMLOCK_BYTES_WANTED
    yield Finding(
        "locked memory",
        "ok" if wanted else "warn",
        f"{_limit(soft)} (hard {_limit(hard)})",
        ""
        if wanted
        else "matters for pinned GPU copies only: ulimit -l unlimited, LimitMEMLOCK=infinity",
    )


def check_memory() -> Iterator[Finding]:
    """Tell the memory that this process may use, by RAM and by cgroup."""
    limit = cgroup_limit_bytes()
    value = f"{ram_bytes() // MIB} MiB RAM" + (f", cgroup {limit // MIB} MiB" if limit else "")
    is_small = usable_memory_bytes() < SMALL_MEMORY_BYTES
    yield Finding(
        "memory",
        "warn" if is_small else "ok",
        value,
        "set memory.memory_bytes by hand, the default is a quarter of this" if is_small else "",
    )
    yield Finding("cpus", "ok", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")


def check_kernel() -> Iterator[Finding]:
    """Check the kernel features that msd uses where they are there."""
    release = platform.release()
    version = _kernel_version(release)
    features = {
        "memfd_create": hasattr(os, "memfd_create"),
        "pidfd_open": hasattr(os, "pidfd_open") and _has_pidfd(),
        "MADV_POPULATE_WRITE": version >= (5, 14),
        "MADV_COLLAPSE": version >= (6, 1),
    }
    missing = [name for name, is_there in features.items() if not is_there]
    if platform.system() != "Linux":
        yield Finding("kernel", "fail", platform.system(), "msd runs on Linux")
    elif "pidfd_open" in missing or "memfd_create" in missing:
        yield Finding(
            "kernel", "fail", f"{release} lacks {', '.join(missing)}", "use Linux 5.3 or later"
        )
    elif missing:
        yield Finding(
            "kernel", "ok", f"{release}, without {', '.join(missing)}: slower first touch only"
        )
    else:
        yield Finding("kernel", "ok", f"{release}: {', '.join(features)}")


def check_socket(path: Path | None = None) -> Iterator[Finding]:
    """Check the control socket's path and folder, and whether a daemon answers.

    Args:
        path: Of a daemon that may be another user's; None: this user's own.
    """
    if path is not None:
        yield _probe(path)
        return
    uid = os.geteuid()
    path = default_socket_path(os.environ, uid)
    try:
        check_socket_path(path)
        check_private_dir(path.parent, uid)
    except FileNotFoundError:
        yield Finding("daemon", "ok", f"none has run yet: no {path.parent}")
        return
    except MsdError as error:
        yield Finding("daemon", "fail", str(path), error.message)
        return
    yield _probe(path)


def check_state_dir() -> Iterator[Finding]:
    """Check that the state folder is on a local file system: SQLite's locks fail on others."""
    path = default_state_dir(os.environ, os.geteuid())
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    kind = file_system_of(existing)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Finding(
            "state folder",
            "fail",
            f"{path} on {kind}",
            "SQLite needs a local disk: set MSD__DAEMON__STATE_DIR to one",
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Finding(
            "state folder", "fail", f"{path}: not writable", "set MSD__DAEMON__STATE_DIR elsewhere"
        )
    else:
        yield Finding("state folder", "ok", f"{path} on {kind or 'an unknown file system'}")


def check_leftovers() -> Iterator[Finding]:
    """Look for shared-memory names of ours; msd unlinks its own at once, so none should be there."""
    try:
        names = [
            entry.name
            for entry in os.scandir(SHM_DIR)
            if entry.name.startswith("msd")
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        ]
    except OSError:
        names = []
    if names:
        shown = " ".join(f"{SHM_DIR}/{name}" for name in sorted(names)[:5])
        yield Finding(
            "leftovers", "warn", f"{len(names)} shared-memory names: {shown}", f"rm {shown}"
        )
    else:
        yield Finding("leftovers", "ok", "no shared-memory name of msd")


def _probe(path: Path) -> Finding:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return Finding("daemon", "fail", f"{path} is not a socket", f"rm {path}")
    except FileNotFoundError:
        return Finding("daemon", "ok", f"not running: no {path}")
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(2)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return Finding(
                    "daemon",
                    "warn",
                    f"{path}: nobody listens, left by a killed daemon",
                    f"the next msd-daemon replaces it; or rm {path}",
                )
            except OSError:
                continue  # wrong socket type: try the other one
            return Finding("daemon", "ok", f"answers at {path}")
    return Finding("daemon", "fail", f"{path}: no connection", "is it another program's socket?")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _kernel_version(release: str) -> tuple[int, int]:
    parts = release.replace("-", ".").split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return (0, 0)


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_kernel,
    check_shared_memory,
    check_memory,
    check_limits,
)
