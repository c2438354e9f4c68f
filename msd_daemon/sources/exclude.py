"""Records to leave out: lists of keys or content hashes, made into one sorted file of hashes.

A hash is the first 16 bytes of sha256. The file, little-endian: 8 bytes magic, u64 count n, the
upper halves u64[n] ascending, the lower halves u64[n] in the same order. It is memory-mapped, so
all workers of a node share it, and named by its own content.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from federation.model.recipe import ExcludeRule
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.exclude_lists import list_keys

_MAGIC = b"MSDEXCL1"
_HEADER_BYTES = 16
HASH_BYTES = 16
_SORTED_AT_ONCE = 1 << 22
"""Hashes that are sorted in memory: 64 MiB, and as much again while they are."""
_BUCKETS = 256

Halves = npt.NDArray[np.uint64]
"""Upper and lower half of each hash, big-endian order kept. Shape (hashes, 2)."""


def record_hash(content: bytes | memoryview) -> bytes:
    """Return the 16 bytes that stand for a key or a content in lists."""
    return hashlib.sha256(content).digest()[:HASH_BYTES]


class ExcludeList:
    """A mapped list.

    Args:
        path: Made by `build_exclude_list`.

    Raises:
        ConfigError: It is not there, or no such list.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"exclude list {path} cannot be read ({error}): submit the job anew"
            ) from error
        head = raw[:_HEADER_BYTES].tobytes()
        count = int.from_bytes(head[8:], "little")
        if head[:8] != _MAGIC or len(raw) != _HEADER_BYTES + HASH_BYTES * count:
            raise ConfigError(f"exclude list {path} is damaged: remove it and submit the job anew")
        numbers = raw[_HEADER_BYTES:].view("<u8")
        self._upper, self._lower = numbers[:count], numbers[count:]

    def __len__(self) -> int:
        return len(self._upper)

    def has(self, key: bytes) -> bool:
        """Tell whether a key or content is listed."""
        digest = record_hash(key)
        upper = np.uint64(int.from_bytes(digest[:8], "big"))
        lower = int.from_bytes(digest[8:], "big")
        at = int(np.searchsorted(self._upper, upper))
        while at < len(self._upper) and self._upper[at] == upper:
            if int(self._lower[at]) == lower:
                return True
            at += 1
        return False

    def are_listed(self, keys: Iterable[bytes]) -> npt.NDArray[np.bool_]:
        """Tell for each key or content whether it is listed. Shape (keys,)."""
        wanted = _halves(b"".join([record_hash(key) for key in keys]))
        found = np.zeros(len(wanted), dtype=np.bool_)
        if not len(self._upper):
            return found
        at = np.searchsorted(self._upper, wanted[:, 0])
        left = np.arange(len(wanted))
        while len(left):  # once, but for hashes that share their upper half
            inside = at[left] < len(self._upper)
            left = left[inside]
            same = self._upper[at[left]] == wanted[left, 0]
            left = left[same]
            found[left] |= self._lower[at[left]] == wanted[left, 1]
            at[left] += 1
        return found


def build_exclude_list(
    files: Sequence[str | Path],
    directory: Path,
    by: Literal["key", "content"] = "key",
    column: str = "",
) -> ExcludeRule:
    """Make one list of files of keys, or of hashes of contents; memory stays bounded.

    Args:
        files: Texts with one key a line (`.gz`, `.zst` and `.xz` too), or parquet files. By
            content a line is the sha256 of a record's text or bytes in hex, 32 digits at least.
        directory: Where the list is kept; an equal one that is there is used.
        by: What the lists name.
        column: Of parquet files; empty = their only one.

    Returns:
        The rule of a source's recipe.

    Raises:
        ConfigError: A list cannot be read, or a line of it is no hash.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exclude-", dir=directory) as scratch:
        try:
            hashes = _hashes(files, by, column)
            made, fingerprint = _sort(hashes, Path(scratch))
        except (CorruptRecordError, OSError) as error:
            told = error.message if isinstance(error, CorruptRecordError) else str(error)
            raise ConfigError(f"exclude: {told}: mend or leave out the list") from error
        path = directory / f"exclude-{fingerprint}.msdhashes"
        made.replace(path)
    return ExcludeRule(str(path), fingerprint, by)


def _hashes(files: Sequence[str | Path], by: str, column: str) -> Iterator[bytes]:
    for file in files:
        for place, key in enumerate(list_keys(str(file), column)):
            yield record_hash(key) if by == "key" else _listed_hash(str(file), place, key)


def _listed_hash(file: str, place: int, digits: bytes) -> bytes:
    try:
        found = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        found = b""
    if len(found) < HASH_BYTES:
        raise ConfigError(
            f"exclude: entry {place} of {file} is {digits[:40]!r}, not the sha256 of a content in "
            "at least 32 hex digits"
        )
    return found[:HASH_BYTES]


def _halves(joined: bytes) -> Halves:
    return np.frombuffer(joined, ">u8").astype(np.uint64).reshape(-1, 2)


def _sorted(hashes: Halves) -> Halves:
    """Return hashes in order, each once."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    hashes = hashes[order]
    is_new = np.ones(len(hashes), dtype=np.bool_)
    is_new[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    return hashes[is_new]


def _batches(hashes: Iterator[bytes]) -> Iterator[Halves]:
    batch: list[bytes] = []
    for one in hashes:
        batch.append(one)
        if len(batch) == 1 << 16:
            yield _halves(b"".join(batch))
            batch.clear()
    yield _halves(b"".join(batch))


def _sort(hashes: Iterator[bytes], scratch: Path) -> tuple[Path, str]:
    """Write the list of hashes; return where, and its fingerprint."""
    pending: list[Halves] = []
    count = 0
    spill: _Spill | None = None
    for batch in _batches(hashes):
        pending.append(batch)
        count += len(batch)
        if count > _SORTED_AT_ONCE:
            spill = spill or _Spill(scratch)
            spill.add(np.concatenate(pending))
            pending, count = [], 0
    rest = np.concatenate(pending) if pending else np.zeros((0, 2), dtype=np.uint64)
    if spill is None:
        return _write(iter([_sorted(rest)]), scratch)
    spill.add(rest)
    return _write(spill.buckets(), scratch)


class _Spill:
    """Hashes on disk, parted by their first byte."""

    def __init__(self, scratch: Path) -> None:
        self._files = [scratch / f"bucket-{number:03d}" for number in range(_BUCKETS)]

    def add(self, hashes: Halves) -> None:
        """Append hashes to their buckets."""
        hashes = _sorted(hashes)
        firsts = (hashes[:, 0] >> np.uint64(56)).astype(np.int64)
        bounds = np.searchsorted(firsts, np.arange(_BUCKETS + 1))
        for number, path in enumerate(self._files):
            part = hashes[bounds[number] : bounds[number + 1]]
            if len(part):
                with path.open("ab") as file:
                    file.write(part.tobytes())

    def buckets(self) -> Iterator[Halves]:
        """Yield the buckets in order, each sorted."""
        for path in self._files:
            if path.exists():
                raw = np.frombuffer(path.read_bytes(), np.uint64).reshape(-1, 2)
                path.unlink()
                yield _sorted(raw)


def _write(parts: Iterator[Halves], scratch: Path) -> tuple[Path, str]:
    path, lower_path = scratch / "list", scratch / "lower"
    count = 0
    with path.open("w+b") as file, lower_path.open("w+b") as lower:
        file.write(bytes(_HEADER_BYTES))
        for part in parts:
            file.write(part[:, 0].astype("<u8").tobytes())
            lower.write(part[:, 1].astype("<u8").tobytes())
            count += len(part)
        lower.seek(0)
        while piece := lower.read(1 << 20):
            file.write(piece)
        file.seek(0)
        file.write(_MAGIC + count.to_bytes(8, "little"))
        file.flush()
        os.fsync(file.fileno())
        fingerprint = _digest(file)
    return path, fingerprint


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()[:32]
