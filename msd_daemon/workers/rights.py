"""The rights of a job's owner, taken by the processes that open his files and run his code.

A daemon for several users serves all, but reads for each with his own rights: the process that resolves
a job and the one that its loader workers are forked from give up the daemon's before they open
anything, for good. The kernel decides then, on each file, link and folder, also for files that are
swapped later. The daemon needs CAP_SETUID, CAP_SETGID and CAP_KILL for it, or is root.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from msd_client.contract.errors import PermissionDeniedError

CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7
NEEDED = (1 << CAP_KILL) | (1 << CAP_SETGID) | (1 << CAP_SETUID)
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True)
class Rights:
    """Of one user, as the kernel told them of his connection (SO_PEERCRED, SO_PEERGROUPS)."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    def take(self) -> None:
        """Become the user for good: no capability is left, and none comes back.

        Raises:
            OSError: The kernel refuses; nothing may be opened then.
        """
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        _drop_capabilities()
        assert os.getresuid() == (self.uid,) * 3 and os.getresgid() == (self.gid,) * 3


def _drop_capabilities() -> None:
    """Give up what the change of uid leaves: between users other than root the kernel takes nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if (
        libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        or libc.capset(header, none)
        or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"capabilities can't be given up: {os.strerror(code)}")


def may_become_others() -> bool:
    """Tell whether this process may take another user's rights, and end processes that did."""
    with open("/proc/self/status", encoding="ascii") as lines:
        effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return effective & NEEDED == NEEDED


def rights_for(uid: int, groups: tuple[int, ...], own_uid: int) -> Rights | None:
    """Return whose rights a job's processes take; None: the daemon's own.

    Args:
        uid: The job's owner.
        groups: His, the first one his own.
        own_uid: The daemon's. A job of root runs with the daemon's rights, which are fewer.

    Raises:
        PermissionDeniedError: The daemon may not become him.
    """
    if uid in (own_uid, 0):
        return None
    if not may_become_others():
        raise PermissionDeniedError(
            f"this daemon runs as uid {own_uid} and may not read with the rights of uid {uid}: use a "
            "daemon of your own (connect() starts one), or have its administrator run "
            "msdctl install-service --many-users",
            uid=uid,
        )
    return Rights(uid, groups[0], groups)
