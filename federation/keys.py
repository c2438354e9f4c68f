"""Keys of nodes and planners: a folder of files, watched, and what is accepted by them now.

| file | rights | holds |
|---|---|---|
| `NAME.pub` | any | public key of a node or planner; listed means: may connect, as NAME |
| `NAME.secret` | 0600 | key pair of this machine's own node or planner |
| `NAME-XXXXXXXX.revoked` | any | a public key that is never accepted again, listed or not |

All are TOML. A file may list `former` keys beside the present one, each with the end of its grace:
until then both are accepted. Where a file can't be read, what it said before holds and a warning
names it, so that a copy under way is no revocation.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from federation.key_files import (
    PUBLIC,
    REVOKED,
    SECRET,
    KeyFile,
    check_name,
    read_key_file,
    utc_now,
)
from federation.secure_sockets import CurveKeys
from msd_client.contract.errors import ConfigError

log = logging.getLogger(__name__)

WATCH_NS = 1_000_000_000


class KeyDir:
    """The keys of one process: its own pair, and whom it accepts. `refresh` looks for changes.

    `node_of` may be called by another thread than the one that refreshes.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        now: Callable[[], dt.datetime] = utc_now,
    ) -> None:
        """Read the folder.

        Args:
            path: Of it.
            name: Of this node or planner; its `.secret` has to be there.
            now: The clock for graces.

        Raises:
            ConfigError: The folder or this name's secret is not there or not sound.
        """
        self.path = path
        self.name = check_name(name)
        self.version = 0
        """Grows with every change of what is accepted or used."""
        self.problems: dict[str, str] = {}
        """What is wrong, by file."""
        self._now = now
        self._looked_ns = 0
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._files: dict[str, KeyFile] = {}
        self._nodes: dict[bytes, str] = {}
        self._own: list[CurveKeys] = []
        if not path.is_dir():
            raise ConfigError(
                f"federation.keys_dir: {path} is no folder: make it, and run `msdctl keys generate "
                f"{name} --keys-dir {path}`",
                path=str(path),
            )
        secret = path / f"{name}{SECRET}"
        if not secret.exists():
            raise ConfigError(
                f"{secret} is not there: run `msdctl keys generate {name} --keys-dir {path}` on this "
                f"machine, and copy {name}{PUBLIC} to the keys_dir of its peers",
                path=str(secret),
            )
        self._read(secret)
        self.refresh(is_now=True)

    @property
    def own(self) -> CurveKeys:
        """The pair that a listening end shows: the former one until its grace is over.

        So that peers have all the grace to learn of the new one; they accept both from the start.
        """
        return self._own[-1]

    @property
    def own_pairs(self) -> list[CurveKeys]:
        """The pairs that a connecting end may show, the present one first."""
        return list(self._own)

    def node_of(self, public: bytes) -> str | None:
        """Return whose key this is; None: nobody's that is listed."""
        return self._nodes.get(public)

    def public_keys(self, name: str) -> list[bytes]:
        """Return the keys of a node or planner that are accepted now, the present one first."""
        return [key for key, owner in self._nodes.items() if owner == name]

    def names(self) -> list[str]:
        """Return whose keys are listed."""
        return sorted(set(self._nodes.values()))

    def refresh(self, *, is_now: bool = False) -> bool:
        """Read what changed, at most once a second; tell whether anything did."""
        now_ns = time.monotonic_ns()
        if not is_now and now_ns - self._looked_ns < WATCH_NS:
            return False
        self._looked_ns = now_ns
        seen = self._look()
        for name in [name for name in self._files if name not in seen]:
            if name != f"{self.name}{SECRET}":
                del self._files[name]
                self.problems.pop(name, None)
        for name, signature in seen.items():
            if self._seen.get(name) != signature:
                self._try(name)
        self._seen = seen
        return self._settle()

    def _look(self) -> dict[str, tuple[int, int, int]]:
        seen = {}
        own = f"{self.name}{SECRET}"
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    is_own = entry.name == own
                    if is_own or entry.name.endswith((PUBLIC, REVOKED)):
                        found = entry.stat()
                        seen[entry.name] = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError as error:
            if self.problems.get("") != str(error):
                log.warning("keys in %s can't be read: %s: the known ones hold", self.path, error)
            self.problems[""] = str(error)
            return self._seen
        self.problems.pop("", None)
        return seen

    def _try(self, name: str) -> None:
        try:
            if name.endswith(PUBLIC):
                check_name(name.removesuffix(PUBLIC))
            self._read(self.path / name)
        except ConfigError as error:
            if self.problems.get(name) != error.message:
                log.warning("%s; what it said before holds", error.message)
            self.problems[name] = error.message
        else:
            self.problems.pop(name, None)

    def _read(self, path: Path) -> None:
        self._files[path.name] = read_key_file(path)

    def _settle(self) -> bool:
        now = self._now()
        revoked = {
            key.encode()
            for name, found in self._files.items()
            if name.endswith(REVOKED)
            for key in (found.key, *(one.key for one in found.former))
        }
        listed = [
            (key.encode(), name.removesuffix(PUBLIC))
            for name, found in sorted(self._files.items())
            if name.endswith(PUBLIC)
            for key in found.keys_at(now)
        ]
        nodes = _unambiguous(listed, self.problems)
        nodes = {key: name for key, name in nodes.items() if key not in revoked}
        own = self._files[f"{self.name}{SECRET}"].pairs_at(now)
        if (nodes, own) == (self._nodes, self._own):
            return False
        self._nodes, self._own = nodes, own
        self.version += 1
        return True


def _unambiguous(listed: Iterable[tuple[bytes, str]], problems: dict[str, str]) -> dict[bytes, str]:
    """Return key to name; a key that two names list is neither's."""
    found: dict[bytes, str] = {}
    doubtful: set[bytes] = set()
    for key, name in listed:
        if found.setdefault(key, name) != name:
            doubtful.add(key)
            text = f"{name}{PUBLIC} lists the key of {found[key]}{PUBLIC}: neither is accepted"
            if problems.get(f"{name}{PUBLIC}") != text:
                log.warning("%s", text)
            problems[f"{name}{PUBLIC}"] = text
    return {key: name for key, name in found.items() if key not in doubtful}
