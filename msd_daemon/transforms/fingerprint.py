"""Fingerprint of a tokenizer file: of all its bytes, since it is small and every byte counts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msd_client.contract.errors import ConfigError


def file_fingerprint(path: Path) -> str:
    """Return the first 32 hex digits of the sha256 of a file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path} cannot be read: {error.strerror}", path=str(path)
        ) from error
