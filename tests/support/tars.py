"""Tars made byte by byte, and what a stream format reads of them."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from federation.model.job import Shard, ShuffleRule, SourceSpec
from federation.model.recipe import SampleRecipe
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import SeekPoint
from msd_daemon.sources.formats import Columns, StreamFormat
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.lane import ShardRun, StreamReader
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.webdataset import WebdatasetFormat

END = bytes(1024)
LIMIT = 1 << 20


class Pieces:
    """A byte stream that gives pieces of one size."""

    def __init__(self, data: bytes, piece_bytes: int = 1000, damage: Exception | None = None):
        self.seek_points: list[SeekPoint] = []
        self._data = data
        self._piece_bytes = piece_bytes
        self._damage = damage

    def read(self) -> bytes:
        piece, self._data = self._data[: self._piece_bytes], self._data[self._piece_bytes :]
        if not piece and self._damage is not None:
            raise self._damage
        return piece


def header(
    name: str | bytes,
    size: int | bytes = 0,
    kind: bytes = b"0",
    *,
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """Return a header block; `size` as bytes is the field as it stands; `tail` begins at 345."""
    if isinstance(name, str):
        name = name.encode()
    block = bytearray(512)
    block[: len(name)] = name
    block[100:124] = b"0000644\x00" + b"0000000\x00" * 2
    block[124:136] = size if isinstance(size, bytes) else b"%011o\x00" % size
    block[136:148] = b"00000000000\x00"
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257:265] = magic.ljust(8, b"\x00")
    rest = tail or prefix
    block[345 : 345 + len(rest)] = rest
    block[148:156] = b"%06o\x00 " % sum(block)
    return bytes(block)


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def file(name: str | bytes, content: bytes = b"", **fields: Any) -> bytes:
    return header(name, len(content), **fields) + pad(content)


def pax(records: Iterable[tuple[str, str]], kind: bytes = b"x") -> bytes:
    """Return a PAX header with its data."""
    data = b""
    for keyword, value in records:
        body = f" {keyword}={value}\n".encode()
        length = len(body)
        while length != len(body) + len(str(length)):
            length = len(body) + len(str(length))
        data += str(length).encode() + body
    return header("././@PaxHeader", len(data), kind) + pad(data)


def sample(key: str, members: dict[str, bytes]) -> bytes:
    return b"".join(file(f"{key}.{extension}", content) for extension, content in members.items())


def read(
    data: bytes,
    offset: int = 0,
    *,
    columns: Columns = None,
    limit: int = LIMIT,
    piece_bytes: int = 1000,
    damage: Exception | None = None,
) -> tuple[list[RawRecord], CorruptRecordError | None]:
    """Return the records of a tar from an offset on, and the error at its end."""
    found: list[RawRecord] = []
    stream = Pieces(data[offset:], piece_bytes, damage)
    try:
        found += WebdatasetFormat(limit, columns).records(stream, offset)
    except CorruptRecordError:
        pass
    else:
        return found, None
    found = []
    stream = Pieces(data[offset:], piece_bytes, damage)
    records = WebdatasetFormat(limit, columns).records(stream, offset)
    try:
        found.extend(iter(lambda: next(records), None))
    except CorruptRecordError as error:
        return found, error
    raise AssertionError("the second reading differs")


def tarfile_files(data: bytes, encoding: str = "utf-8") -> list[tuple[bytes, bytes]]:
    """Return what the standard library has as files."""
    with tarfile.open(fileobj=io.BytesIO(data), encoding=encoding) as archive:
        found = []
        for member in archive:
            if member.isreg():
                opened = archive.extractfile(member)
                assert opened is not None
                name = member.name.encode(encoding, "surrogateescape")
                found.append((name, opened.read()))
        return found


def stream_spec(path: Path, source_format: str, **fields: Any) -> SourceSpec:
    """Return a source of one shard, whatever the file is called."""
    shard = Shard(str(path), path.stat().st_size, "0" * 32)
    spec = SourceSpec("source", source_format, "none", "streaming", (shard,), "")
    return dataclasses.replace(spec, recipe=SampleRecipe(), **fields)


def read_blocks(
    spec: SourceSpec, block: int = 0, index_dir: Path | None = None, columns: Columns = None
) -> list[list[RawRecord]]:
    """Return the blocks of the only shard from one on."""
    reader = StreamReader(spec, IndexStore(index_dir, spec), ReadMeter(), columns=columns)
    run = ShardRun(reader, spec.shards[0], block)
    blocks: list[list[RawRecord]] = []
    while run.peek() is not None:
        blocks.append(list(run.block()))
    run.close()
    return blocks


def few(records: int) -> ShuffleRule:
    return ShuffleRule(is_shuffled=False, stream_block_records=records)


def read_format(
    stream_format: StreamFormat, data: bytes, offset: int = 0, piece_bytes: int = 1000
) -> list[RawRecord]:
    return list(stream_format.records(Pieces(data[offset:], piece_bytes), offset))


WHOLE = [sample(f"s{n}", {"json": b"{}", "jpg": bytes([n]) * 700}) for n in range(4)]
"""Four records of two members each, 2,560 bytes a record."""
