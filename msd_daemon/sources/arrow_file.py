"""An open Arrow IPC file or stream: record batches by number, read through a memory map.

What lies uncompressed is never copied whole: a batch of gigabytes costs the rows that are looked
at. Compressed batches, and those with dictionaries, are decoded one at a time, up to a limit.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any, Self

from federation.model.job import Shard
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.arrow_messages import Message, Messages, read_messages
from msd_daemon.sources.parquet_file import arrow_modules
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_shard

DECODED_BYTES_MAX = 1 << 30
"""Of a compressed batch, or one with dictionaries, together with those."""
_FEATHER_V1 = b"FEA1"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OpenArrow:
    """An open Arrow file or stream; every failure leaves it as CorruptRecordError.

    Raises:
        CorruptRecordError: It is none, or its schema cannot be read.
        OSError: It cannot be opened.
    """

    def __init__(self, shard: Shard, meter: ReadMeter, data: Any = None) -> None:
        self._path = shard.path
        self._meter = meter
        self._arrow, _ = arrow_modules()
        self._source: Any = None
        if data is None:
            open_shard(shard, ReadMeter()).close()
            if os.path.getsize(shard.path) == 0:
                raise self.fault("is empty, no Arrow file or stream")
            self._source = self._arrow.memory_map(shard.path)
            data = self._source.read_buffer()
        self._data = data
        self._view = memoryview(data)
        if bytes(self._view[:4]) == _FEATHER_V1:
            raise self.fault(
                "is a Feather V1 file, which is not read (pyarrow crashes on damaged ones): "
                "write it anew as V2"
            )
        self.messages: Messages = read_messages(self._view)
        self.schema: Any = self._schema()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the map goes with the last row that looks into it."""
        self._view = memoryview(b"")
        if self._source is not None:
            self._source.close()

    @property
    def can_split(self) -> bool:
        """True where some rows of a batch can be read without the others."""
        return not self.messages.is_compressed and not self.messages.dictionaries

    def batches(self, begin: int, end: int, columns: list[str]) -> Iterator[Any]:
        """Yield the record batches [begin, end) with just some columns, validated but for contents.

        Raises:
            CorruptRecordError: One is damaged, or too large to decode.
        """
        try:
            found = (
                self._mapped(begin, end) if self.can_split else self._decoded(begin, end, columns)
            )
            for batch in found:
                batch = batch.select(columns)
                batch.validate()
                yield batch
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.fault(
                f"is damaged in batches {begin} to {end - 1} ({_short(error)})"
            ) from error

    def fault(self, what: str) -> CorruptRecordError:
        """Return the error of this shard."""
        return CorruptRecordError(f"{self._path} {what}", shard=self._path)

    def _schema(self) -> Any:
        message = self.messages.schema
        if message is None:
            damage = self.messages.damage or "holds no schema"
            raise self.fault(f"is no Arrow file or stream: it {damage}")
        try:
            schema = self._arrow.ipc.read_schema(self._arrow.BufferReader(self._slice(message)))
            schema.names  # noqa: B018 - raises where a name is not UTF-8
            return schema
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.fault(f"has a schema that cannot be read ({_short(error)})") from error

    def _slice(self, message: Message) -> Any:
        return self._data.slice(message.offset, message.end - message.offset)

    def _mapped(self, begin: int, end: int) -> Iterator[Any]:
        ipc = self._arrow.ipc
        for number in range(begin, end):
            message = self.messages.batch(number)
            self._meter.read_bytes += message.header_bytes
            read = ipc.read_message(self._arrow.BufferReader(self._slice(message)))
            yield ipc.read_record_batch(read, self.schema)

    def _decoded(self, begin: int, end: int, columns: list[str]) -> Iterator[Any]:
        if begin == end:
            return
        wanted = [self.schema.get_field_index(name) for name in columns]
        parts = self._parts(begin, end)
        for part in parts:
            self._meter.read_bytes += part.end - part.offset
        file = _Pieces([self._view[part.offset : part.end] for part in parts])
        options = self._arrow.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        reader = self._arrow.ipc.open_stream(
            self._arrow.PythonFile(file, mode="r"), options=options
        )
        yield from reader

    def _parts(self, begin: int, end: int) -> list[Message]:
        """Return schema, the dictionaries that hold, and the batches, as a stream has them."""
        messages = self.messages
        assert messages.schema is not None
        batches = [messages.batch(number) for number in range(begin, end)]
        if messages.has_footer:
            dictionaries = messages.dictionaries
            parts = [*dictionaries, *batches]
        else:
            first, last = batches[0].offset, batches[-1].offset
            dictionaries = _holding([d for d in messages.dictionaries if d.offset < first])
            later = [d for d in messages.dictionaries if first < d.offset < last]
            parts = [*dictionaries, *sorted([*batches, *later], key=lambda part: part.offset)]
        sizes = sum(part.raw_bytes for part in dictionaries)
        largest = max(batches, key=lambda part: part.raw_bytes)
        if sizes + largest.raw_bytes > DECODED_BYTES_MAX:
            raise self.fault(
                f"has a batch at byte {largest.offset} of {largest.raw_bytes} bytes with "
                f"{sizes} bytes of dictionaries, at most {DECODED_BYTES_MAX} are decoded: write "
                "it anew in smaller batches"
            )
        return [messages.schema, *parts]


def _holding(dictionaries: list[Message]) -> list[Message]:
    """Return those that are not replaced by a later one of the same number."""
    last = {d.dictionary: place for place, d in enumerate(dictionaries) if not d.is_delta}
    return [d for place, d in enumerate(dictionaries) if place >= last.get(d.dictionary, 0)]


class _Pieces(io.RawIOBase):
    """Pieces of a map, read one behind the other and ended as a stream."""

    def __init__(self, pieces: list[memoryview]) -> None:
        super().__init__()
        self._pieces = [*pieces, memoryview(_END)]

    def readable(self) -> bool:
        return True

    def read(self, count: int = -1, /) -> bytes:
        wanted = count if count >= 0 else sum(len(piece) for piece in self._pieces)
        taken: list[memoryview] = []
        while self._pieces and wanted:
            piece = self._pieces[0][:wanted]
            rest = self._pieces[0][len(piece) :]
            self._pieces[:1] = [rest] if len(rest) else []
            taken.append(piece)
            wanted -= len(piece)
        return b"".join(taken)


def _short(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:200]
