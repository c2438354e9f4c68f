"""One header block of a tar: v7, ustar, GNU and PAX kinds, read strictly. Pure.

Every number and name is hostile: what does not fit raises TarFieldError, whose words say why.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_BYTES = 512
ZERO_BLOCK = bytes(BLOCK_BYTES)
META_BYTES_MAX = 1 << 20
"""Of one PAX header or GNU long name."""
SIZE_MAX = (1 << 63) - 1

PAX_KINDS = frozenset(b"xX")  # X: Solaris' name of it
PAX_GLOBAL = ord("g")
LONG_NAME = ord("L")
LONG_LINK = ord("K")
SPARSE = ord("S")
META_KINDS = PAX_KINDS | {PAX_GLOBAL, LONG_NAME, LONG_LINK}
"""Kinds that say something of the member behind them."""
FILE_KINDS = frozenset(b"\x0007S")
"""Regular, old regular, contiguous and GNU sparse files."""
_BARE_KINDS = frozenset(b"123456")
"""Links, devices, folders and pipes: no data follows, whatever their size says."""

_POSIX_MAGIC = b"ustar\0"
_MAGIC = b"ustar"
_CHECKSUM = slice(148, 156)
_SPACES_SUM = 8 * ord(" ")


class TarFieldError(ValueError):
    """A field of a header holds what it cannot mean."""


@dataclass(slots=True)
class TarHeader:
    """A header block whose checksum holds."""

    block: bytes
    kind: int
    """The type flag."""
    size_bytes: int

    @property
    def name(self) -> bytes:
        """The name as this block alone has it."""
        return header_name(self.block)

    @property
    def is_file(self) -> bool:
        """True for what holds a file's content."""
        is_old_folder = self.kind == 0 and self.name.endswith(b"/")
        return self.kind in FILE_KINDS and not is_old_folder

    @property
    def has_data(self) -> bool:
        """True where blocks of data follow; unknown kinds are read as files."""
        is_old_folder = self.kind == 0 and self.name.endswith(b"/")
        return self.kind not in _BARE_KINDS and not is_old_folder


def read_header(block: bytes) -> TarHeader:
    """Return the header that a block of 512 bytes is.

    Raises:
        TarFieldError: Its checksum does not hold, or its size is none.
    """
    check_checksum(block)
    return TarHeader(block, block[156], read_size(block[124:136]))


def is_header(block: bytes) -> bool:
    """Tell whether a block is surely a header: for looking behind damage."""
    if block[257:262] != _MAGIC:
        return False
    try:
        read_header(block)
    except TarFieldError:
        return False
    return True


def check_checksum(block: bytes) -> None:
    """Check a header's sum of bytes; some old writers added them up as signed.

    Raises:
        TarFieldError: It does not hold.
    """
    stated = read_number(block[_CHECKSUM], "checksum")
    others = block[:148] + block[156:]
    unsigned = sum(others) + _SPACES_SUM
    if stated == unsigned:
        return
    if stated != unsigned - 256 * sum(byte >> 7 for byte in others):
        raise TarFieldError(f"its checksum is {stated}, its bytes give {unsigned}")


def read_size(field: bytes) -> int:
    """Return a size field's bytes.

    Raises:
        TarFieldError: It is no number, or one below 0 or beyond 63 bits.
    """
    size_bytes = read_number(field, "size")
    if not 0 <= size_bytes <= SIZE_MAX:
        raise TarFieldError(f"its size is {size_bytes}")
    return size_bytes


def read_number(field: bytes, what: str) -> int:
    """Return a numeric field: octal digits, or GNU's big-endian two's complement.

    Raises:
        TarFieldError: It is neither.
    """
    if field[:1] in (b"\x80", b"\xff"):
        value = int.from_bytes(field[1:], "big")
        return value if field[0] == 0x80 else value - (1 << 8 * (len(field) - 1))
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits and not (digits.isdigit() and max(digits) <= ord("7")):
        raise TarFieldError(f"its {what} is {field!r}, no octal number")
    return int(digits or b"0", 8)


def header_name(block: bytes) -> bytes:
    """Return the name that stands in a block, whether or not it is a whole header."""
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0]
    if prefix and block[257:263] == _POSIX_MAGIC:
        return prefix + b"/" + name
    return name


def padded(size_bytes: int) -> int:
    """Return the bytes that data take with the padding behind them."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def read_pax(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keywords and values of a PAX header, in their order.

    Raises:
        TarFieldError: A record's length or shape is wrong.
    """
    found: list[tuple[bytes, bytes]] = []
    begin = 0
    while begin < len(data) and data[begin]:  # some writers pad with zero bytes
        space = data.find(b" ", begin, begin + 9)
        digits = data[begin : max(space, begin)]
        end = begin + int(digits) if digits.isdigit() else begin
        if not space + 1 < end <= len(data) or data[end - 1 : end] != b"\n" or space < 0:
            raise TarFieldError(f"its PAX record at byte {begin} is none")
        keyword, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals:
            raise TarFieldError(f"its PAX record at byte {begin} has no value")
        found.append((keyword, value))
        begin = end
    return found
