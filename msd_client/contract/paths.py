"""Where daemon and client meet when nothing is configured: socket, runtime and state folders.

Standard library only: the trainer's side needs the same answer as the daemon without pydantic.
Precedence for the socket: an explicit argument, `MSD__DAEMON__SOCKET`, `MSD__DAEMON__RUNTIME_DIR`,
the daemon that `msdctl up` started for this Slurm job or Ray node, `$XDG_RUNTIME_DIR/msd`,
`/tmp/msd-UID`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from msd_client.contract.errors import ConfigError, PermissionDeniedError

SOCKET_PATH_BYTES_MAX = 107
"""sun_path of a Unix socket address holds 108 bytes, the last of them the closing NUL."""

SOCKET_NAME = "msd.sock"
LAUNCHED = "launched"
"""File beside the socket of a daemon that `msdctl up` keeps running: nobody else starts one there."""
PRIVATE_DIR_MODE = 0o750


def default_runtime_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the folder of socket and lock: `$XDG_RUNTIME_DIR/msd`, else `/tmp/msd-UID`.

    A runtime folder that is set but not there, or belongs to another user (`su`, containers), is
    passed over, since neither side could use it.
    """
    configured = environ.get("MSD__DAEMON__RUNTIME_DIR")
    if configured:
        return Path(configured)
    for launched in launched_dirs(environ, uid):
        if is_launched(launched, uid):
            return launched
    base = environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base):
        try:
            found = os.stat(base)
        except OSError:
            found = None
        if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == uid:
            return Path(base) / "msd"
    return Path("/tmp") / f"msd-{uid}"  # noqa: S108 - guarded by prepare_private_dir


def launched_name(environ: Mapping[str, str]) -> str | None:
    """Return what `msdctl up` calls this node of this Slurm job, or this Ray node; None: neither.

    From variables that all processes of the job there have: a daemon and its ranks find one name.
    """
    raylet = environ.get("RAY_RAYLET_PID", "")
    if raylet.isascii() and raylet.isdecimal():
        return f"ray-{raylet[:20]}"
    job, node = environ.get("SLURM_JOB_ID"), environ.get("SLURMD_NODENAME")
    if not job or not node:
        return None
    restarts = environ.get("SLURM_RESTART_COUNT") or "0"
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"slurm-{job}.{restarts}-{node}")


def launched_dirs(environ: Mapping[str, str], uid: int) -> list[Path]:
    """Return the runtime folders that `msdctl up` may use here, the preferred one first.

    `$SLURM_TMPDIR` and `/tmp/msd-UID`; those in which a socket's path would be too long are left out.
    Not `$XDG_RUNTIME_DIR`: it goes with the user's last login, which may be before the job's end.
    """
    name = launched_name(environ)
    if name is None:
        return []
    bases = [Path("/tmp") / f"msd-{uid}"]  # noqa: S108 - guarded by prepare_private_dir
    own = environ.get("SLURM_TMPDIR")
    if own and os.path.isabs(own) and name.startswith("slurm-"):
        bases.insert(0, Path(own))
    found = [base / name for base in bases]
    return [path for path in found if len(os.fsencode(path / SOCKET_NAME)) <= SOCKET_PATH_BYTES_MAX]


def is_launched(path: Path, uid: int) -> bool:
    """Tell whether `msdctl up` of this user keeps a daemon in a runtime folder."""
    try:
        return os.lstat(path / LAUNCHED).st_uid == uid
    except OSError:
        return False


def default_socket_path(environ: Mapping[str, str], uid: int) -> Path:
    """Return the daemon's control socket when no argument names one."""
    configured = environ.get("MSD__DAEMON__SOCKET")
    if configured:
        return Path(configured)
    return default_runtime_dir(environ, uid) / SOCKET_NAME


def default_state_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Return the folder of journal and indexes: `$XDG_STATE_HOME/msd`, else `~/.local/state/msd`."""
    configured = environ.get("MSD__DAEMON__STATE_DIR")
    if configured:
        return Path(configured)
    base = environ.get("XDG_STATE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "msd"
    home = environ.get("HOME")
    if home and os.path.isabs(home):
        return Path(home) / ".local" / "state" / "msd"
    return default_runtime_dir(environ, uid) / "state"


def check_socket_path(path: Path) -> Path:
    """Return the path if a Unix socket can be bound there.

    Raises:
        ConfigError: Relative, holds a NUL, or longer than 107 bytes; names the length.
    """
    encoded = os.fsencode(path)
    if not path.is_absolute() or b"\0" in encoded:
        raise ConfigError(
            f"daemon.socket: {path}: not an absolute path; write one that begins with /"
        )
    if len(encoded) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"daemon.socket: {path}: {len(encoded)} bytes long, a Unix socket path holds at most "
            f"{SOCKET_PATH_BYTES_MAX}; set MSD__DAEMON__SOCKET or daemon.socket to a shorter one"
        )
    return path


def check_private_dir(path: Path, uid: int) -> None:
    """Check that a folder is ours and that no one else may write into it.

    Raises:
        FileNotFoundError: There is no such folder.
        PermissionDeniedError: It is a link, belongs to another user, or others may write to it.
    """
    found = os.lstat(path)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder (links are refused here)"
    elif found.st_uid not in (uid, 0):
        problem = f"belongs to uid {found.st_uid}, not to {uid}"
    elif mode & 0o022:
        problem = f"has mode {mode:04o}, others may write to it"
    else:
        return
    raise PermissionDeniedError(
        f"{path} {problem}: remove it, or set daemon.runtime_dir (MSD__DAEMON__RUNTIME_DIR) to "
        f"a folder of your own with mode {PRIVATE_DIR_MODE:04o}",
        path=str(path),
    )


def prepare_private_dir(path: Path, uid: int) -> Path:
    """Return the folder, made with mode 0750 where absent and checked where present.

    Raises:
        PermissionDeniedError: See `check_private_dir`, or it can't be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, PRIVATE_DIR_MODE)
            os.chmod(path, PRIVATE_DIR_MODE)  # the umask may have taken bits away
        check_private_dir(path, uid)
    except PermissionDeniedError:
        raise
    except OSError as error:
        raise PermissionDeniedError(
            f"{path} can't be made ({error.strerror}): set daemon.runtime_dir or daemon.state_dir "
            "to a folder that you may write",
            path=str(path),
        ) from error
    return path
