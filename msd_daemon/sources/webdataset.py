"""WebDataset: a tar whose members of one key, one behind the other, are one record.

The rule, which is that of webdataset 1.0.2 but for the cases named:
- key: the name up to the first dot of its last part, folders kept; extension: all behind that dot,
  in lower case. `./` before a name does not count (webdataset makes another sample of it).
- Members of one key that stand one behind the other are one record; the same key further on, or
  behind the end of an archive, is another one. Folders, links, devices and members without an
  extension, whose last part begins with a dot, or that lie below `__any__` are passed over.
- Fields: `__key__` and, by extension, the bytes; `txt.gz` is unpacked and called `txt` (unless
  `txt.gz` itself is asked for). An extension that stands twice makes the record a fault.
- A record has as many bytes as its members, those not asked for too, so that its place in the order
  does not depend on what is asked for. Over `record_bytes_max` it is a fault, never held in memory.
- A damaged header costs the record it belongs to; where that cannot be told, the one before it and
  the one behind it. A cut costs the record it falls into.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ByteStream
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.record_fields import is_wanted
from msd_daemon.sources.record_place import mark_place
from msd_daemon.sources.sample_counts import count_samples
from msd_daemon.sources.stream_cursor import StreamCursor
from msd_daemon.sources.tar_members import ArchiveEnd, Member, TarMembers, Wound, shown_name

KEY_FIELD = "__key__"
_BAD_SYNTAX = int(RecordStatus.BAD_SYNTAX)
_TOO_LARGE = int(RecordStatus.TOO_LARGE)
_UNREADABLE = int(RecordStatus.UNREADABLE)
_NAME_BYTES_MAX = 4 << 20
_NAME_COST_BYTES = 64  # of a name beside its letters


def open_webdataset(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> WebdatasetFormat:
    """Return the reader of a source of tars."""
    del meter  # the stream counts
    return WebdatasetFormat(spec.record_bytes_max, columns)


def split_name(name: bytes) -> tuple[bytes, str] | None:
    """Return the key and the extension of a member's name, None where it is no part of a record."""
    while name.startswith(b"./"):
        name = name[2:].lstrip(b"/")
    top = name.split(b"/", 1)[0]
    if len(top) >= 4 and top.startswith(b"__") and top.endswith(b"__"):
        return None
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    if dot <= base or dot + 1 == len(name):
        return None
    return name[:dot], shown_name(name[dot + 1 :]).lower()


class WebdatasetFormat:
    """Records of tars.

    Args:
        record_bytes_max: Limit of a record's members together.
        columns: Extensions that are wanted (`json.caption` wants `json`), None for all.
        path: Of the shard, for messages.
    """

    def __init__(self, record_bytes_max: int, columns: Columns, path: str = "") -> None:
        self._record_bytes_max = record_bytes_max
        self._columns = columns
        self._path = path

    def at(self, shard: Shard) -> WebdatasetFormat:
        """Return the reader of one shard, whose errors name it."""
        return WebdatasetFormat(self._record_bytes_max, self._columns, shard.path)

    def count_records(self, shard: Shard) -> int | None:
        """Return how many records a shard has by Energon's or wids' word, None where none says."""
        return count_samples(shard.path)

    def is_start(self, before: bytes) -> bool:
        """Return True: the checksum of the first header tells, not what lies before it."""
        del before
        return True

    def records(self, stream: ByteStream, offset: int) -> Iterator[RawRecord]:
        """Yield the records of a tar, or of its rest from the place of a record on.

        Raises:
            CorruptRecordError: The tar is cut, or what follows is no tar; after every whole record
                before it. The place of the record that was lost is marked on the error.
        """
        cursor = StreamCursor(stream, offset)
        members = TarMembers(cursor, self._path)
        group = _Group(self._record_bytes_max)
        at = offset
        try:
            while (found := members.next()) is not None:
                if isinstance(found, Member):
                    yield from self._take(members, found, group)
                elif isinstance(found, Wound):
                    group.wound = found
                else:
                    assert isinstance(found, ArchiveEnd)
                    yield from group.end()
                at = cursor.position
            yield from group.end()
        except (CorruptRecordError, OSError) as error:
            if members.next_name is not None and not group.is_of(members.next_name):
                yield from group.end()
            mark_place(error, at if group.place is None else group.place)
            raise

    def _take(self, members: TarMembers, member: Member, group: _Group) -> Iterator[RawRecord]:
        parts = split_name(member.name) if member.is_file else None
        if parts is None:
            members.skip(member)
            return
        key, extension = parts
        yield from group.turn_to(key, member.offset)
        sample = group.sample
        assert sample is not None
        sample.add(member, extension, self._record_bytes_max)
        name = self._field_name(extension)
        if name is None or sample.status:
            members.skip(member)
            return
        sample.set(name, extension, members.read(member), self._record_bytes_max)

    def _field_name(self, extension: str) -> str | None:
        """Return what the field of an extension is called, None where it is not wanted."""
        if self._columns is not None and extension in self._columns:
            return extension
        bare = extension.removesuffix(".gz")
        return bare if is_wanted(bare, self._columns) else None


@dataclass(slots=True)
class _Sample:
    """A record whose members are being read."""

    key: bytes
    place: int
    size_bytes: int = 0
    kept_bytes: int = 0
    name_bytes: int = 0
    status: int = 0
    fault: str = ""
    fields: dict[str, bytes | str] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)

    def add(self, member: Member, extension: str, bytes_max: int) -> None:
        """Count a member, before it is read."""
        self.size_bytes += member.size_bytes
        if member.fault:
            self.fail(_BAD_SYNTAX, f"member {shown_name(member.name)!r}: {member.fault}")
        elif extension in self.extensions:
            self.fail(_BAD_SYNTAX, f"member {shown_name(member.name)!r} stands in it twice")
        elif self.size_bytes > bytes_max:
            self.fail(_TOO_LARGE, "")
        elif self.name_bytes > _NAME_BYTES_MAX:
            self.fail(_TOO_LARGE, f"names of its members take over {_NAME_BYTES_MAX} bytes")
        else:
            self.extensions.add(extension)
            self.name_bytes += len(extension) + _NAME_COST_BYTES

    def set(self, name: str, extension: str, content: bytes, bytes_max: int) -> None:
        """Keep a member's bytes as a field."""
        if name in self.fields:
            self.fail(_BAD_SYNTAX, f"field {name!r} stands in it packed and unpacked")
            return
        if extension.endswith(".gz"):
            unpacked = _unpack(content, bytes_max - self.kept_bytes)
            if unpacked is None:
                self.fail(_UNREADABLE, f"{extension!r} is no gzip, is damaged or cut")
                return
            content = unpacked
        self.kept_bytes += len(content)
        if self.kept_bytes > bytes_max:
            self.fail(_TOO_LARGE, f"its {extension!r} unpacks to more than {bytes_max} bytes")
            return
        self.fields[name] = content

    def fail(self, status: int, fault: str) -> None:
        """Make it a fault; what was read of it is let go. The first fault stays."""
        if not self.status:
            self.status, self.fault = status, fault
            self.fields.clear()

    def record(self, bytes_max: int) -> RawRecord:
        """Return it whole."""
        name = shown_name(self.key)
        if not self.status:
            fields = {KEY_FIELD: name, **self.fields}
            size_bytes = self.size_bytes
            return RawRecord(self.place, b"", key=self.key, fields=fields, fields_bytes=size_bytes)
        fault = self.fault or f"{self.size_bytes} bytes, record_bytes_max = {bytes_max}"
        named = f"sample {name!r}: {fault}" if name else fault
        return RawRecord(self.place, b"", self.status, named, self.key or None)


class _Group:
    """The record that is being gathered, and the damage that was met inside or behind it."""

    def __init__(self, bytes_max: int) -> None:
        self.sample: _Sample | None = None
        self.wound: Wound | None = None
        self._bytes_max = bytes_max
        self._is_open_end = False  # a broken record that takes the next key too

    @property
    def place(self) -> int | None:
        """Where the record begins that is not whole yet, None where there is none."""
        if self.sample is not None:
            return self.sample.place
        return None if self.wound is None else self.wound.offset

    def is_of(self, name: bytes) -> bool:
        """Tell whether a member of this name could be one of the record."""
        parts = split_name(name)
        return parts is None or self.sample is None or parts[0] == self.sample.key

    def turn_to(self, key: bytes, offset: int) -> Iterator[RawRecord]:
        """Yield the record before the member of a key, and stand at the record of that key."""
        if self.wound is not None:
            wound, self.wound = self.wound, None
            yield from self._heal(wound, key)
        if self.sample is not None and self._is_open_end:
            self.sample.key, self._is_open_end = key, False
        if self.sample is None or self.sample.key != key:
            yield from self._close()
            self.sample = _Sample(key, offset)

    def end(self) -> Iterator[RawRecord]:
        """Yield the last record before the end of an archive."""
        if self.wound is not None:
            wound, self.wound = self.wound, None
            yield from self._heal(wound, b"")
        yield from self._close()

    def _heal(self, wound: Wound, next_key: bytes) -> Iterator[RawRecord]:
        """Decide which record a damaged header cost; yields the one before it where it is whole."""
        parts = None
        if wound.owner:
            parts = split_name(wound.owner)
        elif wound.owner is not None and next_key:
            parts = next_key, ""
        is_inside = self.sample is not None and self.sample.key == (parts or (next_key,))[0]
        if parts is not None and not is_inside:
            yield from self._close()
        if self.sample is None:
            self.sample = _Sample(parts[0] if parts else next_key, wound.offset)
        self._is_open_end = parts is None and not is_inside
        behind = "; the sample behind it is lost too" if self._is_open_end else ""
        self.sample.fail(_UNREADABLE, wound.reason + behind)

    def _close(self) -> Iterator[RawRecord]:
        sample, self.sample, self._is_open_end = self.sample, None, False
        if sample is not None:
            yield sample.record(self._bytes_max)


def _unpack(content: bytes, bytes_max: int) -> bytes | None:
    """Return what gzip members hold, one byte over the limit at most; None for damage."""
    parts: list[bytes] = []
    left = bytes_max + 1
    while left > 0 and (content or not parts):
        inflate = zlib.decompressobj(wbits=31)
        try:
            part = inflate.decompress(content, left)
        except zlib.error:
            return None
        parts.append(part)
        left -= len(part)
        if left > 0 and not inflate.eof:
            return None
        content = inflate.unused_data.lstrip(b"\0")
    return b"".join(parts)
