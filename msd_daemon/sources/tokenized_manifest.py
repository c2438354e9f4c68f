"""`.msd-tokenize.json`, which `msdctl tokenize` leaves beside its pairs: its names, and reading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msd_client.contract.errors import ConfigError

MANIFEST_NAME = ".msd-tokenize.json"
"""Hidden, so that the folder is a source of pairs alone."""
FORMER_NAME = "msd-tokenize.json"
SCHEMA = "msd.tokenized/1"
_BYTES_MAX = 1 << 30
_HEAD_KEYS = ("source_digest", "tokenizer", "dtype")
_ENTRY_KEYS = ("number", "bin", "fingerprint", "bin_fingerprint", "documents", "tokens", "dropped", "faulty", "faults")  # fmt: skip


def read_manifest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the manifest of a folder of pairs and where it lies, None where there is none.

    Raises:
        ConfigError: It cannot be read, or is no manifest.
    """
    for name in (MANIFEST_NAME, FORMER_NAME):
        path = folder / name
        try:
            with path.open("rb") as file:
                content = file.read(_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}: mend it") from error
        return path, _parse(path, content)
    return None


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
        if found["schema"] != SCHEMA or not isinstance(found["shards"], list):
            raise ValueError(f"schema {found['schema']!r}")
        _ = [found[key] for key in _HEAD_KEYS]
        _ = dict(found["tokenizer"])
        _ = [entry[key] for entry in found["shards"] for key in _ENTRY_KEYS]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no manifest of msdctl tokenize ({error}): remove it, or name another --out"
        ) from error
    return dict(found)
