"""Sparse files of a tar: which bytes of a file are stored. GNU's old map and the three of PAX."""

from __future__ import annotations

from dataclasses import dataclass, field

from msd_daemon.sources.tar_header import SIZE_MAX, TarFieldError, read_size

PIECES_MAX = 1 << 16
"""Of one file; a map with more is refused."""
_OLD_PIECE_BYTES = 24
_DIGITS_MAX = 19


@dataclass(slots=True)
class SparseMap:
    """The stored pieces of a file that is mostly holes."""

    size_bytes: int
    """Of the file with its holes."""
    pieces: list[tuple[int, int]]
    """(offset, bytes) of what is stored, in the order it is stored in."""
    is_in_data: bool = False
    """True where the map itself stands at the beginning of the data (PAX 1.0)."""

    def check(self, stored_bytes: int) -> None:
        """Check that pieces ascend, lie inside the file and take what is stored.

        Raises:
            TarFieldError: They don't.
        """
        end = total = 0
        for offset, count in self.pieces:
            if offset < end or offset + count > self.size_bytes:
                raise TarFieldError(
                    f"its sparse map has {count} bytes at {offset}, of {self.size_bytes}"
                )
            end = offset + count
            total += count
        if total != stored_bytes:
            raise TarFieldError(f"its sparse map has {total} bytes, {stored_bytes} are stored")

    def expand(self, stored: bytes) -> bytes:
        """Return the file; the caller has checked its size and the map."""
        content = bytearray(self.size_bytes)
        begin = 0
        for offset, count in self.pieces:
            content[offset : offset + count] = stored[begin : begin + count]
            begin += count
        return bytes(content)


def read_old_pieces(data: bytes) -> list[tuple[int, int]]:
    """Return the pieces of a header (4) or of a block behind it (21) of GNU's old map.

    Raises:
        TarFieldError: A number is none.
    """
    pieces: list[tuple[int, int]] = []
    for begin in range(0, len(data) - _OLD_PIECE_BYTES + 1, _OLD_PIECE_BYTES):
        offset = data[begin : begin + 12]
        count = data[begin + 12 : begin + _OLD_PIECE_BYTES]
        if not offset.strip(b"\0"):
            break
        pieces.append((read_size(offset), read_size(count)))
    return pieces


@dataclass(slots=True)
class PaxSparse:
    """What PAX keywords say of a sparse file."""

    name: bytes = b""
    size_bytes: int | None = None
    is_in_data: bool = False
    _offsets: list[int] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def take(self, keyword: bytes, value: bytes) -> None:
        """Take note of a keyword `GNU.sparse.*`.

        Raises:
            TarFieldError: Its value is none, or there are too many.
        """
        if keyword in (b"size", b"realsize"):
            self.size_bytes = decimal(value)
        elif keyword == b"name":
            self.name = value
        elif keyword == b"major":
            self.is_in_data = decimal(value) >= 1
        elif keyword == b"offset":
            self._offsets.append(decimal(value))
        elif keyword == b"numbytes":
            self._counts.append(decimal(value))
        elif keyword == b"map":
            numbers = [decimal(number) for number in value.split(b",")] if value else []
            self._offsets, self._counts = numbers[::2], numbers[1::2]
        if max(len(self._offsets), len(self._counts)) > PIECES_MAX:
            raise TarFieldError(f"its sparse map has over {PIECES_MAX} pieces")

    def to_map(self) -> SparseMap | None:
        """Return the map, None where the member is not sparse.

        Raises:
            TarFieldError: Offsets and sizes are not pairs.
        """
        if self.size_bytes is None:
            return None
        if len(self._offsets) != len(self._counts):
            raise TarFieldError("its sparse map has an offset without a size")
        pieces = list(zip(self._offsets, self._counts, strict=True))
        return SparseMap(self.size_bytes, pieces, self.is_in_data)


class MapInData:
    """Reads the map that stands before the data: decimal numbers, one a line.

    Raises:
        TarFieldError: On `feed`: a number is none, or there are too many.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._numbers: list[int] = []

    def feed(self, block: bytes) -> list[tuple[int, int]] | None:
        """Take the next block; returns the pieces once they are all there."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            if self._missing:
                self._numbers.append(decimal(line))
            if self._numbers[0] > PIECES_MAX:
                raise TarFieldError(
                    f"its sparse map has {self._numbers[0]} pieces, {PIECES_MAX} fit"
                )
        if not self._missing:
            return list(zip(self._numbers[1::2], self._numbers[2::2], strict=True))
        if len(self._rest) > _DIGITS_MAX:
            raise TarFieldError("its sparse map is none")
        return None

    @property
    def _missing(self) -> int:
        return 1 if not self._numbers else 1 + 2 * self._numbers[0] - len(self._numbers)


def decimal(value: bytes) -> int:
    """Return a decimal number of at most 63 bits.

    Raises:
        TarFieldError: It is none.
    """
    if not value.isdigit() or len(value) > _DIGITS_MAX or int(value) > SIZE_MAX:
        raise TarFieldError(f"{value[:40]!r} is no number from 0 to {SIZE_MAX}")
    return int(value)
