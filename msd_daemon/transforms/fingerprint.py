"""Fingerprint of a tokenizer's files: of all their bytes, since they are small and each counts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError


def file_fingerprint(*paths: Path) -> str:
    """Return the first 32 hex digits of the sha256 of a file, or of the digests of several.

    Raises:
        ConfigError: A file cannot be read.
    """
    digests = [_digest(path) for path in paths]
    if len(digests) == 1:
        return digests[0].hex()[:32]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


def _digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path} cannot be read: {error.strerror}", path=str(path)
        ) from error


def tokenizer_files(kind: str, path: Path) -> tuple[Path, ...]:
    """Return all files of a tokenizer: the one that the job names, and what belongs to it."""
    return (path, merges_path(path)) if kind == "bpe_files" else (path,)


def merges_path(vocabulary: Path) -> Path:
    """Return the merges that belong to a `*vocab.json`: `*merges.txt` beside it."""
    return vocabulary.with_name(vocabulary.name.removesuffix("vocab.json") + "merges.txt")


def check_unchanged(spec: TokenizerSpec) -> None:
    """Refuse files that are not those the job was resolved with.

    Raises:
        ConfigError: They changed, or cannot be read.
    """
    path = Path(spec.path)
    if not spec.fingerprint:
        return
    if file_fingerprint(*tokenizer_files(spec.kind, path)) != spec.fingerprint:
        raise ConfigError(
            f"tokenizer {path} is not the file the job was resolved with: submit the job anew",
            path=str(path),
        )
