"""Profiles of sources on disk: one small file for each fingerprint, beside the indexes of shards.

Written by temp + fsync + rename, so that readers see a whole file or none; a file that can't be read
is as good as none, it is measured and written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from federation.model.source_profile import (
    SourceProfile,
    decode_profile,
    encode_profile,
    joined,
)
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.index import write_durably

FOLDER = "profiles"
FILE_BYTES_MAX = 1 << 16


class ProfileStore:
    """Profiles in the folder `profiles` of a state folder; it is made with the first one.

    Args:
        state_dir: The daemon's state folder.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER

    def load(self, fingerprint: str) -> SourceProfile | None:
        """Return a profile, None where there is none that can be read."""
        try:
            with self._path(fingerprint).open("rb") as file:
                plain = json.loads(file.read(FILE_BYTES_MAX))
            found = decode_profile(plain)
        except (OSError, ValueError, ConfigError, RecursionError):
            return None
        return found if found.fingerprint == fingerprint else None

    def load_all(self, fingerprints: Iterable[str]) -> list[SourceProfile | None]:
        """Return the profiles of several sources, in order."""
        return [self.load(fingerprint) for fingerprint in fingerprints]

    def add(self, profile: SourceProfile) -> SourceProfile:
        """Join a measurement to what is known, keep it, and return both together.

        A folder that can't be written to is no fault: the next run measures again.
        """
        whole = joined(self.load(profile.fingerprint), profile)
        content = json.dumps(encode_profile(whole), indent=1).encode()
        with suppress(OSError):
            write_durably(self._path(whole.fingerprint), content)
        return whole

    def load_pace(self, key: str) -> int:
        """Return how long a step of a job's ranks takes in nanoseconds, 0 where it was not kept."""
        try:
            with self._path(f"pace-{key}").open("rb") as file:
                found = json.loads(file.read(FILE_BYTES_MAX))["step_ns"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return 0
        return found if isinstance(found, int) and found > 0 else 0

    def save_pace(self, key: str, step_ns: int) -> None:
        """Keep it; a folder that can't be written to is no fault."""
        with suppress(OSError):
            write_durably(self._path(f"pace-{key}"), json.dumps({"step_ns": step_ns}).encode())

    def _path(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.json"
