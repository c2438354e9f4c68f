"""Resolves the user's own transforms: copies their files by content, imports them once, digests.

The digest covers the files, the call with its options, and the versions of the interpreter and of
every installed package that the user's code loads (E20). Packages installed in the interpreter stay
where they are; what it loads from elsewhere (an editable install, a folder beside the job file) is
copied, so that a job goes on with the code it was submitted with.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from federation.model.recipe import UserCall
from federation.user_copy import CallCopy, Versions, list_files
from msd_client.contract.errors import ConfigError
from msd_daemon.config.faults import Fault
from msd_daemon.config.transform_file import TransformFile
from msd_daemon.config.user_files import FilesError, FileSet, Staging
from msd_daemon.transforms.user_link import CHILD_FILE
from msd_daemon.transforms.user_process import START_S_MAX, open_user_call

ENTRY_POINT = "msd.transforms"
COPY_ROUNDS_MAX = 4
"""A copied module may load others that are to be copied."""

_imports: dict[tuple[str, str], tuple[Versions, list[dict[str, Any]]]] = {}
"""What the import of a copy gave in this process: sources that share a transform import it once."""


class _ResolveError(Exception):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault


def resolve_user_call(
    path: str,
    section: TransformFile | None,
    base_dir: Path,
    store_dir: Path,
    faults: list[Fault],
    *,
    start_s_max: float = START_S_MAX,
) -> UserCall | None:
    """Return the call of a section after copying its files and importing it once.

    Args:
        path: Key path of the section.
        section: As written; None gives None.
        base_dir: Folder that relative paths start from.
        store_dir: Where copies lie, each in a folder named by its digest; made if needed.
        faults: Receives what is wrong; the result is None then.
        start_s_max: For the interpreter's start with the user's imports.
    """
    if section is None:
        return None
    try:
        return _resolve(path, section, base_dir.absolute(), store_dir, start_s_max)
    except _ResolveError as error:
        faults.append(error.fault)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        faults.append(
            Fault(path, section.call or section.use, problem, "mend the path or its rights")
        )
    return None


def _resolve(
    path: str, section: TransformFile, base_dir: Path, store_dir: Path, start_s_max: float
) -> UserCall:
    files = FileSet()
    if section.use is not None:
        key, call, python = "use", _add_entry_point(path, section.use, files), sys.executable
    else:
        assert section.call is not None
        key, call, python = "call", section.call, _interpreter(path, section.python, base_dir)
        _add_files(path, section, base_dir, files)
    staging = Staging(store_dir)
    try:
        copy = CallCopy(call, section.options)
        seen = Versions()
        for _ in range(COPY_ROUNDS_MAX):
            staging.write_files(files)
            copy = replace(
                copy,
                paths=files.paths_for(call.partition(":")[0]),
                files=list_files(staging.files),
            )
            staging.write_call(copy)
            seen, modules = _imported(path, key, section, copy, python, staging, start_s_max)
            if not _add_loose(path, key, section, modules, copy, files):
                break
        copy = replace(copy, versions=seen)
        staging.write_call(copy)
        rule = UserCall(
            call,
            python,
            str(store_dir.absolute() / copy.digest()),
            copy.digest(),
            section.sample_s,
            section.memory,
        )
        staging.keep(rule)
    finally:
        staging.remove()
    return rule


def _interpreter(path: str, python: str | None, base_dir: Path) -> str:
    """Return the path of the interpreter; links stay, as an environment is told by them."""
    if python is None:
        return sys.executable
    found = os.path.normpath(os.path.join(base_dir, os.path.expanduser(python)))
    if not os.path.isfile(found) and os.sep not in python:
        found = shutil.which(python) or found
    if not (os.path.isfile(found) and os.access(found, os.X_OK)):
        raise _ResolveError(
            Fault(
                f"{path}.python", python, "no such program", "name an interpreter, venv/bin/python"
            )
        )
    return found


def _add_files(path: str, section: TransformFile, base_dir: Path, files: FileSet) -> None:
    assert section.call is not None
    try:
        files.add_module(section.call.partition(":")[0], base_dir)
    except FilesError as error:
        raise _ResolveError(
            Fault(f"{path}.call", section.call, error.problem, error.remedy)
        ) from error
    for index, pattern in enumerate(section.files):
        try:
            files.add_matches(pattern, base_dir)
        except FilesError as error:
            place = f"{path}.files[{index}]"
            raise _ResolveError(Fault(place, pattern, error.problem, error.remedy)) from error


def _add_entry_point(path: str, name: str, files: FileSet) -> str:
    """Return the call of an installed transform, without loading it here."""
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINT)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise _ResolveError(
            Fault(
                f"{path}.use",
                name,
                f"no installed package has this entry point of {ENTRY_POINT} (there are: {known})",
                "install it for the daemon's interpreter, or give call",
            )
        )
    point = points[name]
    if not point.module or not point.attr:
        raise _ResolveError(
            Fault(
                f"{path}.use", name, f"{point.value!r} is not module:function", "mend the package"
            )
        )
    folder = str(point.dist.locate_file("")) if point.dist is not None else ""
    installed = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}
    if folder and os.path.realpath(folder) not in map(os.path.realpath, installed):
        # Found by way of this process alone (PYTHONPATH): the transform's process would not see it.
        files.add_module(point.module, Path(folder))
    return f"{point.module}:{point.attr}"


def _imported(
    path: str,
    key: str,
    section: TransformFile,
    copy: CallCopy,
    python: str,
    staging: Staging,
    start_s_max: float,
) -> tuple[Versions, list[dict[str, Any]]]:
    """Import the call and return the versions it depends on and the modules that it has loaded."""
    known = _imports.get((copy.digest(), python))
    if known is not None:
        return known
    rule = UserCall(copy.call, python, str(staging.folder), copy.digest())
    opened = open_user_call(
        rule, memory_bytes_max=0, sample_s_max=start_s_max, start_s_max=start_s_max
    )
    with opened as process:
        try:
            versions = process.start()
            modules = process.describe()
        except ConfigError as error:
            told = error.message.removeprefix(f"transform {copy.call} in {python}: ")
            told = told.replace(f"{staging.files}{os.sep}", "")
            is_interpreter = (
                told.startswith(("numpy is needed", "Python ")) or CHILD_FILE.name in told
            )
            at, value = key, section.call or section.use
            if is_interpreter and section.call is not None:
                at, value = "python", python
            problem = " | ".join(line.strip(" |") for line in told.splitlines() if line.strip(" |"))
            raise _ResolveError(
                Fault(f"{path}.{at}", value, problem, _remedy(problem, is_interpreter))
            ) from error
    packages: dict[str, str] = {}
    for module in modules:
        if module["is_installed"]:
            packages |= module["packages"]
    found = replace(versions, packages=packages), modules
    _imports[copy.digest(), python] = found
    return found


def _remedy(problem: str, is_interpreter: bool) -> str:
    if is_interpreter:
        return "name a Python of 3.10 or later with what the module needs"
    if "ModuleNotFoundError" in problem:
        return "add its file to files, or install it in the interpreter that python names"
    return "mend the module"


def _add_loose(
    path: str,
    key: str,
    section: TransformFile,
    modules: list[dict[str, Any]],
    copy: CallCopy,
    files: FileSet,
) -> bool:
    """Add modules that no installed package answers for; return whether there were any.

    Of modules in the interpreter's own folders just that of the call has to be answered for: some
    packages bring modules that their list of files does not name.
    """
    top = copy.call.partition(":")[0].partition(".")[0]
    count = len(files.files)
    for module in modules:
        is_loose = not module["is_installed"] or (module["name"] == top and not module["packages"])
        if is_loose:
            origin = Path(module["origin"])
            try:
                files.add(origin, origin.name)
            except FilesError as error:
                problem = f"it loads {module['name']} from {origin}: {error.problem}"
                raise _ResolveError(
                    Fault(f"{path}.{key}", section.call or section.use, problem, error.remedy)
                ) from error
    return len(files.files) > count
