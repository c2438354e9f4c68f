"""The index of a shard: where its blocks begin and where decompression can start. Made anew freely.

Content-addressed: the file's name is made of the shard's fingerprint and what the blocks depend on,
so nodes may share a folder. Written by temp + fsync + rename, read by memory map, checked by
crc32 and by the shard's size and mtime; whatever does not fit is ignored and written again. The
stream never depends on it: it only saves reading (E2).
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from federation.model.job import Shard, SourceSpec
from msd_daemon.sources.byte_stream import START, SeekPoint
from msd_daemon.sources.shared_indexes import shared_indexes
from msd_daemon.stores.urls import is_url

_MAGIC = b"MSDINDEX"
_VERSION = 1
_HEADER = struct.Struct("<8sIIqqqqq16s")  # magic, version, crc, size, mtime, records, n, m, zero
_POINT_SPACING_BYTES = 256 * 1024  # decompressed; closer members gain nothing

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardIndex:
    """What is known of a shard."""

    records: int
    """Records of the shard, damage included; -1 where they are not counted (older indexes)."""
    starts: Ids
    """Streams: decompressed byte offset of each block's first record. Shape (blocks,).
    Megatron: first document of each block and the document count at the end. Parquet: row groups,
    one zero each."""
    seek_points: tuple[SeekPoint, ...]

    def point_before(self, offset: int) -> SeekPoint:
        """Return the last place at or before a decompressed offset where reading can start."""
        best = START
        for point in self.seek_points:
            if point.decompressed <= offset:
                best = point
        return best


class IndexStore:
    """Indexes of one source's shards in a folder; without a folder it knows none and keeps none."""

    def __init__(self, directory: Path | None, spec: SourceSpec) -> None:
        self._directory = directory
        self._shared = None if directory is None else shared_indexes()
        self._absent: set[str] = set()
        """Names that the shared place was asked for in vain."""
        self._format = spec.format
        rule = spec.shuffle
        depends_on = (
            _VERSION,
            spec.format,
            spec.compression,
            spec.text_document,
            rule.stream_block_records,
            rule.block_records,
            rule.block_bytes,
            spec.record_bytes_max,
        )
        self._rule = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:12]

    def path(self, shard: Shard) -> Path | None:
        """Return where the index of a shard lies or would lie."""
        if self._directory is None:
            return None
        return self._directory / f"{self._format}-{shard.fingerprint}-{self._rule}.msdindex"

    def records_of_lost(self, shard: Shard) -> int | None:
        """Return how many records a shard had that cannot be opened now, None where unknown."""
        index = self._of_lost(shard)
        return None if index is None or index.records < 0 else index.records

    def blocks_of_lost(self, shard: Shard) -> int | None:
        """Return how many blocks such a shard of a seekable source had, None where unknown."""
        index = self._of_lost(shard)
        if index is None:
            return None
        return max(len(index.starts) - (self._format == "megatron"), 1)

    def _of_lost(self, shard: Shard) -> ShardIndex | None:
        path = self.path(shard)
        if path is None:
            return None
        try:
            raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        except (OSError, ValueError):
            return None
        return _decode(raw, shard.size_bytes, None)

    def load(self, shard: Shard) -> ShardIndex | None:
        """Return the index of a shard, None where there is none that fits."""
        path = self.path(shard)
        if path is None:
            return None
        try:
            size_bytes, mtime_ns = _stat(shard)
        except OSError:
            return None
        found = _read(path, size_bytes, mtime_ns)
        if found is None and self._take_shared(path, size_bytes, mtime_ns):
            found = _read(path, size_bytes, mtime_ns)
        return found

    def _take_shared(self, path: Path, size_bytes: int, mtime_ns: int) -> bool:
        """Copy an index from the shared place; True where it is there and fits."""
        if self._shared is None or path.name in self._absent:
            return False
        content = self._shared.get(path.name)
        if (
            content is None
            or _decode(np.frombuffer(content, np.uint8), size_bytes, mtime_ns) is None
        ):
            self._absent.add(path.name)
            return False
        with suppress(OSError):
            write_durably(path, content)
            return True
        return False

    def save(
        self, shard: Shard, records: int, starts: Sequence[int] | Ids, points: list[SeekPoint]
    ) -> None:
        """Write the index of a shard; a folder that cannot be written to is no fault."""
        path = self.path(shard)
        if path is None:
            return
        with suppress(OSError):
            content = _encode(*_stat(shard), records, starts, _thin(points))
            write_durably(path, content)
            if self._shared is not None:
                self._shared.put(path.name, path)

    def discard(self, shard: Shard) -> None:
        """Remove the index of a shard that turned out to be wrong."""
        path = self.path(shard)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _read(path: Path, size_bytes: int, mtime_ns: int) -> ShardIndex | None:
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError):
        return None
    return _decode(raw, size_bytes, mtime_ns)


def _stat(shard: Shard) -> tuple[int, int]:
    """Return size and mtime of a shard; an object's fingerprint holds its ETag, which does for both.

    Raises:
        OSError: There is no such file.
    """
    if is_url(shard.path):
        return shard.size_bytes, 0
    status = os.stat(shard.path)
    return status.st_size, status.st_mtime_ns


def _thin(points: list[SeekPoint]) -> list[SeekPoint]:
    kept: list[SeekPoint] = []
    for point in points:
        if not kept or point.decompressed - kept[-1].decompressed >= _POINT_SPACING_BYTES:
            kept.append(point)
    return kept


def _encode(
    size_bytes: int,
    mtime_ns: int,
    records: int,
    starts: Sequence[int] | Ids,
    points: list[SeekPoint],
) -> bytes:
    columns = np.asarray(starts, dtype="<i8").tobytes()
    columns += np.asarray(points, dtype="<i8").tobytes()

    def header(crc: int) -> bytes:
        counts = (size_bytes, mtime_ns, records, len(starts), len(points))
        return _HEADER.pack(_MAGIC, _VERSION, crc, *counts, b"")

    return header(zlib.crc32(columns, zlib.crc32(header(0)))) + columns


def _decode(raw: npt.NDArray[np.uint8], size_bytes: int, mtime_ns: int | None) -> ShardIndex | None:
    if len(raw) < _HEADER.size:
        return None
    magic, version, crc, size_seen, mtime_seen, records, count, points, _ = _HEADER.unpack(
        raw[: _HEADER.size].tobytes()
    )
    if (magic, version, size_seen) != (_MAGIC, _VERSION, size_bytes):
        return None
    if mtime_ns is not None and mtime_seen != mtime_ns:
        return None
    columns = raw[_HEADER.size :]
    if min(count, points) < 0 or len(columns) != 8 * count + 16 * points:
        return None
    header = _HEADER.pack(_MAGIC, _VERSION, 0, size_seen, mtime_seen, records, count, points, b"")
    if zlib.crc32(columns.data, zlib.crc32(header)) != crc:
        return None
    pairs = columns[8 * count :].view("<i8").reshape(-1, 2).tolist()
    return ShardIndex(
        int(records),
        columns[: 8 * count].view("<i8"),
        tuple(SeekPoint(compressed, decompressed) for compressed, decompressed in pairs),
    )


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whoever dies.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OSError: It cannot be.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
