"""The messages of an Arrow IPC stream or file, found by their headers alone.

pyarrow gives no way into the middle of a stream, nor into a file whose footer is gone, and takes a
batch's sizes on trust. So the headers (flatbuffers, see Message.fbs and File.fbs of the format) are
read here: where each message lies, its rows, and what its buffers take when decompressed. Every
offset is checked against the file; nothing of a body is touched until it is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FILE_MAGIC = b"ARROW1"
_STREAM_BEGIN = 8
"""Of the stream inside a file: behind the magic and its padding."""
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MESSAGES_MAX = 1 << 22
_METADATA_BYTES_MAX = 64 << 20
_ROWS_FREE_MAX = 1 << 24
"""Rows of a batch that may take no bytes at all (nulls, run ends); more must be in its body."""
_BLOCK_BYTES = 24
_BUFFER_BYTES = 16

Data = memoryview
Read = Callable[[int, int], Data]
"""Returns bytes [offset, offset + count) of a shard, fewer at its end."""


@dataclass(frozen=True, slots=True)
class Message:
    """Where a message lies: prefix, header and body one behind the other."""

    offset: int
    header_bytes: int
    """With its prefix."""
    body_bytes: int
    rows: int = 0
    is_compressed: bool = False
    dictionary: int = -1
    """Its number; -1: not a dictionary."""
    is_delta: bool = False

    @property
    def end(self) -> int:
        """Where the next message begins."""
        return self.offset + self.header_bytes + self.body_bytes


@dataclass
class Messages:
    """All messages of a shard."""

    schema: Message | None = None
    dictionaries: list[Message] = field(default_factory=list)
    """In the order in which they hold."""
    batches: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    """Offset, header bytes, body bytes, rows. Shape (batches, 4)."""
    has_footer: bool = False
    """True where every dictionary holds for every batch."""
    is_compressed: bool = False
    damage: str = ""
    """Why it ends before its end; empty where it does not."""

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return int(self.batches[:, 3].sum())

    def batch(self, number: int) -> Message:
        """Return a batch."""
        offset, header_bytes, body_bytes, rows = self.batches[number].tolist()
        return Message(offset, header_bytes, body_bytes, rows, self.is_compressed)


class BadMessageError(ValueError):
    """A header that is none."""


def read_messages(read: Read, size_bytes: int) -> Messages:
    """Return the messages of a file or stream, as far as they are whole.

    Args:
        read: Gives bytes of it; headers alone are asked for.
        size_bytes: Of it.
    """
    if bytes(read(0, len(FILE_MAGIC))) != FILE_MAGIC:
        return _walk(read, size_bytes, 0)
    try:
        return _by_footer(read, size_bytes)
    except (BadMessageError, struct.error, OverflowError) as error:
        found = _walk(read, size_bytes, _STREAM_BEGIN)
        found.damage = found.damage or f"has no footer that can be read ({error})"
        return found


def _walk(read: Read, size_bytes: int, begin: int) -> Messages:
    found = Messages()
    listed: list[tuple[int, ...]] = []
    offset = begin
    while offset < size_bytes:
        try:
            message, kind = _message(read, size_bytes, offset)
        except (BadMessageError, struct.error, OverflowError) as error:
            found.damage = f"is damaged at byte {offset} ({error})"
            break
        if message is None:
            break
        _add(found, listed, message, kind)
        offset = message.end
        if len(listed) > _MESSAGES_MAX:
            found.damage = f"has more than {_MESSAGES_MAX} batches"
            break
    _finish(found, listed)
    return found


def _by_footer(read: Read, size_bytes: int) -> Messages:
    tail = size_bytes - len(FILE_MAGIC) - 4
    end = read(tail, len(FILE_MAGIC) + 4) if tail >= _STREAM_BEGIN else Data(b"")
    if bytes(end[4:]) != FILE_MAGIC:
        raise BadMessageError("it does not end with ARROW1")
    footer_bytes = _number(end, "<i", 0)
    if not 0 < footer_bytes <= tail - _STREAM_BEGIN:
        raise BadMessageError(f"{footer_bytes} bytes of footer in {size_bytes} bytes")
    footer = read(tail - footer_bytes, footer_bytes)
    root = _table(footer, _number(footer, "<I", 0))
    found = Messages(has_footer=True)
    listed: list[tuple[int, ...]] = []
    schema, kind = _message(read, size_bytes, _STREAM_BEGIN)
    if schema is None or kind != _SCHEMA:
        raise BadMessageError("no schema behind its magic")
    found.schema = schema
    for number, wanted in ((2, _DICTIONARY), (3, _BATCH)):
        for offset in _blocks(footer, root, number):
            message, kind = _message(read, size_bytes, offset)
            if message is None or kind != wanted:
                raise BadMessageError(f"no such message at byte {offset}")
            _add(found, listed, message, kind)
    _finish(found, listed)
    return found


def _blocks(footer: Data, root: dict[int, int], number: int) -> Iterator[int]:
    for place in _vector(footer, root.get(number, 0), _BLOCK_BYTES):
        offset = _number(footer, "<q", place)
        if offset < _STREAM_BEGIN:
            raise BadMessageError(f"a message at byte {offset}")
        yield offset


def _add(found: Messages, listed: list[tuple[int, ...]], message: Message, kind: int) -> None:
    found.is_compressed = found.is_compressed or message.is_compressed
    if kind == _SCHEMA:
        if found.schema is not None:
            found.damage = found.damage or f"has a second schema at byte {message.offset}"
        else:
            found.schema = message
    elif kind == _DICTIONARY:
        found.dictionaries.append(message)
    elif kind == _BATCH:
        listed.append((message.offset, message.header_bytes, message.body_bytes, message.rows))


def _finish(found: Messages, listed: list[tuple[int, ...]]) -> None:
    if listed:
        found.batches = np.array(listed, dtype=np.int64)


def _message(read: Read, size_bytes: int, offset: int) -> tuple[Message | None, int]:
    """Return the message at an offset and its kind; None where the stream ends."""
    prefix = read(offset, 8)
    size = _number(prefix, "<I", 0)
    prefix_bytes = 4
    if size == _CONTINUATION:
        size = _number(prefix, "<I", 4)
        prefix_bytes = 8
    if size == 0:
        return None, 0
    begin = offset + prefix_bytes
    if size > min(_METADATA_BYTES_MAX, size_bytes - begin):
        raise BadMessageError(f"a header of {size} bytes, {size_bytes - begin} are left")
    header = read(begin, size)
    root = _table(header, _number(header, "<I", 0))
    body_bytes = _number(header, "<q", root[3]) if 3 in root else 0
    body = begin + size
    if not 0 <= body_bytes <= size_bytes - body:
        raise BadMessageError(f"a body of {body_bytes} bytes, {size_bytes - body} are left")
    kind = _number(header, "<B", root[1]) if 1 in root else 0
    place = (offset, prefix_bytes + size, body_bytes)
    if kind not in (_DICTIONARY, _BATCH) or 2 not in root:
        return Message(*place), kind
    batch, number, is_delta = _batch_table(header, root, kind)
    rows = _number(header, "<q", batch[0]) if 0 in batch else 0
    if not 0 <= rows <= _ROWS_FREE_MAX + 8 * body_bytes:
        raise BadMessageError(f"a batch of {rows} rows in {body_bytes} bytes")
    return Message(*place, rows, 3 in batch, number, is_delta), kind


def _batch_table(header: Data, root: dict[int, int], kind: int) -> tuple[dict[int, int], int, bool]:
    """Return the table of a batch, of a dictionary's values too, and number and delta of those."""
    inner = _table(header, root[2] + _number(header, "<I", root[2]))
    if kind == _BATCH:
        return inner, -1, False
    if 1 not in inner:
        raise BadMessageError("a dictionary without values")
    number = _number(header, "<q", inner[0]) if 0 in inner else 0
    is_delta = bool(_number(header, "<B", inner[2])) if 2 in inner else False
    return _table(header, inner[1] + _number(header, "<I", inner[1])), number, is_delta


def decoded_bytes(read: Read, message: Message) -> int:
    """Return what the buffers of a batch or dictionary take when they are decompressed.

    Raises:
        BadMessageError: Its header states what cannot be.
    """
    if not message.is_compressed:
        return message.body_bytes
    head = read(message.offset, message.header_bytes)
    header = head[8 if _number(head, "<I", 0) == _CONTINUATION else 4 :]
    body = message.offset + message.header_bytes
    total = 0
    try:
        root = _table(header, _number(header, "<I", 0))
        batch, _, _ = _batch_table(header, root, _number(header, "<B", root[1]))
        for place in _vector(header, batch.get(2, 0), _BUFFER_BYTES):
            offset, length = _number(header, "<q", place), _number(header, "<q", place + 8)
            if offset < 0 or length < 0 or offset + length > message.body_bytes:
                raise BadMessageError(f"a buffer of {length} bytes in {message.body_bytes}")
            if length >= 8:
                stated = _number(read(body + offset, 8), "<q", 0)
                total += length if stated < 0 else stated
    except (KeyError, struct.error, OverflowError) as error:
        raise BadMessageError(f"a header that cannot be read ({error})") from error
    return total


def _table(data: Data, place: int) -> dict[int, int]:
    """Return where the fields of a flatbuffers table lie, by their numbers."""
    if not 0 <= place <= len(data) - 4:
        raise BadMessageError(f"a table at {place} of {len(data)} bytes")
    directory = place - _number(data, "<i", place)
    if directory < 0:
        raise BadMessageError(f"a directory at {directory}")
    size = _number(data, "<H", directory)
    found: dict[int, int] = {}
    for number in range((size - 4) // 2):
        offset = _number(data, "<H", directory + 4 + 2 * number)
        if offset:
            found[number] = place + offset
    return found


def _vector(data: Data, place: int, item_bytes: int) -> range:
    """Return where the items of a vector of structs lie; 0 for a vector that is not there."""
    if not place:
        return range(0)
    begin = place + _number(data, "<I", place)
    count = _number(data, "<I", begin)
    first = begin + 4
    if count > (len(data) - first) // item_bytes:
        raise BadMessageError(f"a list of {count} in {len(data)} bytes")
    return range(first, first + count * item_bytes, item_bytes)


def _number(data: Data, layout: str, place: int) -> int:
    if place < 0:
        raise BadMessageError(f"an offset of {place}")
    value: int = struct.unpack_from(layout, data, place)[0]
    return value
