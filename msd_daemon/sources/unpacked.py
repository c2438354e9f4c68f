"""Shards that are compressed as a whole, unpacked front to end within the size that is stated."""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Iterator
from typing import Any

from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.byte_stream import ByteFile, MemberStream
from msd_daemon.sources.zstd_stream import ZstdStream

_INPUT_BYTES = 64 * 1024
_OUTPUT_BYTES = 256 * 1024
WHOLE_BYTES_MAX = 512 << 20
"""Of what br and snappy unpack at once."""
_ARROW_CODECS = {"br": "brotli", "snappy": "snappy"}


class Unpacked:
    """The raw bytes of a compressed shard, taken in order.

    Args:
        file: The compressed file.
        compression: br, bz2, gz, snappy or zstd.
        raw_bytes: What it unpacks to; a byte more is damage.

    Raises:
        ConfigError: There is no library for the compression, or the shard is too large for it.
    """

    def __init__(self, file: ByteFile, compression: str, raw_bytes: int) -> None:
        self._path = file.path
        self._raw_bytes = raw_bytes
        self._pieces = _pieces(file, compression, raw_bytes)
        self._buffer = bytearray()
        self._taken = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes.

        Raises:
            CorruptRecordError: It ends before, or is damaged.
        """
        while len(self._buffer) < count:
            piece = next(self._pieces, b"")
            if not piece:
                raise self._fault(
                    f"ends at raw byte {self._taken + len(self._buffer)} of {self._raw_bytes}"
                )
            self._buffer += piece
            if self._taken + len(self._buffer) > self._raw_bytes:
                raise self._fault(f"unpacks to more than the {self._raw_bytes} bytes it states")
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._taken += count
        return found

    def skip(self, count: int) -> None:
        """Leave out the next bytes.

        Raises:
            CorruptRecordError: It ends before, or is damaged.
        """
        while count:
            count -= len(self.take(min(count, _OUTPUT_BYTES)))

    def _fault(self, what: str) -> CorruptRecordError:
        return CorruptRecordError(f"{self._path} {what}", shard=self._path)


def _pieces(file: ByteFile, compression: str, raw_bytes: int) -> Iterator[bytes]:
    if compression in ("zstd", "gz"):
        stream: Any = ZstdStream(file) if compression == "zstd" else MemberStream(file, "gzip")
        return iter(stream.read, b"")
    if compression == "bz2":
        return _bz2_pieces(file)
    codec = _ARROW_CODECS.get(compression, "")
    if not codec:
        raise ConfigError(f"{file.path} is compressed as {compression!r}, which is not read")
    return _whole(file, codec, raw_bytes)


def _bz2_pieces(file: ByteFile) -> Iterator[bytes]:
    decoder, offset = bz2.BZ2Decompressor(), 0
    while not decoder.eof:
        data = b""
        if decoder.needs_input:
            data = file.read_at(offset, _INPUT_BYTES)
            offset += len(data)
            if not data:
                return
        try:
            piece = decoder.decompress(data, _OUTPUT_BYTES)
        except (OSError, ValueError, zlib.error) as error:
            message = f"{file.path} is damaged before byte {offset} ({error})"
            raise CorruptRecordError(message, shard=file.path) from error
        if piece:
            yield piece


def _whole(file: ByteFile, codec: str, raw_bytes: int) -> Iterator[bytes]:
    from msd_daemon.sources.parquet_file import arrow_modules, first_line

    arrow, _ = arrow_modules()
    if not arrow.Codec.is_available(codec):
        raise ConfigError(
            f"{file.path} is compressed with {codec}, which this pyarrow is built without: install "
            "another build, or write the shards anew with zstd"
        )
    if raw_bytes > WHOLE_BYTES_MAX:
        raise CorruptRecordError(
            f"{file.path} unpacks to {raw_bytes} bytes, at most {WHOLE_BYTES_MAX} with {codec}: "
            "write it anew with zstd, or in smaller shards",
            shard=file.path,
        )
    try:
        packed = file.read_at(0, file.size_bytes)
        unpacked = arrow.Codec(codec).decompress(packed, decompressed_size=raw_bytes, asbytes=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        reason = first_line(error)
        raise CorruptRecordError(f"{file.path} is damaged ({reason})", shard=file.path) from error
    yield unpacked
