"""Which files a user's transform consists of, and their copy into a folder named by content."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from federation.model.recipe import UserCall
from federation.user_copy import CALL_FILE, FILES_FOLDER, CallCopy, read_copy
from msd_client.contract.errors import ConfigError

FILES_MAX = 10_000
FILES_BYTES_MAX = 256 << 20


class FilesError(Exception):
    """The files cannot be copied: what is wrong; what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


@dataclass
class FileSet:
    """Files by their place in the copy."""

    files: dict[str, Path] = field(default_factory=dict)
    size_bytes: int = 0

    def add_module(self, module: str, folder: Path) -> None:
        """Add the file, or the package's folder, that a module is imported from, if it is there.

        Raises:
            FilesError: There are too many files.
        """
        top = module.partition(".")[0]
        inner = folder / module.replace(".", "/")
        if (folder / f"{top}.py").is_file():
            self.add(folder / f"{top}.py", f"{top}.py")
        elif inner.with_name(f"{inner.name}.py").is_file() or (inner / "__init__.py").is_file():
            self.add(folder / top, top)

    def add_matches(self, pattern: str, base_dir: Path) -> None:
        """Add what a pattern names; files below `base_dir` keep their place, others their name.

        Raises:
            FilesError: It names nothing, or too much.
        """
        start = os.path.join(base_dir, os.path.expanduser(pattern))
        matches = sorted(glob.glob(start, recursive=True)) if "\0" not in pattern else []
        if not matches:
            raise FilesError("no such file", "mend the path or make the file")
        for match in matches:
            path = Path(os.path.normpath(match))
            inside = path.relative_to(base_dir) if path.is_relative_to(base_dir) else None
            is_base = inside is not None and inside == Path()
            self.add(path, "" if is_base else (inside or Path(path.name)).as_posix())

    def add(self, path: Path, place: str) -> None:
        """Add a file, or all below a folder but hidden and compiled ones.

        Raises:
            FilesError: Two files have one place, or there are too many.
        """
        if path.is_dir():
            for file in _files_below(path):
                self._add_file(file, str(PurePosixPath(place, file.relative_to(path).as_posix())))
        elif path.is_file():
            self._add_file(path, place)
        else:
            raise FilesError(f"{path} is no regular file", "leave it out")

    def _add_file(self, path: Path, place: str) -> None:
        known = self.files.get(place)
        if known is not None:
            if not known.samefile(path):
                raise FilesError(f"{known} and {path} would both be {place}", "rename one")
            return
        self.files[place] = path
        self.size_bytes += path.stat().st_size
        if len(self.files) > FILES_MAX or self.size_bytes > FILES_BYTES_MAX:
            raise FilesError(
                f"{len(self.files)} files of {self.size_bytes} bytes, the last {path}, are over "
                f"{FILES_MAX} files or {FILES_BYTES_MAX} bytes",
                "name the files it needs, or install the package (not editable)",
            )

    def paths_for(self, module: str) -> tuple[str, ...]:
        """Return the folders for sys.path: the one that a module is imported from, then the top."""
        stem = module.replace(".", "/")
        ends = (f"/{stem}.py", f"/{stem}/__init__.py")
        roots = {
            place.removesuffix(end[1:]).rstrip("/") or "."
            for place in self.files
            for end in ends
            if f"/{place}".endswith(end)
        }
        root = min(roots, key=lambda path: (path.count("/"), path), default=".")
        return (".",) if root == "." or "." in roots else (root, ".")


def _files_below(folder: Path) -> Iterable[Path]:
    """Yield the files of a folder in order; links are followed, none twice."""
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if _is_wanted(name))
        for name in sorted(names):
            path = Path(parent, name)
            if _is_wanted(name) and path.is_file():
                yield path


def _is_wanted(name: str) -> bool:
    return (
        not name.startswith(".") and name != "__pycache__" and not name.endswith((".pyc", ".pyo"))
    )


class Staging:
    """A copy that is being made, below the store; removed unless it is kept.

    Args:
        store_dir: Where copies lie, each in a folder named by its digest.

    Raises:
        OSError: The store cannot be written.
    """

    def __init__(self, store_dir: Path) -> None:
        store_dir.mkdir(parents=True, exist_ok=True)
        self._store_dir = store_dir
        self.folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=store_dir))

    @property
    def files(self) -> Path:
        """The files of the copy."""
        return self.folder / FILES_FOLDER

    def write_files(self, files: FileSet) -> None:
        """Copy the files that are not there yet.

        Raises:
            OSError: One cannot be read, or the store not written.
        """
        self.files.mkdir(exist_ok=True)
        for place, path in files.files.items():
            target = self.files / place
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
                is_program = path.stat().st_mode & stat.S_IXUSR
                target.chmod(0o755 if is_program else 0o644)

    def write_call(self, copy: CallCopy) -> None:
        """Write what the copy is called with."""
        (self.folder / CALL_FILE).write_bytes(copy.text())

    def keep(self, rule: UserCall) -> None:
        """Make the copy durable and read-only under its digest; one that is there already stays.

        Args:
            rule: Its `folder` is the copy's place.
        """
        target = Path(rule.folder)
        with contextlib.suppress(ConfigError):
            read_copy(rule)
            return
        for parent, _, names in os.walk(self.folder, topdown=False):
            for name in names:
                _sync(Path(parent, name))
                Path(parent, name).chmod(Path(parent, name).stat().st_mode & 0o555)
            _sync(Path(parent))
        damaged = self._store_dir / f"{self.folder.name}-damaged"
        try:
            self.folder.rename(target)
        except OSError:  # it is there: another submit was faster, or it was damaged
            with contextlib.suppress(ConfigError):
                read_copy(rule)
                return
            target.rename(damaged)
            self.folder.rename(target)
        for parent, _, _ in os.walk(target, topdown=False):
            Path(parent).chmod(0o555)
        _sync(self._store_dir)
        _remove(damaged)

    def remove(self) -> None:
        """Remove what was not kept."""
        _remove(self.folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(folder: Path) -> None:
    for parent, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            Path(parent).chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
