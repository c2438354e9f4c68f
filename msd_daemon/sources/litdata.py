"""LitData chunks, read by index.json and the chunks' own headers (LitData itself needs torch).

Blocks are runs of samples capped in number and bytes, of frames where a chunk is framed, of rows
where it holds an Arrow file; a chunk that is compressed as a whole is one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise

import numpy as np

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import ConfigError, CorruptRecordError, MsdError
from msd_daemon.sources.arrow_fields import block_rows, blocks_of
from msd_daemon.sources.arrow_file import OpenArrow
from msd_daemon.sources.arrow_messages import Messages
from msd_daemon.sources.byte_stream import ByteFile
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.litdata_chunk import (
    FRAME_BYTES_MAX,
    ChunkLayout,
    read_layout,
    unpack_frame,
)
from msd_daemon.sources.litdata_index import (
    LitDataChunk,
    LitDataIndex,
    companion_files,
    dataset_shards,
    read_index,
)
from msd_daemon.sources.litdata_values import ItemReader
from msd_daemon.sources.mds_index import INDEX
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.seekable_shards import (
    Tables,
    block_extent,
    check_offsets,
    check_table,
    extent_fault,
)
from msd_daemon.sources.shard_file import open_shard
from msd_daemon.sources.unpacked import Unpacked

_TOO_LARGE = int(RecordStatus.TOO_LARGE)
_UNREADABLE = int(RecordStatus.UNREADABLE)
_INDEXES_MAX = 64


def open_litdata(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> LitDataFormat:
    """Return the reader of a source of LitData chunks.

    Raises:
        ConfigError: A field that is wanted is pickled, or the chunks are of a kind that is not read.
    """
    opened = LitDataFormat(spec, columns, meter)
    if spec.shards:
        with suppress(CorruptRecordError, OSError):  # told where its records are read
            opened.check(spec.shards[0])
    return opened


class LitDataFormat:
    """Samples of LitData chunks as fields.

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
        self._indexes: Tables[LitDataIndex] = Tables(_INDEXES_MAX)
        self._layouts: Tables[ChunkLayout] = Tables(2 * spec.shuffle.window_shards)
        self._messages: Tables[Messages] = Tables(2 * spec.shuffle.window_shards)

    def check(self, shard: Shard) -> None:
        """Refuse fields that are wanted and cannot be read.

        Raises:
            ConfigError: There are such.
            CorruptRecordError: index.json is damaged.
            OSError: It cannot be read.
        """
        index, _ = self._described(shard)
        self._reader(index)

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the blocks of a chunk and its samples.

        Raises:
            ConfigError: Its folder holds chunks of a kind that is not read.
            CorruptRecordError: It is not as index.json says.
            OSError: It cannot be read.
        """
        index, chunk = self._described(shard)
        file = open_shard(shard, self._meter)
        try:
            layout = self._layout(shard, index, chunk, file)
        finally:
            file.close()
        if layout.kind == "rows":
            with self._open_rows(shard, layout) as opened:
                return len(blocks_of(opened, self._rule)), opened.messages.rows
        return len(layout.starts) - 1, chunk.items

    def count_lost(self, shard: Shard) -> int | None:
        """Return the samples of a shard that cannot be opened, as index.json tells them."""
        try:
            return self._described(shard)[1].items
        except (MsdError, OSError):
            return None

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the samples of a block; damage of the chunk is one unreadable record."""
        items: int | None = None
        try:
            index, chunk = self._described(shard)
            items = chunk.items
            reader = self._reader(index)
            file = open_shard(shard, self._meter)
        except (CorruptRecordError, OSError) as error:
            yield lost_shard(error, items)
            return
        except ConfigError as error:
            yield lost_shard(CorruptRecordError(f"{shard.path}: {error.message}"), items)
            return
        place = 0
        try:
            layout = self._layout(shard, index, chunk, file)
            place = 0 if layout.kind == "rows" else block_extent(shard, layout.starts, block)[0]
            for record in self._block(shard, index, chunk, file, layout, reader, block):
                yield record
                place = record.place + 1
        except (CorruptRecordError, OSError) as error:
            yield unreadable(place, error) if place or block else lost_shard(error, items)
        finally:
            file.close()

    def _block(
        self,
        shard: Shard,
        index: LitDataIndex,
        chunk: LitDataChunk,
        file: ByteFile,
        layout: ChunkLayout,
        reader: ItemReader,
        block: int,
    ) -> Iterator[RawRecord]:
        if layout.kind == "rows":
            return self._rows(shard, layout, block)
        if layout.kind == "packed":
            return self._packed(file, chunk, reader)
        if layout.kind == "framed":
            return self._framed(file, layout, reader, block)
        return self._classic(file, index, layout, reader, block)

    def _described(self, shard: Shard) -> tuple[LitDataIndex, LitDataChunk]:
        folder, _, name = shard.path.rpartition("/")
        index = self._indexes.get(folder, partial(read_index, f"{folder}/{INDEX}"))
        chunk = index.chunks.get(name)
        if chunk is None:
            raise CorruptRecordError(
                f"{shard.path} is not listed by the {INDEX} beside it: restore it", shard=shard.path
            )
        return index, chunk

    def _reader(self, index: LitDataIndex) -> ItemReader:
        return ItemReader(
            list(index.leaf_formats), index.tree, is_tokens=index.is_tokens, wanted=self._columns
        )

    def _layout(
        self, shard: Shard, index: LitDataIndex, chunk: LitDataChunk, file: ByteFile
    ) -> ChunkLayout:
        return self._layouts.get(shard.path, lambda: self._find_layout(index, chunk, file))

    def _find_layout(self, index: LitDataIndex, chunk: LitDataChunk, file: ByteFile) -> ChunkLayout:
        if index.compression and index.level == "chunk":
            return ChunkLayout("packed", np.array([0, chunk.items]))
        if file.size_bytes != chunk.raw_bytes:
            raise CorruptRecordError(
                f"{file.path} has {file.size_bytes} bytes, {INDEX} says {chunk.raw_bytes}: restore "
                "it",
                shard=file.path,
            )
        return read_layout(file, chunk.items, self._rule)

    def _open_rows(self, shard: Shard, layout: ChunkLayout) -> OpenArrow:
        known = self._messages.peek(shard.path)
        opened = OpenArrow(shard, self._meter, layout.window, known)
        self._messages.get(shard.path, lambda: opened.messages)
        return opened

    def _rows(self, shard: Shard, layout: ChunkLayout, block: int) -> Iterator[RawRecord]:
        with self._open_rows(shard, layout) as opened:
            blocks = blocks_of(opened, self._rule)
            limit = self._record_bytes_max
            yield from block_rows(opened, blocks, block, self._columns, limit, self._meter)

    def _classic(
        self,
        file: ByteFile,
        index: LitDataIndex,
        layout: ChunkLayout,
        reader: ItemReader,
        block: int,
    ) -> Iterator[RawRecord]:
        first, last = layout.starts[block : block + 2].tolist()
        head = file.read_at(layout.offsets_at + 4 * first, 4 * (last - first + 1))
        offsets = np.frombuffer(head, "<u4").astype(np.int64).tolist()
        for number, (begin, end) in enumerate(pairwise(offsets), first):
            fault = extent_fault(number, (begin, end), file.size_bytes, self._record_bytes_max)
            if fault is not None:
                yield fault
                continue
            data = file.read_at(begin, end - begin)
            if index.compression and index.level == "sample":
                try:
                    data = unpack_frame(file.path, data, self._record_bytes_max)
                except CorruptRecordError as error:
                    yield RawRecord(number, b"", _UNREADABLE, error.message)
                    continue
            yield reader.record(data, number)

    def _framed(
        self, file: ByteFile, layout: ChunkLayout, reader: ItemReader, block: int
    ) -> Iterator[RawRecord]:
        for frame in layout.frames[layout.first_frames[block] : layout.first_frames[block + 1]]:
            first, items = int(frame["first"]), int(frame["items"])
            head = file.read_at(layout.offsets_at + 4 * first, 4 * (items + 1))
            offsets = np.frombuffer(head, "<u4").astype(np.int64)
            raw = unpack_frame(
                file.path, file.read_at(int(frame["offset"]), int(frame["bytes"])), FRAME_BYTES_MAX
            )
            if len(raw) != int(frame["raw_bytes"]):
                raise CorruptRecordError(
                    f"{file.path} has a frame of {len(raw)} bytes, its table says "
                    f"{int(frame['raw_bytes'])}",
                    shard=file.path,
                )
            bounds = (offsets - offsets[0]).tolist()
            for number, (begin, end) in enumerate(pairwise(bounds), first):
                fault = extent_fault(number, (begin, end), len(raw), self._record_bytes_max)
                yield fault or reader.record(raw[begin:end], number)

    def _packed(
        self, file: ByteFile, chunk: LitDataChunk, reader: ItemReader
    ) -> Iterator[RawRecord]:
        raw = Unpacked(file, "zstd", chunk.raw_bytes)
        head = raw.take(check_table(file.path, chunk.items, chunk.raw_bytes))
        offsets = check_offsets(file.path, head, chunk.items, chunk.raw_bytes).tolist()
        at = len(head)
        for number, (begin, end) in enumerate(pairwise(offsets)):
            fault = extent_fault(number, (begin, end), chunk.raw_bytes, self._record_bytes_max)
            if begin < at:
                fault = RawRecord(number, b"", _UNREADABLE, f"lies at {begin}, inside another one")
            if fault is not None:
                yield fault
                continue
            raw.skip(begin - at)
            yield reader.record(raw.take(end - begin), number)
            at = end


__all__ = ["LitDataFormat", "companion_files", "dataset_shards", "open_litdata"]
