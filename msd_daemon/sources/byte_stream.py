"""Byte streams of shards: plain, gzip (many members) and xz (many streams); zstd has its own file.

A stream gives every byte before a damage, then raises CorruptRecordError once. What it gives does
not depend on where in the file it was opened or on how the file was read, so that a resume from a
seek point sees the same records. Output is bounded a call, whatever the input expands to.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.record import ReadMeter

INPUT_BYTES = 64 * 1024
OUTPUT_BYTES = 256 * 1024
XZ_MEMORY_BYTES_MAX = 192 << 20  # xz -9 needs 65 MiB; a hostile dictionary may ask for 4 GiB

GZIP_MAGIC = b"\x1f\x8b"
XZ_MAGIC = b"\xfd7zXZ\x00"


class SeekPoint(NamedTuple):
    """A place where decompression can begin: the start of a member, frame or stream."""

    compressed: int
    decompressed: int


START = SeekPoint(0, 0)


class ByteStream(Protocol):
    """Decompressed bytes of a shard, in order."""

    @property
    def seek_points(self) -> list[SeekPoint]:
        """Members begun so far, the first one included."""
        ...

    def read(self) -> bytes:
        """Return the next bytes, empty at the end.

        Raises:
            CorruptRecordError: Damage; all bytes before it were given.
        """
        ...


class ByteFile(Protocol):
    """An open shard, here or in a store, read by position; the caller closes it."""

    path: str
    size_bytes: int

    def read_at(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes at an offset, fewer only at the end of the file.

        Raises:
            CorruptRecordError: It has changed since the manifest was frozen (stores).
            OSError: It cannot be read.
            StoreError: A store did not answer.
        """
        ...

    def advise(self, offset: int, count: int) -> None:
        """Say which bytes are read next, and that those behind them may not be."""
        ...

    def close(self) -> None:
        """Close it; calling again does nothing."""
        ...


class ShardFile:
    """An open shard on this machine, read by position; the caller closes it.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | Path, meter: ReadMeter) -> None:
        self.path = str(path)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.size_bytes = os.fstat(self._descriptor).st_size
        self._meter = meter

    @property
    def descriptor(self) -> int:
        """The file descriptor, owned by this object."""
        return self._descriptor

    def read_at(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes at an offset, fewer only at the end of the file."""
        data = os.pread(self._descriptor, count, offset)
        while 0 < len(data) < count:
            more = os.pread(self._descriptor, count - len(data), offset + len(data))
            if not more:
                break
            data += more
        self._meter.read_bytes += len(data)
        return data

    def advise(self, offset: int, count: int) -> None:
        """Do nothing: the kernel reads ahead."""

    def close(self) -> None:
        """Close the descriptor; calling again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class PlainStream:
    """The bytes of a file as they lie."""

    def __init__(self, file: ByteFile, start: SeekPoint = START) -> None:
        self._file = file
        self._offset = start.compressed
        self.seek_points = [start]

    def read(self) -> bytes:
        """Return the next bytes, empty at the end."""
        data = self._file.read_at(self._offset, OUTPUT_BYTES)
        self._offset += len(data)
        return data

    def skip(self, count: int) -> int:
        """Go on without reading and return how many bytes were skipped, fewer at the end."""
        skipped = max(0, min(count, self._file.size_bytes - self._offset))
        self._offset += skipped
        return skipped


class _Decoder(Protocol):
    """One gzip member or xz stream being decoded."""

    def decode(self, data: bytes) -> bytes: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def is_end(self) -> bool: ...

    @property
    def unused(self) -> bytes: ...


class _GzipDecoder:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)

    def decode(self, data: bytes) -> bytes:
        tail = self._inflate.unconsumed_tail
        return self._inflate.decompress(tail + data if tail else data, OUTPUT_BYTES)

    @property
    def needs_input(self) -> bool:
        return not self._inflate.unconsumed_tail

    @property
    def is_end(self) -> bool:
        return self._inflate.eof

    @property
    def unused(self) -> bytes:
        return self._inflate.unused_data


class _XzDecoder:
    def __init__(self) -> None:
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES_MAX)

    def decode(self, data: bytes) -> bytes:
        return self._decoder.decompress(data, OUTPUT_BYTES)

    @property
    def needs_input(self) -> bool:
        return self._decoder.needs_input

    @property
    def is_end(self) -> bool:
        return self._decoder.eof

    @property
    def unused(self) -> bytes:
        return self._decoder.unused_data


class MemberStream:
    """A file of concatenated gzip members or xz streams.

    Args:
        file: The shard.
        name: "gzip" or "xz", for messages and to pick the decoder.
        start: A member's start.
    """

    def __init__(self, file: ByteFile, name: str, start: SeekPoint = START) -> None:
        self._file = file
        self._name = name
        self._magic, self._make = _CODECS[name]
        self._next = start.compressed  # next input byte
        self._produced = start.decompressed
        self._decoder: _Decoder | None = None
        self._member = start
        self._piece_start = start.compressed
        self._piece_produced = start.decompressed
        self._damage: CorruptRecordError | None = None
        self.seek_points: list[SeekPoint] = []

    def read(self) -> bytes:
        """Return the next bytes, empty at the end.

        Raises:
            CorruptRecordError: A member is cut, fails its check, or is followed by something else.
        """
        while True:
            if self._damage is not None:
                raise self._damage
            if self._decoder is None:
                if not self._begin_member():
                    return b""
                assert self._decoder is not None
            data = self._step(self._decoder)
            if data:
                self._produced += len(data)
                return data

    def _begin_member(self) -> bool:
        self._skip_padding()
        magic = self._file.read_at(self._next, len(self._magic))
        if not magic:
            return False
        if magic != self._magic:
            self._fail(self._next, f"is followed by bytes that are no {self._name} member")
        self._member = SeekPoint(self._next, self._produced)
        self.seek_points.append(self._member)
        self._decoder = self._make()
        return True

    def _skip_padding(self) -> None:
        # Zero bytes after a member are padding to a block size: tar and tape drives write them.
        while True:
            data = self._file.read_at(self._next, 4096)
            padding = len(data) - len(data.lstrip(b"\0"))
            self._next += padding
            if not data or padding < len(data):
                return

    def _step(self, decoder: _Decoder) -> bytes:
        data = b""
        if decoder.needs_input:
            self._piece_start = self._next
            self._piece_produced = self._produced
            data = self._file.read_at(self._next, INPUT_BYTES)
            self._next += len(data)
        try:
            output = decoder.decode(data)
        except (zlib.error, lzma.LZMAError, EOFError) as error:
            return self._recover(error)
        if decoder.is_end:
            self._next -= len(decoder.unused)
            self._decoder = None
        elif not data and not output and decoder.needs_input:
            self._fail(self._next, f"ends inside a {self._name} member: the file is cut")
        return output

    def _recover(self, error: Exception) -> bytes:
        """Return what can be had of the failing piece, byte by byte, and note the damage.

        The libraries drop the output of the call that fails, so the member is decoded once more.
        """
        decoder = self._make()
        offset = self._member.compressed
        while offset < self._piece_start:
            data = self._file.read_at(offset, min(INPUT_BYTES, self._piece_start - offset))
            offset += len(data)
            _drain(decoder, data)
        output = bytearray()
        for byte in self._file.read_at(self._piece_start, INPUT_BYTES):
            try:
                output += _drain(decoder, bytes((byte,)))
            except (zlib.error, lzma.LZMAError, EOFError):
                break
            offset += 1
        self._damage = self._fault(offset, f"is damaged ({error})")
        return bytes(output[self._produced - self._piece_produced :])

    def _fault(self, offset: int, what: str) -> CorruptRecordError:
        return stream_damage(self._file.path, offset, what)

    def _fail(self, offset: int, what: str) -> NoReturn:
        self._damage = self._fault(offset, what)
        raise self._damage


def _drain(decoder: _Decoder, data: bytes) -> bytes:
    output = decoder.decode(data)
    while not decoder.needs_input and not decoder.is_end:
        output += decoder.decode(b"")
    return output


def stream_damage(path: str, offset: int, what: str) -> CorruptRecordError:
    """Return the error of a damaged stream, with the byte offset in the file as it lies."""
    return CorruptRecordError(
        f"{path} {what}; byte offset {offset}: restore the file or let the error budget skip it",
        shard=path,
        byte_offset=offset,
    )


_CODECS: dict[str, tuple[bytes, Callable[[], _Decoder]]] = {
    "gzip": (GZIP_MAGIC, _GzipDecoder),
    "xz": (XZ_MAGIC, _XzDecoder),
}
