"""Folders of keys for tests: each machine has its own secret and the public keys of its peers."""

from __future__ import annotations

import shutil
from pathlib import Path

from federation.key_files import PUBLIC, generate
from federation.keys import KeyDir


class KeyCase:
    """Machines that know each other; changes are copied when the test says so."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.root = folder
        for name in names:
            self.add(name)
        self.share(*names)

    def folder(self, name: str) -> Path:
        """Return the folder of a machine."""
        return self.root / name

    def add(self, name: str) -> Path:
        """Make a machine with keys that nobody else has."""
        self.folder(name).mkdir()
        generate(self.folder(name), name)
        return self.folder(name)

    def share(self, *names: str) -> None:
        """Copy the public keys of these machines to all of these."""
        for owner in names:
            source = self.folder(owner) / f"{owner}{PUBLIC}"
            for name in names:
                if name != owner:
                    # As a careful person does: whole or not at all.
                    temporary = self.folder(name) / f"{owner}.copy"
                    shutil.copyfile(source, temporary)
                    temporary.replace(self.folder(name) / source.name)

    def keys(self, name: str) -> KeyDir:
        return KeyDir(self.folder(name), name)
