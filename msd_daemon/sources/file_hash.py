"""Checking a file against hashes that somebody listed for it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from msd_daemon.sources.byte_stream import ByteFile

_PIECE_BYTES = 1 << 20
_FASTEST_FIRST = (
    "xxh3_64",
    "xxh3_128",
    "xxh128",
    "xxh64",
    "sha1",
    "sha256",
    "md5",
    "xxh32",
    "blake2b",
    "sha512",
    "blake2s",
    "sha224",
    "sha384",
    "sha3_256",
    "sha3_224",
    "sha3_384",
    "sha3_512",
)


def hash_fault(file: ByteFile, hashes: Sequence[tuple[str, str]]) -> str:
    """Return how a file differs from its hashes, empty where it does not or nothing can be checked.

    One hash is checked, the fastest there is a library for: xxHash ones need the package xxhash.

    Args:
        file: The file, read once from front to end.
        hashes: (algorithm, hex digits) of each.
    """
    for name in _FASTEST_FIRST:
        wanted = dict(hashes).get(name)
        hasher = _hasher(name) if wanted is not None else None
        if hasher is None:
            continue
        offset = 0
        while piece := file.read_at(offset, _PIECE_BYTES):
            hasher.update(piece)
            offset += len(piece)
        found: str = hasher.hexdigest()
        return "" if found == wanted else f"has {name} {found}, index.json says {wanted}"
    return ""


def _hasher(name: str) -> Any:
    if not name.startswith("xxh"):
        return hashlib.new(name, usedforsecurity=False)
    if importlib.util.find_spec("xxhash") is None:
        return None
    return getattr(importlib.import_module("xxhash"), name)()
