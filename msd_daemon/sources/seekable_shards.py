"""What readers of seekable formats share: tables of shards kept for a while, blocks of records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, ShuffleRule
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.record import RawRecord

_UNREADABLE = int(RecordStatus.UNREADABLE)
_TOO_LARGE = int(RecordStatus.TOO_LARGE)
TABLE_BYTES_MAX = 64 << 20
"""Of a shard's offsets: 16 million records."""
Table = TypeVar("Table")


class Tables(Generic[Table]):
    """What was found out about the shards that were opened last.

    Args:
        count_max: Shards that are remembered.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._found: OrderedDict[str, Table] = OrderedDict()

    def peek(self, path: str) -> Table | None:
        """Return the table of a shard where it is remembered."""
        return self._found.get(path)

    def get(self, path: str, make: Callable[[], Table]) -> Table:
        """Return the table of a shard, made where it is not remembered."""
        if path in self._found:
            self._found.move_to_end(path)
            return self._found[path]
        table = make()
        self._found[path] = table
        if len(self._found) > self._count_max:
            self._found.popitem(last=False)
        return table


def block_extent(shard: Shard, starts: npt.NDArray[np.int64], block: int) -> tuple[int, int]:
    """Return the first record of a block, and the one behind its last.

    Raises:
        CorruptRecordError: The shard has no such block now: it was changed.
    """
    if block + 1 >= len(starts):
        raise CorruptRecordError(
            f"{shard.path} has {len(starts) - 1} blocks now, block {block} was to be read: it was "
            "changed, submit the job anew",
            shard=shard.path,
        )
    return int(starts[block]), int(starts[block + 1])


def check_table(path: str, records: int, size_bytes: int) -> int:
    """Return the bytes of a shard's count and 32-bit offsets.

    Args:
        path: Of the shard.
        records: How many it is said to hold.
        size_bytes: Of it, unpacked.

    Raises:
        CorruptRecordError: They do not fit into it, or are beyond belief.
    """
    table_bytes = 4 * (records + 2)
    if table_bytes > min(size_bytes, TABLE_BYTES_MAX):
        raise CorruptRecordError(
            f"{path} has {size_bytes} bytes, the offsets of {records} samples alone need "
            f"{table_bytes}, at most {TABLE_BYTES_MAX}",
            shard=path,
        )
    return table_bytes


def extent_fault(
    number: int, extent: tuple[int, int], size_bytes: int, record_bytes_max: int
) -> RawRecord | None:
    """Return what is wrong with where a record lies, None where nothing is.

    Args:
        number: Of the record, its place.
        extent: First byte, and the one behind the last.
        size_bytes: Of its shard, unpacked.
        record_bytes_max: Larger records are refused.
    """
    begin, end = extent
    if not 0 <= begin <= end <= size_bytes:
        fault = f"lies at bytes {begin} to {end} of {size_bytes}"
        return RawRecord(number, b"", _UNREADABLE, fault)
    if end - begin > record_bytes_max:
        fault = f"{end - begin} bytes, record_bytes_max = {record_bytes_max}"
        return RawRecord(number, b"", _TOO_LARGE, fault)
    return None


def check_offsets(
    path: str, head: bytes, records: int, size_bytes: int, *, is_exact: bool = False
) -> npt.NDArray[np.int64]:
    """Return where each record begins, and the last one ends. Shape (records + 1,).

    Args:
        path: Of the shard.
        head: Its first 4 * (records + 2) bytes: count and 32-bit offsets.
        records: How many samples index.json says that it has.
        size_bytes: Where its last record may end.
        is_exact: True where it has to end there.

    Raises:
        CorruptRecordError: They do not fit.
    """
    if len(head) < 4 * (records + 2):
        raise shard_fault(path, f"is too short for the offsets of {records} samples")
    numbers = np.frombuffer(head, "<u4").astype(np.int64)
    if int(numbers[0]) != records:
        raise shard_fault(path, f"holds {int(numbers[0])} samples, index.json says {records}")
    first, last = int(numbers[1]), int(numbers[-1])
    if first < len(head) or last > size_bytes or (is_exact and last != size_bytes):
        raise shard_fault(
            path,
            f"has samples at bytes {first} to {last}, they lie between {len(head)} and {size_bytes}",
        )
    return numbers[1:]


def shard_fault(path: str, what: str) -> CorruptRecordError:
    """Return the error of a damaged shard."""
    return CorruptRecordError(f"{path} {what}", shard=path)


def cut_records(offsets: npt.NDArray[np.int64], rule: ShuffleRule) -> npt.NDArray[np.int64]:
    """Return the first record of each block of a shard, with the record count at the end.

    A block holds at most `block_records` records and closes before the one that would take it over
    `block_bytes`, so a larger record stands alone.

    Args:
        offsets: Where each record begins in bytes, and the last one ends, ascending.
            Shape (records + 1,).
        rule: The limits.

    Returns:
        Shape (blocks + 1,), of at least one block.
    """
    starts = [0]
    first, count = 0, len(offsets) - 1
    while first < count:
        limit = int(offsets[first]) + rule.block_bytes
        fitting = int(np.searchsorted(offsets, limit, side="right")) - 1 - first
        first = min(first + min(max(fitting, 1), rule.block_records), count)
        starts.append(first)
    return np.array(starts if count > 0 else [0, 0], dtype=np.int64)
