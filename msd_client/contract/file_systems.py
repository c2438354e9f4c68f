"""Which file system a path is on, and which of them SQLite's locks fail on."""

from __future__ import annotations

import os
from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "fuse.ceph-fuse", "fuse.glusterfs",
        "fuse.juicefs", "fuse.s3fs", "fuse.sshfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2",
        "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip
"""Types, as the kernel names them, that other machines may write to at the same time."""


def file_system_of(path: Path) -> str | None:
    """Return the type of the file system that a path is on, from the longest mount point above it.

    Args:
        path: Need not exist.

    Returns:
        As the kernel names it; None where it does not say.
    """
    real = os.path.realpath(path)
    best, kind = "", None
    try:
        lines = (
            Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")
        is_above = real == mount or real.startswith(mount.rstrip("/") + "/")
        if is_above and len(mount) >= len(best):  # a later line of the same place covers an earlier
            best, kind = mount, right.split()[0]
    return kind
