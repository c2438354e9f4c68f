"""`connect(daemon="auto")`: start a per-user daemon where none answers, once per node.

Ranks race for it; a lock file makes one of them start it and the others wait for its socket. The
daemon is a process of its own session, not a child that dies with the trainer.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from msd_client.contract.errors import DaemonUnavailableError
from msd_client.contract.paths import (
    LAUNCHED,
    check_socket_path,
    is_launched,
    prepare_private_dir,
)
from msd_client.session import Session

START_TIMEOUT_S = 30.0
IDLE_EXIT_S = 20.0
RETRY_S = 0.05


def open_or_start(socket_path: Path, role: str, hello_s: float) -> Session:
    """Return a session with the daemon at `socket_path`, starting one where none answers.

    Args:
        socket_path: Of this user's daemon.
        role: See `Session`.
        hello_s: See `Session`.

    Raises:
        DaemonUnavailableError: It could not be started; the end of its log is in the message.
    """
    try:
        return Session(socket_path, role, hello_s=hello_s)
    except DaemonUnavailableError:
        pass
    check_socket_path(socket_path)
    if is_launched(socket_path.parent, os.getuid()):
        return _wait_for_launched(socket_path, role, hello_s)
    runtime_dir = prepare_private_dir(socket_path.parent, os.getuid())
    lock = os.open(runtime_dir / "start.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return Session(socket_path, role, hello_s=hello_s)
        except DaemonUnavailableError:
            return _start(socket_path, runtime_dir / "daemon.log", role)
    finally:
        os.close(lock)


def _wait_for_launched(socket_path: Path, role: str, hello_s: float) -> Session:
    """Wait for the daemon that `msdctl up` starts again; one of ours would be no node of its cluster."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return Session(socket_path, role, hello_s=hello_s)
        except DaemonUnavailableError as error:
            if time.monotonic() > deadline:
                raise DaemonUnavailableError(
                    f"the daemon that msdctl up started at {socket_path} does not answer for "
                    f"{START_TIMEOUT_S:g} s: see its log, or msdctl down and msdctl up again; where that "
                    f"launch is over, remove {socket_path.parent / LAUNCHED}",
                    socket=str(socket_path),
                ) from error
        time.sleep(RETRY_S)


def _start(socket_path: Path, log_path: Path, role: str) -> Session:
    command = [
        sys.executable, "-m", "msd_daemon",
        "--socket", str(socket_path), "--idle-exit-s", str(IDLE_EXIT_S),
    ]  # fmt: skip
    environ = {key: value for key, value in os.environ.items() if key not in _TRAINER_KEYS}
    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=environ,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            session = Session(socket_path, role)
        except DaemonUnavailableError as error:
            status = process.poll()
            if status is not None or time.monotonic() > deadline:
                what = f"ended with status {status}" if status is not None else "does not answer"
                raise DaemonUnavailableError(
                    f"a daemon was started at {socket_path} and {what}; end of {log_path}:\n"
                    f"{_tail(log_path)}",
                    socket=str(socket_path),
                ) from error
            time.sleep(RETRY_S)
            continue
        _forget(process)
        return session


def _forget(process: subprocess.Popen[bytes]) -> None:
    """Let the daemon outlive us without a ResourceWarning for a child nobody waits for."""
    process.returncode = 0


_TRAINER_KEYS = frozenset(
    {"RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES"}
)


def _tail(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(unreadable: {error})"
