"""Byte stream of a zstd file: frames and skippable frames, walked block by block.

The library decodes all of what it is given at once; 4 bytes may stand for 128 KiB. Walking the
block headers bounds the output of a call, tells where a frame ends, and keeps every block before a
damaged one. Format: RFC 8878, section 3.1.
"""

from __future__ import annotations

from typing import Any, NoReturn

from msd_daemon.sources.byte_stream import START, ByteFile, SeekPoint, stream_damage

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BLOCK_BYTES_MAX = 128 * 1024
WINDOW_BYTES_MAX = 1 << 27  # what the zstd tool accepts without --long
_BUFFER_BYTES = 256 * 1024
_SKIPPABLE_TAIL = b"\x2a\x4d\x18"  # after a byte 0x50..0x5F
_DICTIONARY_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)


def is_zstd(head: bytes) -> bool:
    """Tell whether a file's first bytes are a zstd frame or a skippable one."""
    return head[:4] == ZSTD_MAGIC or _is_skippable(head)


class ZstdStream:
    """A file of concatenated zstd frames.

    Args:
        file: The shard.
        start: A frame's start.
    """

    def __init__(self, file: ByteFile, start: SeekPoint = START) -> None:
        import zstandard  # kept out of processes that read no .zst

        self._file = file
        self._zstd_error: type[Exception] = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
        self._decoder: Any = None
        self._has_checksum = False
        self._offset = start.compressed
        self._produced = start.decompressed
        self._buffer = b""
        self._buffer_start = start.compressed
        self._damage: Exception | None = None
        self.seek_points: list[SeekPoint] = []

    def read(self) -> bytes:
        """Return the next bytes, empty at the end.

        Raises:
            CorruptRecordError: A frame is cut, fails its check, or is followed by something else.
        """
        if self._damage is not None:
            raise self._damage
        while True:
            if self._decoder is None:
                if not self._begin_frame():
                    return b""
                continue
            data = self._next_block()
            if data:
                self._produced += len(data)
                return data

    def _begin_frame(self) -> bool:
        head = self._peek(18)  # longest frame header
        if not head:
            return False
        if _is_skippable(head):
            if len(head) < 8:
                self._fail("ends inside a skippable zstd frame: the file is cut")
            self._offset += 8 + int.from_bytes(head[4:8], "little")
            if self._offset > self._file.size_bytes:
                self._fail("ends inside a skippable zstd frame: the file is cut")
            return True
        if head[:4] != ZSTD_MAGIC[: len(head[:4])]:
            self._fail("is followed by bytes that are no zstd frame")
        header_bytes = _frame_header_bytes(head)
        if header_bytes > len(head):
            self._fail("ends inside a zstd frame header: the file is cut")
        self.seek_points.append(SeekPoint(self._offset, self._produced))
        self._has_checksum = bool(head[4] & 4)
        self._decoder = self._decompressor.decompressobj()
        self._decode(header_bytes)
        return True

    def _next_block(self) -> bytes:
        header = self._take_exactly(3)
        word = int.from_bytes(header, "little")
        is_last, kind, size_bytes = word & 1, (word >> 1) & 3, word >> 3
        if kind == 3 or size_bytes > BLOCK_BYTES_MAX:
            self._fail("is damaged (reserved block type or block too large)")
        payload_bytes = 1 if kind == 1 else size_bytes
        if len(self._peek(3 + payload_bytes)) < 3 + payload_bytes:
            self._fail("ends inside a zstd block: the file is cut")
        data = self._decode(3 + payload_bytes)
        if is_last:
            self._end_frame(data)
        return data

    def _end_frame(self, data: bytes) -> None:
        """Check the frame's end; a fault shows on the next read, after the block's bytes."""
        try:
            if self._has_checksum:
                self._take_exactly(4)
                self._decode(4)
            if not self._decoder.eof:
                self._fail("is damaged (a frame goes on after its last block)")
        except Exception as error:
            if error is not self._damage or not data:
                raise
        self._decoder = None

    def _decode(self, count: int) -> bytes:
        data = self._peek(count)
        try:
            output: bytes = self._decoder.decompress(data)
        except self._zstd_error as error:
            self._fail(f"is damaged ({error})")
        self._offset += count
        return output

    def _take_exactly(self, count: int) -> bytes:
        data = self._peek(count)
        if len(data) < count:
            self._fail("ends inside a zstd frame: the file is cut")
        return data

    def _peek(self, count: int) -> bytes:
        start = self._offset - self._buffer_start
        if start < 0 or start + count > len(self._buffer):
            self._buffer = self._file.read_at(self._offset, max(count, _BUFFER_BYTES))
            self._buffer_start = self._offset
            start = 0
        return self._buffer[start : start + count]

    def _fail(self, what: str) -> NoReturn:
        self._damage = stream_damage(self._file.path, self._offset, what)
        raise self._damage


def _is_skippable(head: bytes) -> bool:
    return len(head) >= 4 and head[0] >> 4 == 5 and head[1:4] == _SKIPPABLE_TAIL


def _frame_header_bytes(head: bytes) -> int:
    """Return the length of a frame header, or one byte too many where `head` is too short."""
    if len(head) < 5:
        return len(head) + 1
    descriptor = head[4]
    is_single_segment = bool(descriptor & 0x20)
    content = _CONTENT_SIZE_BYTES[descriptor >> 6]
    if content == 0 and is_single_segment:
        content = 1
    return 5 + (not is_single_segment) + _DICTIONARY_BYTES[descriptor & 3] + content
