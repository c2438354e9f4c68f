"""Folders of media with captions beside them: a shard is a folder with all below it.

Without a metadata file a record is all files of one stem, in the order of stems: `x.jpg`, and
`x.txt` or `x.caption` for its `text`, and `x.json` for further fields. Files without media are
passed over. With `metadata.jsonl` or `metadata.csv` in the folder, as Hugging Face's imagefolder and
audiofolder have it, a record is a row of it, whose `file_name` names the media; files that no row
names are no records.

Fields: `__key__`, the stem; `image`, `audio` or `video`, the file's bytes; `text`; further columns.
A record has as many bytes as its files, those not asked for too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import PlainStream, SeekPoint, ShardFile
from msd_daemon.sources.csv_fields import CsvFormat
from msd_daemon.sources.field_numbers import kind_of, shown
from msd_daemon.sources.folder_listing import (
    MEDIA_KINDS,
    Listing,
    NamedFile,
    open_listing,
)
from msd_daemon.sources.formats import Columns, StreamFormat
from msd_daemon.sources.json_text import read_object, strip_mark
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.jsonl_fields import JsonlStream, LineFields
from msd_daemon.sources.record import Extracted, RawRecord, ReadMeter, unreadable
from msd_daemon.sources.record_fault import RecordFault, missing
from msd_daemon.sources.record_fields import is_encodable, is_wanted
from msd_daemon.sources.stream_formats import LineStream

KEY_FIELD = "__key__"
NAME_FIELD = "file_name"
_TEXT_FIELD = "text"
_SHARDS_KEPT = 2
_KIND_ORDER = ("json", "text", "image", "audio", "video")
"""What is read later stands where names are equal; of captions `.txt` comes last."""


def open_folder(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> FolderFormat:
    """Return the reader of a source of folders."""
    return FolderFormat(spec, columns, meter)


@dataclass(frozen=True)
class _Opened:
    """What is known of a shard."""

    listing: Listing
    starts: tuple[int, ...]
    """With a metadata file: where each block's first row begins."""
    records: int


class FolderFormat:
    """Records of folders.

    Args:
        spec: The source.
        columns: Fields that are wanted, None for all; media that are not are not read.
        meter: Counts what is read.
    """

    def __init__(self, spec: SourceSpec, columns: Columns, meter: ReadMeter) -> None:
        # its rows' media are opened here, so none of their columns is a path for others to open
        self._spec = replace(spec, format="jsonl", recipe=None)
        self._columns = columns
        self._meter = meter
        self._block_records = spec.shuffle.block_records
        self._opened: dict[Shard, _Opened] = {}

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the blocks of a shard, at least 1, and its records.

        Raises:
            CorruptRecordError: Files were added, taken away or changed in size.
            OSError: It cannot be read.
        """
        records = self._open(shard).records
        return max(1, -(-records // self._block_records)), records

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records of a block.

        Raises:
            CorruptRecordError: In block 0: files were added, taken away or changed in size.
            OSError: In block 0: it cannot be read.
        """
        try:
            opened = self._open(shard)
        except (CorruptRecordError, OSError):
            if block == 0:
                raise
            return
        first = block * self._block_records
        if opened.listing.metadata:
            yield from self._rows(shard, opened, block, first)
            return
        for number in range(first, min(first + self._block_records, opened.records)):
            files = opened.listing.files(number)
            yield self._record(number, files[0].stem, partial(self._beside, shard, files))

    def _open(self, shard: Shard) -> _Opened:
        opened = self._opened.get(shard)
        if opened is None:
            while len(self._opened) >= _SHARDS_KEPT:
                del self._opened[next(iter(self._opened))]
            listing = open_listing(shard)
            opened = self._opened[shard] = self._measured(shard, listing)
        return opened

    def _measured(self, shard: Shard, listing: Listing) -> _Opened:
        if not listing.metadata:
            return _Opened(listing, (), listing.records)
        starts: list[int] = []
        count = 0
        for row in self._read_rows(shard, listing, 0):
            if count % self._block_records == 0:
                starts.append(row.place)
            count += 1
        return _Opened(listing, tuple(starts), count)

    def _rows(self, shard: Shard, opened: _Opened, block: int, first: int) -> Iterator[RawRecord]:
        if block >= len(opened.starts):
            return
        rows = self._read_rows(shard, opened.listing, opened.starts[block])
        with closing(rows):
            for number, row in enumerate(islice(rows, self._block_records), first):
                if row.status:
                    fault = f"{opened.listing.metadata}, byte offset {row.place}: {row.fault}"
                    yield RawRecord(number, row.raw, row.status, fault)
                    continue
                named = partial(self._named, shard, opened.listing, row)
                yield self._record(number, b"", named)

    def _read_rows(
        self, shard: Shard, listing: Listing, start: int
    ) -> Generator[RawRecord, None, None]:
        """Yield the rows of the metadata file from a place on, with their fields."""
        path = os.path.join(shard.path, listing.metadata)
        file = ShardFile(path, self._meter)
        try:
            rows: StreamFormat
            if listing.metadata.endswith(".csv"):
                beside = Shard(path, file.size_bytes, "")
                rows = CsvFormat(self._spec, self._meter, beside)
            else:
                lines = LineStream(JsonlFormat(self._spec, self._meter), self._spec)
                rows = JsonlStream(lines, LineFields(self._spec, self._columns))
            yield from rows.records(PlainStream(file, SeekPoint(start, start)), start)
        finally:
            file.close()

    def _record(
        self, number: int, stem: bytes, make: Callable[[], tuple[dict[str, Any], int]]
    ) -> RawRecord:
        """Return a record of fields and their bytes, or of what is wrong with it."""
        try:
            fields, size_bytes = make()
        except RecordFault as fault:
            return RawRecord(number, b"", int(fault.status), fault.message, stem or None)
        except OSError as error:
            return unreadable(number, error)
        key = str(fields[KEY_FIELD]).encode(errors="surrogateescape")
        return RawRecord(number, b"", key=key, fields=fields, fields_bytes=size_bytes)

    def _beside(self, shard: Shard, files: list[NamedFile]) -> tuple[dict[str, Any], int]:
        """Return the fields of the files of one stem."""
        size_bytes = sum(file.size_bytes for file in files)
        self._check_size(files[0], size_bytes)
        fields: dict[str, Any] = {}
        kinds: set[str] = set()
        for file in sorted(files, key=lambda one: (_KIND_ORDER.index(one.kind), one.suffix)):
            if file.kind == "json":
                fields.update(_read_json(file, self._read(shard, file)))
            elif file.kind == "text":
                fields[_TEXT_FIELD] = _read_text(file, self._read(shard, file))
            elif file.kind not in kinds:
                kinds.add(file.kind)
                fields[file.kind] = self._media(shard, file)
            else:
                what = f"{_shown(file.name)!r} is a second {file.kind} of its stem"
                raise RecordFault(RecordStatus.BAD_SYNTAX, what)
        return {KEY_FIELD: _shown(files[0].stem), **fields}, size_bytes

    def _named(self, shard: Shard, listing: Listing, row: RawRecord) -> tuple[dict[str, Any], int]:
        """Return the fields of a row of the metadata file, with the media that it names."""
        fields = dict(row.fields or {})
        name = fields.get(NAME_FIELD)
        if not isinstance(name, str):
            raise missing(f"field {NAME_FIELD!r} is {kind_of(name)}, not the name of a file")
        file = listing.find(os.path.normpath(os.fsencode(name)) if _is_fit(name) else b"")
        if file is None or file.kind not in MEDIA_KINDS:
            raise RecordFault(
                RecordStatus.UNREADABLE,
                f"{NAME_FIELD} {shown(name)} is no image, sound or video of the folder",
            )
        size_bytes = len(row.raw) + file.size_bytes
        self._check_size(file, size_bytes)
        fields[file.kind] = self._media(shard, file)
        return {KEY_FIELD: _shown(file.stem), **fields}, size_bytes

    def _media(self, shard: Shard, file: NamedFile) -> bytes | None:
        """Return the bytes of a file of media, None where they are not asked for."""
        return self._read(shard, file) if is_wanted(file.kind, self._columns) else None

    def _read(self, shard: Shard, file: NamedFile) -> bytes:
        opened = ShardFile(os.path.join(shard.path, os.fsdecode(file.name)), self._meter)
        try:
            if opened.size_bytes != file.size_bytes:
                raise RecordFault(
                    RecordStatus.UNREADABLE,
                    f"{_shown(file.name)!r} has {opened.size_bytes} bytes, it had "
                    f"{file.size_bytes} when the folder was listed",
                )
            return opened.read_at(0, file.size_bytes)
        finally:
            opened.close()

    def _check_size(self, file: NamedFile, size_bytes: int) -> None:
        limit = self._spec.record_bytes_max
        if size_bytes > limit:
            raise RecordFault(
                RecordStatus.TOO_LARGE,
                f"{_shown(file.stem)!r} has {size_bytes} bytes, record_bytes_max = {limit}",
            )


def _read_json(file: NamedFile, content: bytes) -> dict[str, Any]:
    value = read_object(strip_mark(content), is_exact=True)
    if isinstance(value, Extracted):
        raise RecordFault(RecordStatus(value.status), f"{_shown(file.name)!r}: {value.fault}")
    return value


def _read_text(file: NamedFile, content: bytes) -> str:
    try:
        text = strip_mark(content).decode()
    except UnicodeDecodeError as error:
        raise RecordFault(
            RecordStatus.BAD_ENCODING, f"{_shown(file.name)!r} is not UTF-8 at byte {error.start}"
        ) from None
    return text.replace("\r\n", "\n").rstrip("\n")


def _is_fit(name: str) -> bool:
    """Tell whether a name can be one of a file system."""
    return "\0" not in name and is_encodable(name)


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
