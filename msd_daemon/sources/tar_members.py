"""Members of a tar that comes as a stream: one header after the other, data read or passed over.

Zero blocks are padding: two of them end an archive and another may follow, as `cat a.tar b.tar` or
`tar -A` leave it. Behind an end, what fills its 10,240-byte record is undefined (POSIX) and passed
over; other bytes that are no header are damage, and so is a stream that ends inside a member or its
padding. A stream that ends behind a whole member without zero blocks is whole.

Global PAX headers are checked and not applied: what a member is must not depend on where reading
began.
"""

from __future__ import annotations

from dataclasses import dataclass

from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.stream_cursor import StreamCursor
from msd_daemon.sources.tar_header import (
    BLOCK_BYTES,
    FILE_KINDS,
    LONG_LINK,
    LONG_NAME,
    META_BYTES_MAX,
    META_KINDS,
    PAX_GLOBAL,
    PAX_KINDS,
    SPARSE,
    ZERO_BLOCK,
    TarFieldError,
    TarHeader,
    header_name,
    is_header,
    padded,
    read_header,
    read_number,
    read_pax,
    read_size,
)
from msd_daemon.sources.tar_sparse import (
    PIECES_MAX,
    MapInData,
    PaxSparse,
    SparseMap,
    decimal,
    read_old_pieces,
)

_RECORD_BYTES = 20 * BLOCK_BYTES
_NAMED_BYTES = 500
"""Of a header, up to the end of its name."""


@dataclass(slots=True)
class Member:
    """A member whose data are next in the stream."""

    offset: int
    """Of its first header block."""
    name: bytes
    is_file: bool
    size_bytes: int
    """Of the file."""
    stored_bytes: int
    """Of its data in the tar."""
    sparse: SparseMap | None = None
    fault: str = ""
    """What is wrong with it alone: the members behind it can be read."""


class ArchiveEnd:
    """Two or more zero blocks were passed."""


@dataclass(slots=True)
class Wound:
    """A header that is damaged, passed over as far as the next good one."""

    offset: int
    reason: str
    owner: bytes | None
    """Name of the member that it is of, where another header tells it and none other can be lost:
    the next good one stands just behind its data. Empty: that of the next member. None: not known."""


@dataclass(slots=True)
class _Meta:
    """What header blocks say of the member behind them."""

    offset: int
    name: bytes = b""
    size_bytes: int | None = None
    sparse: PaxSparse | None = None
    is_pending: bool = False


class _BadHeaderError(Exception):
    """A header that cannot be gone on from."""


class TarMembers:
    """Walks the members of a tar.

    Args:
        cursor: Stands at a header.
        path: Of the shard, for messages; may be empty.
    """

    def __init__(self, cursor: StreamCursor, path: str = "") -> None:
        self._cursor = cursor
        self._path = path or "the tar"
        self._is_first = True
        self._record_end = -1  # of the archive that ended last; -1 inside an archive
        self.next_name: bytes | None = None
        """Name of the member whose header `next` was reading when it raised; None: not known."""

    def next(self) -> Member | ArchiveEnd | Wound | None:
        """Return what comes next, None at the end.

        The caller passes over the data of a member, by `read` or `skip`, before it asks again.

        Raises:
            CorruptRecordError: The stream is cut, damaged, or goes on with what is no tar.
        """
        meta = _Meta(self._cursor.position)
        self.next_name = None
        while True:
            offset = self._cursor.position
            block = self._cursor.peek(BLOCK_BYTES)
            if block == ZERO_BLOCK[: len(block)]:  # the empty one too
                if meta.is_pending:
                    raise self._damage(meta.offset, "ends behind a header that tells of a member")
                if not block:
                    return None
                if self._pass_zeros(offset):
                    return ArchiveEnd()
                meta = _Meta(self._cursor.position)
                continue
            try:
                header = self._read_header(block, offset, meta)
                self._is_first, self._record_end = False, -1
                if header.kind not in META_KINDS:
                    return self._member(header, meta)
                self._read_meta(header, meta)
            except (_BadHeaderError, TarFieldError) as error:
                wound = self._pass_damage(block, offset, meta, str(error))
                if wound is not None:
                    return wound
                meta = _Meta(self._cursor.position)

    def read(self, member: Member) -> bytes:
        """Return the file of a member, holes filled; it has `size_bytes`.

        Raises:
            CorruptRecordError: The stream ends inside it, or is damaged.
        """
        stored = self._cursor.take(member.stored_bytes)
        padding_bytes = padded(member.stored_bytes) - member.stored_bytes
        if len(stored) < member.stored_bytes or self._cursor.skip(padding_bytes) < padding_bytes:
            raise self._cut(member)
        return stored if member.sparse is None else member.sparse.expand(stored)

    def skip(self, member: Member) -> None:
        """Pass over the data of a member.

        Raises:
            CorruptRecordError: The stream ends inside them, or is damaged.
        """
        count = padded(member.stored_bytes)
        if self._cursor.skip(count) < count:
            raise self._cut(member)

    def _pass_zeros(self, offset: int) -> bool:
        """Pass over zero blocks; tells whether they end an archive."""
        while True:
            block = self._cursor.peek(BLOCK_BYTES)
            if not block or block != ZERO_BLOCK[: len(block)]:
                break
            self._cursor.take(BLOCK_BYTES)
        if self._cursor.position - offset < 2 * BLOCK_BYTES:
            return False  # a lone one is passed over, as by GNU tar
        self._record_end = -(-(offset + 2 * BLOCK_BYTES) // _RECORD_BYTES) * _RECORD_BYTES
        return True

    def _read_header(self, block: bytes, offset: int, meta: _Meta) -> TarHeader:
        if len(block) == BLOCK_BYTES:
            header = read_header(block)
            self._cursor.take(BLOCK_BYTES)
            return header
        if self._record_end >= 0:
            raise _BadHeaderError("it is cut")
        if len(block) >= _NAMED_BYTES and block[156] in FILE_KINDS:
            self.next_name = meta.name or header_name(block)
        raise self._damage(offset, "ends inside a header: the file is cut")

    def _pass_damage(self, block: bytes, offset: int, meta: _Meta, reason: str) -> Wound | None:
        """Go to the next good header; None where nothing but padding was passed.

        Raises:
            CorruptRecordError: There is none, or the damage is no single header.
        """
        if self._record_end >= 0:
            if offset < self._record_end:
                self._cursor.skip(self._record_end - self._cursor.position)
                return None
            raise self._damage(offset, "goes on behind the end of its archive with what is no tar")
        if self._is_first:
            raise self._damage(offset, f"has no tar header where one belongs: {reason}")
        owner = None
        if self._cursor.position == offset:
            owner = self._owner_name(block, meta)
            self._cursor.take(BLOCK_BYTES)
        while not is_header(candidate := self._cursor.peek(BLOCK_BYTES)):
            if len(candidate) < BLOCK_BYTES:
                what = f"has a damaged header ({reason}) and no good one behind it"
                raise self._damage(offset, what)
            self._cursor.take(BLOCK_BYTES)
        if self._cursor.position != offset + BLOCK_BYTES + _stated_bytes(block):
            owner = None
        return Wound(meta.offset, f"the header at {offset} is damaged: {reason}", owner)

    def _owner_name(self, block: bytes, meta: _Meta) -> bytes | None:
        """Return the name of the member that a damaged header is of: what `Wound.owner` says."""
        if block[156] in FILE_KINDS:
            return meta.name or None  # the name in the block may be what is damaged
        size_bytes = _stated_bytes(block)
        if block[156] not in PAX_KINDS or not 0 < size_bytes <= META_BYTES_MAX:
            return None
        data = self._cursor.peek(BLOCK_BYTES + size_bytes)[BLOCK_BYTES:]
        try:
            return dict(read_pax(data)).get(b"path", b"")
        except TarFieldError:
            return None

    def _read_meta(self, header: TarHeader, meta: _Meta) -> None:
        if header.size_bytes > META_BYTES_MAX:
            raise _BadHeaderError(
                f"its PAX header or long name has {header.size_bytes} bytes, {META_BYTES_MAX} fit"
            )
        at = self._cursor.position - BLOCK_BYTES
        data = self._cursor.take(header.size_bytes)
        if len(data) < header.size_bytes:
            raise self._damage(at, "ends inside a PAX header or long name: the file is cut")
        self._cursor.skip(padded(header.size_bytes) - header.size_bytes)
        meta.is_pending = True
        if header.kind == LONG_NAME:
            meta.name = data.split(b"\0", 1)[0]
        elif header.kind in PAX_KINDS:
            _take_pax(read_pax(data), meta)
        elif header.kind == PAX_GLOBAL:
            read_pax(data)
        else:
            assert header.kind == LONG_LINK

    def _member(self, header: TarHeader, meta: _Meta) -> Member:
        size_bytes = header.size_bytes if meta.size_bytes is None else meta.size_bytes
        if not header.has_data:
            size_bytes = 0
        member = Member(
            meta.offset, meta.name or header.name, header.is_file, size_bytes, size_bytes
        )
        try:
            if header.kind == SPARSE:
                member.sparse = self._old_sparse(header.block)
            elif meta.sparse is not None:
                member.name = meta.sparse.name or member.name
                member.sparse = meta.sparse.to_map()
                if member.sparse is not None and member.sparse.is_in_data:
                    self._read_map(member, member.sparse)
            if member.sparse is not None:
                member.size_bytes = member.sparse.size_bytes
                member.sparse.check(member.stored_bytes)
        except TarFieldError as error:
            member.fault, member.sparse = str(error), None
        return member

    def _old_sparse(self, block: bytes) -> SparseMap:
        found = SparseMap(read_size(block[483:495]), read_old_pieces(block[386:482]))
        is_extended = bool(block[482])
        while is_extended:
            at = self._cursor.position
            block = self._cursor.take(BLOCK_BYTES)
            if len(block) < BLOCK_BYTES:
                raise self._damage(at, "ends inside a sparse map: the file is cut")
            found.pieces += read_old_pieces(block[:504])
            is_extended = bool(block[504])
            if len(found.pieces) > PIECES_MAX:
                raise _BadHeaderError(f"its sparse map has over {PIECES_MAX} pieces")
        return found

    def _read_map(self, member: Member, sparse: SparseMap) -> None:
        """Read the map before the data; what is left of them is what the member stores."""
        reader = MapInData()
        pieces = None
        while pieces is None:
            if member.stored_bytes < BLOCK_BYTES:
                raise TarFieldError("its sparse map is none")
            at = self._cursor.position
            block = self._cursor.take(BLOCK_BYTES)
            if len(block) < BLOCK_BYTES:
                raise self._damage(at, "ends inside a sparse map: the file is cut")
            member.stored_bytes -= BLOCK_BYTES
            pieces = reader.feed(block)
        sparse.pieces = pieces

    def _cut(self, member: Member) -> CorruptRecordError:
        return self._damage(
            member.offset, f"ends inside the member {shown_name(member.name)!r}: the file is cut"
        )

    def _damage(self, offset: int, what: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"{self._path} {what}; byte offset {offset} of the tar: restore the file or let the "
            "error budget skip it",
            byte_offset=offset,
        )


def _take_pax(keywords: list[tuple[bytes, bytes]], meta: _Meta) -> None:
    for keyword, value in keywords:
        if keyword == b"path":
            meta.name = value
        elif keyword == b"size":
            meta.size_bytes = decimal(value)
        elif keyword.startswith(b"GNU.sparse."):
            meta.sparse = meta.sparse or PaxSparse()
            meta.sparse.take(keyword.removeprefix(b"GNU.sparse."), value)


def _stated_bytes(block: bytes) -> int:
    """Return the bytes of data that a damaged header tells of, -1 where it does not."""
    try:
        return padded(max(-1, read_number(block[124:136], "size")))
    except TarFieldError:
        return -1


def shown_name(name: bytes) -> str:
    """Return a member's name for people and as a key; bytes that are not UTF-8 are escaped."""
    return name.decode(errors="backslashreplace")
