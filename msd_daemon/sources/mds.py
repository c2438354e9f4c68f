"""MosaicML MDS (format version 2), read by index.json and the shards' own headers.

A shard, little-endian: u32 samples n, u32 offsets[n + 1] from the shard's start, the columns as
JSON, the samples. The format's own offsets have 32 bits, so a shard ends below 4 GiB. Raw shards
are read sample by sample, blocks are runs of samples capped in number and bytes; a compressed shard
is one block, unpacked as it is read. Hashes that index.json lists are checked before first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import ConfigError, CorruptRecordError, MsdError
from msd_daemon.sources.byte_stream import ByteFile
from msd_daemon.sources.file_hash import hash_fault
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.mds_index import (
    INDEX,
    MdsShard,
    companion_files,
    dataset_shards,
    read_index,
)
from msd_daemon.sources.mds_values import SampleReader
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.seekable_shards import (
    Tables,
    block_extent,
    check_offsets,
    check_table,
    cut_records,
    extent_fault,
)
from msd_daemon.sources.shard_file import open_shard
from msd_daemon.sources.unpacked import Unpacked

_TOO_LARGE = int(RecordStatus.TOO_LARGE)
_UNREADABLE = int(RecordStatus.UNREADABLE)
_OFFSETS_MAX = (1 << 32) - 1
_INDEXES_MAX = 64

Offsets = npt.NDArray[np.int64]


def open_mds(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> MdsFormat:
    """Return the reader of a source of MDS shards.

    Raises:
        ConfigError: A column that is wanted is pickled, or of an unknown encoding.
    """
    opened = MdsFormat(spec, columns, meter)
    if spec.shards:
        with suppress(CorruptRecordError, OSError):  # told where its records are read
            SampleReader(opened.described(spec.shards[0]).columns, columns)
    return opened


class MdsFormat:
    """Samples of MDS shards as fields.

    Args:
        spec: The source.
        columns: Those that are wanted, None for all.
        meter: Counts what is read.
    """

    def __init__(self, spec: SourceSpec, columns: Columns, meter: ReadMeter) -> None:
        self._columns = columns
        self._meter = meter
        self._rule = spec.shuffle
        self._record_bytes_max = spec.record_bytes_max
        self._indexes: Tables[dict[str, MdsShard]] = Tables(_INDEXES_MAX)
        self._starts: Tables[npt.NDArray[np.int64]] = Tables(2 * spec.shuffle.window_shards)

    def described(self, shard: Shard) -> MdsShard:
        """Return what index.json says of a shard.

        Raises:
            CorruptRecordError: There is no index.json beside it, or it does not list it.
            OSError: It cannot be read.
        """
        folder, _, name = shard.path.rpartition("/")
        for _ in range(2):  # its own folder's, else the parent's, which lists several streams
            found = self._indexes.get(f"{folder}/{INDEX}", partial(_try_index, f"{folder}/{INDEX}"))
            if name in found:
                return found[name]
            folder, _, outer = folder.rpartition("/")
            name = f"{outer}/{name}"
        raise CorruptRecordError(
            f"{shard.path} is listed by no {INDEX} beside it: restore it", shard=shard.path
        )

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the blocks of a shard and its samples.

        Raises:
            CorruptRecordError: It is not as index.json says.
            OSError: It cannot be read.
        """
        described = self.described(shard)
        file = self._open(shard, described)
        try:
            return len(self._block_starts(shard, described, file)) - 1, described.samples
        finally:
            file.close()

    def count_lost(self, shard: Shard) -> int | None:
        """Return the samples of a shard that cannot be opened, as index.json tells them."""
        try:
            return self.described(shard).samples
        except (MsdError, OSError):
            return None

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the samples of a block; damage of the shard is one unreadable record."""
        samples: int | None = None
        try:
            described = self.described(shard)
            samples = described.samples
            reader = SampleReader(described.columns, self._columns)
            file = self._open(shard, described)
        except (CorruptRecordError, OSError) as error:
            yield lost_shard(error, samples)
            return
        except ConfigError as error:
            yield lost_shard(CorruptRecordError(f"{shard.path}: {error.message}"), samples)
            return
        place = 0
        try:
            if self._is_packed(shard, described):
                found = self._unpacked(file, described, reader)
            else:
                starts = self._block_starts(shard, described, file)
                first, last = block_extent(shard, starts, block)
                place = first
                found = self._raw(file, reader, first, last)
            for record in found:
                yield record
                place = record.place + 1
        except (CorruptRecordError, OSError) as error:
            yield unreadable(place, error)
        finally:
            file.close()

    def _is_packed(self, shard: Shard, described: MdsShard) -> bool:
        return described.packed is not None and shard.path.endswith(described.packed.name)

    def _open(self, shard: Shard, described: MdsShard) -> ByteFile:
        """Open a shard and check its size and, at its first use, its hash."""
        file = open_shard(shard, self._meter)
        try:
            is_packed = self._is_packed(shard, described)
            stated = described.packed if is_packed and described.packed else described.raw
            if file.size_bytes != stated.size_bytes:
                raise _fault(
                    shard.path,
                    f"has {file.size_bytes} bytes, index.json says {stated.size_bytes}: restore it",
                )
            if described.raw.size_bytes > _OFFSETS_MAX:
                raise _fault(
                    shard.path,
                    f"has {described.raw.size_bytes} raw bytes, beyond the format's 32-bit offsets",
                )
            if is_packed or self._starts.peek(shard.path) is None:
                fault = hash_fault(file, stated.hashes)
                if fault:
                    raise _fault(shard.path, f"{fault}: restore it")
        except BaseException:
            file.close()
            raise
        return file

    def _block_starts(
        self, shard: Shard, described: MdsShard, file: ByteFile
    ) -> npt.NDArray[np.int64]:
        if self._is_packed(shard, described):
            return np.array([0, described.samples], dtype=np.int64)

        def find() -> npt.NDArray[np.int64]:
            offsets = _read_offsets(file, described)
            return cut_records(np.maximum.accumulate(offsets), self._rule)

        return self._starts.get(shard.path, find)

    def _raw(
        self, file: ByteFile, reader: SampleReader, first: int, last: int
    ) -> Iterator[RawRecord]:
        head = file.read_at(4 + 4 * first, 4 * (last - first + 1))
        offsets = np.frombuffer(head, "<u4").astype(np.int64)
        for number in range(last - first):
            begin, end = int(offsets[number]), int(offsets[number + 1])
            fault = extent_fault(
                first + number, (begin, end), file.size_bytes, self._record_bytes_max
            )
            if fault is not None:
                yield fault
                continue
            data = file.read_at(begin, end - begin)
            if len(data) < end - begin:
                raise _fault(file.path, f"ends at byte {begin + len(data)}, it was cut just now")
            yield reader.record(data, first + number)

    def _unpacked(
        self, file: ByteFile, described: MdsShard, reader: SampleReader
    ) -> Iterator[RawRecord]:
        raw = Unpacked(file, described.compression, described.raw.size_bytes)
        head = raw.take(check_table(file.path, described.samples, described.raw.size_bytes))
        offsets = _checked_offsets(file.path, head, described)
        at = len(head)
        for number in range(described.samples):
            begin, end = int(offsets[number]), int(offsets[number + 1])
            fault = extent_fault(
                number, (begin, end), described.raw.size_bytes, self._record_bytes_max
            )
            if fault is not None and (fault.status != _TOO_LARGE or begin < at):
                yield fault
                continue
            if begin < at:
                yield RawRecord(number, b"", _UNREADABLE, f"begins at {begin}, inside the last one")
                continue
            raw.skip(begin - at)
            at = begin
            if fault is not None:
                yield fault
                continue
            data = raw.take(end - begin)
            at = end
            yield reader.record(data, number)


def _try_index(path: str) -> dict[str, MdsShard]:
    try:
        return read_index(path)
    except FileNotFoundError:
        return {}


def _read_offsets(file: ByteFile, described: MdsShard) -> Offsets:
    table_bytes = check_table(file.path, described.samples, file.size_bytes)
    return _checked_offsets(file.path, file.read_at(0, table_bytes), described)


def _checked_offsets(path: str, head: bytes, described: MdsShard) -> Offsets:
    """Return where each sample begins, and the last one ends. Shape (samples + 1,)."""
    return check_offsets(path, head, described.samples, described.raw.size_bytes, is_exact=True)


def _fault(path: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(f"{path} {what}", shard=path)


__all__ = ["MdsFormat", "companion_files", "dataset_shards", "open_mds"]
