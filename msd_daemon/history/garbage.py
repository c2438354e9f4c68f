"""What of a daemon's state folder nobody needs any more: old runs, indexes, copies of code, leftovers.

Nothing here is part of a stream that runs: indexes are made anew, copies are kept as long as a run's
folder names them, and a run's folder goes only once it is old and no job of a daemon. A run that is
gone can be resumed from its trainer's state still, but not rewound, and `lineage` finds nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from msd_daemon.config.daemon_config import CONTENT_DIR
from msd_daemon.history.runs import INDEX_DIR
from msd_daemon.services.job_folder import KnownFolder, known_folders

LEFTOVER_S = 86_400.0
"""A file that was being written is no leftover before."""
KINDS = ("run", "index", "copy", "leftover")


class Garbage(NamedTuple):
    """One thing that may go."""

    kind: str
    """Of KINDS."""
    path: Path
    bytes: int
    age_s: float
    """Since it was last used."""
    what: str
    """For people."""


def find_garbage(
    state_dir: Path, now_s: float, older_s: float, running: Collection[str], keep_runs: int
) -> list[Garbage]:
    """Return what may go, run folders first. Blocks.

    Args:
        state_dir: The daemon's.
        now_s: Unix seconds.
        older_s: Age from which on things go.
        running: Identities of jobs that a daemon has now.
        keep_runs: Newest runs of each job that stay, however old.
    """
    known = known_folders(state_dir)
    runs = list(_runs(known, now_s, older_s, running, keep_runs))
    gone = {it.path for it in runs}
    kept = [it.folder.path for it in known if it.folder.path not in gone]
    found = [*runs, *_indexes(state_dir, now_s, older_s), *_copies(state_dir, now_s, older_s, kept)]
    return [*found, *_leftovers(state_dir, now_s, gone)]


def _runs(
    known: list[KnownFolder], now_s: float, older_s: float, running: Collection[str], keep_runs: int
) -> Iterator[Garbage]:
    seen: dict[str, int] = {}
    for one in known:  # the one that ran last first
        number = seen[one.name] = seen.get(one.name, 0) + 1
        if number <= keep_runs or any(_is_of(one.identity, it) for it in running):
            continue
        size, used_s = _measure(one.folder.path)
        age_s = now_s - max(used_s, one.used_ns / 1e9)
        if age_s > older_s:
            yield Garbage("run", one.folder.path, size, age_s, f"job {one.name}, {one.identity}")


def _is_of(identity: str, run: str) -> bool:
    """Tell whether a folder is a run's own, or that of one of its passes of validation."""
    return identity == run or identity.startswith(f"{run}-") or run.startswith(f"{identity}-")


def _indexes(state_dir: Path, now_s: float, older_s: float) -> Iterator[Garbage]:
    for path in sorted((state_dir / INDEX_DIR).glob("*.msdindex")):
        size, used_s = _measure(path)
        if now_s - used_s > older_s:
            yield Garbage("index", path, size, now_s - used_s, "made anew where it is needed")


def _copies(state_dir: Path, now_s: float, older_s: float, kept: list[Path]) -> Iterator[Garbage]:
    copies = sorted((state_dir / CONTENT_DIR).glob("*"))
    if not copies:
        return
    named = ""
    for folder in kept:
        with contextlib.suppress(OSError):
            named += (folder / "resolved.yaml").read_text(encoding="utf-8", errors="replace")
    for path in copies:
        size, used_s = _measure(path)
        if path.name.startswith(".staging-"):
            if now_s - used_s > LEFTOVER_S:
                what = "of a copy that was never finished"
                yield Garbage("leftover", path, size, now_s - used_s, what)
        elif now_s - used_s > older_s and path.name.partition(".")[0] not in named:
            yield Garbage(
                "copy", path, size, now_s - used_s, "code or a list of no run that is kept"
            )


def _leftovers(state_dir: Path, now_s: float, gone: Collection[Path]) -> Iterator[Garbage]:
    for path in sorted(state_dir.rglob("*.tmp")):
        if not path.is_file() or any(folder in path.parents for folder in gone):
            continue
        size, used_s = _measure(path)
        if now_s - used_s > LEFTOVER_S:
            yield Garbage(
                "leftover", path, size, now_s - used_s, "of a file that was never finished"
            )


def _measure(path: Path) -> tuple[int, float]:
    """Return the bytes below a path, and when any of it was last read or written (Unix seconds)."""
    size, used_s = 0, 0.0
    paths = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    for one in paths:
        with contextlib.suppress(OSError):
            facts = one.lstat()
            size += facts.st_blocks * 512
            # Looking at a folder reads it, so only files tell when they were read.
            read_s = 0.0 if one.is_dir() else facts.st_atime
            used_s = max(used_s, facts.st_mtime, read_s)
    return size, used_s


def remove(garbage: Garbage) -> None:
    """Remove one thing; one that is gone already is no fault.

    Raises:
        OSError: It can't be removed.
    """
    if garbage.path.is_dir() and not garbage.path.is_symlink():
        shutil.rmtree(garbage.path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(garbage.path)
