"""Where a launched node is: its runtime folder, its address, and whether an earlier one has left them."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from federation.addresses import interface_address, outward_address
from msd_client.contract.errors import ConfigError
from msd_client.contract.paths import launched_dirs
from msd_daemon.launch.launch_plan import LaunchPlan

LOOPBACK = "127.0.0.1"


def runtime_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return where this node's socket is made: the first folder that can be.

    Raises:
        ConfigError: This is no process of a launch, or the socket's path would be too long anywhere.
    """
    found = launched_dirs(environ, uid)
    if not found:
        raise ConfigError(
            "no runtime folder: neither SLURM_JOB_ID and SLURMD_NODENAME nor RAY_RAYLET_PID are set, or "
            "the path of a socket would be above 107 bytes"
        )
    for path in found:
        if path.parent == Path(f"/tmp/msd-{uid}") or os.access(path.parent, os.W_OK | os.X_OK):  # noqa: S108
            return path
    return found[-1]


def take_lock(descriptor: int) -> bool:
    """Take an open file's lock, and keep it while it is open; False: another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unlocked(path: Path) -> bool:
    """True where no daemon holds its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return take_lock(descriptor)
    finally:
        os.close(descriptor)


def is_free(address: str, port: int) -> bool:
    """True where the planner could listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def node_address(plan: LaunchPlan, node: str) -> str:
    """Return the address by which other nodes reach this one.

    That of the interface that was named; else what the scheduler knows; else that of the node's name
    where it leads out of this machine; else that of the default route.

    Raises:
        ConfigError: There is none.
    """
    if plan.interface:
        return interface_address(plan.interface, "--interface")
    if not plan.has_keys:
        return LOOPBACK
    if node in plan.addresses:
        return plan.addresses[node]
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(node, None, socket.AF_INET)]
    except OSError:
        found = []
    # Debian's /etc/hosts gives a machine's own name a loopback address.
    outward = [address for address in found if not address.startswith("127.")]
    return outward[0] if outward else outward_address("--interface")


def child_environ() -> dict[str, str]:
    """Return the environment of daemon and planner: ours without what is about a rank."""
    of_ranks = ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "LOCAL_RANK")
    return {
        key: value
        for key, value in os.environ.items()
        if key not in of_ranks and not key.startswith(("MSD__FEDERATION__", "MSD__DAEMON__"))
    }
