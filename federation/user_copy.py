"""The copy of a user's code that a job runs: its files, and what they are called with, by content.

A copy is a folder: `files/` and `msd-call.json`, which lists those files with their hashes beside the
call, its options and the versions that results depend on. The hash of that text is the digest of the
call, so a changed file, option, interpreter or package is another call.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from federation.model.recipe import UserCall
from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import decode_plain

CALL_FILE = "msd-call.json"
FILES_FOLDER = "files"
DIGEST_DIGITS = 32


@dataclass(frozen=True)
class Versions:
    """Of what a call's results depend on beside its files."""

    python: str = ""
    """major.minor.patch"""
    implementation: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    """Distribution to version."""


@dataclass(frozen=True)
class CallCopy:
    """What `msd-call.json` says."""

    call: str
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    paths: tuple[str, ...] = ()
    """Folders below `files/` that are put on sys.path, first one first; `.` is that folder."""
    files: dict[str, str] = field(default_factory=dict)
    """Path below `files/` to sha256."""
    versions: Versions = Versions()

    def text(self) -> bytes:
        """Return the file's content."""
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode()

    def digest(self) -> str:
        """Return the first 32 hex digits of the sha256 of the text."""
        return hashlib.sha256(self.text()).hexdigest()[:DIGEST_DIGITS]


def list_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file below a folder, by its path there.

    Raises:
        OSError: One cannot be read.
    """
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            found[path.relative_to(folder).as_posix()] = file_hash(path)
    return found


def file_hash(path: Path) -> str:
    """Return the sha256 of a file's content.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_copy(rule: UserCall) -> CallCopy:
    """Return the copy of a call after checking every byte of it.

    Raises:
        ConfigError: It is gone, or not what the job was resolved with.
    """
    folder = Path(rule.folder)
    remedy = "submit the job again from its own files"
    try:
        copy = decode_plain(CallCopy, json.loads((folder / CALL_FILE).read_bytes()), CALL_FILE)
        files = list_files(folder / FILES_FOLDER)
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"the copy of {rule.call} in {folder} cannot be read: {error}: {remedy}",
            path=rule.folder,
        ) from error
    changed = sorted(set(files.items()) ^ set(copy.files.items()))
    if changed or copy.digest() != rule.digest or copy.call != rule.call:
        what = changed[0][0] if changed else CALL_FILE
        raise ConfigError(
            f"the copy of {rule.call} in {folder} was changed ({what}): {remedy}", path=rule.folder
        )
    return copy


def check_versions(rule: UserCall, expected: Versions, seen: Versions) -> None:
    """Refuse an interpreter that is not the one the job was resolved with.

    A copy that is being made expects nothing yet.

    Raises:
        ConfigError: Python or a package has another version.
    """
    pairs = [("Python", expected.python, seen.python)]
    pairs.append(("Python's kind", expected.implementation, seen.implementation))
    pairs += [
        (name, version, seen.packages.get(name, "none"))
        for name, version in sorted(expected.packages.items())
    ]
    for name, wanted, found in pairs:
        if wanted not in ("", found):
            raise ConfigError(
                f"{rule.call}: {rule.python} has {name} {found}, the job was resolved with {wanted}:"
                " restore that version, or submit the job again",
                python=rule.python,
                seen=found,
                limit=wanted,
            )
