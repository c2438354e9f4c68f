"""Layouts of LitData chunk files, little-endian.

Classic: u32 items n, u32 offsets[n + 1] from the file's start, the items. As a whole it may be
zstd; its items may each be a zstd frame. Framed: `LDFZ01`, u16 version and flags, u32 n, items of a
frame, frames m, u32 offsets[n + 1] from the first item, m times (u32 first item, u32 items, u64
offset in the file, u32 bytes, u32 raw bytes), zstd frames. Rows: an Arrow IPC file, its length as
u32 and `LDARW01` behind a classic chunk, whose own items may be empty.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from federation.model.job import ShuffleRule
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ByteFile
from msd_daemon.sources.seekable_shards import check_offsets, check_table, cut_records

Numbers = npt.NDArray[np.int64]

_FRAMED_MAGIC = b"LDFZ01\x00\x00"
_FRAMED_HEAD = struct.Struct("<8sHHIII")
_FRAME_DTYPE = np.dtype(
    [("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("bytes", "<u4"), ("raw_bytes", "<u4")]
)
_ROWS_MAGIC = b"LDARW01\x00"
_ROWS_TAIL_BYTES = 12
FRAME_BYTES_MAX = 512 << 20
"""Raw bytes of a frame that is unpacked."""


@dataclass
class ChunkLayout:
    """How a chunk is read; its offsets are read again block by block."""

    kind: Literal["classic", "packed", "framed", "rows"]
    starts: Numbers
    """First item of each block and the item count at the end. Shape (blocks + 1,)."""
    offsets_at: int = 4
    """Where the offsets lie in the file."""
    frames: Any = None
    """Framed: a structured array. Shape (frames,)."""
    first_frames: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    """Framed: first frame of each block and the frame count. Shape (blocks + 1,)."""
    window: tuple[int, int] = (0, 0)
    """Rows: first byte and bytes of the Arrow file."""


def read_layout(file: ByteFile, items: int, rule: ShuffleRule) -> ChunkLayout:
    """Return the layout of a chunk that is not compressed as a whole.

    Args:
        file: The chunk.
        items: How many samples index.json says that it has.
        rule: The limits of blocks.

    Raises:
        CorruptRecordError: Its header contradicts the file or index.json.
    """
    if file.read_at(0, len(_FRAMED_MAGIC)) == _FRAMED_MAGIC:
        return _framed(file, items, rule)
    head = file.read_at(0, check_table(file.path, items, file.size_bytes))
    offsets = check_offsets(file.path, head, items, file.size_bytes)
    if items and int(offsets[0]) == int(offsets[-1]):
        return ChunkLayout("rows", np.array([0, items]), window=_rows_window(file, len(head)))
    return ChunkLayout("classic", cut_records(np.maximum.accumulate(offsets), rule))


def _rows_window(file: ByteFile, head_bytes: int) -> tuple[int, int]:
    tail_at = file.size_bytes - _ROWS_TAIL_BYTES
    tail = file.read_at(max(0, tail_at), _ROWS_TAIL_BYTES)
    rows_bytes = int.from_bytes(tail[:4], "little")
    if tail[4:] != _ROWS_MAGIC or not 0 < rows_bytes <= tail_at - head_bytes:
        raise _fault(file.path, "holds empty samples and no rows behind them")
    return tail_at - rows_bytes, rows_bytes


def _framed(file: ByteFile, items: int, rule: ShuffleRule) -> ChunkLayout:
    head = file.read_at(0, _FRAMED_HEAD.size)
    if len(head) < _FRAMED_HEAD.size:
        raise _fault(file.path, "is too short for its header")
    _, version, _, count, _, frame_count = _FRAMED_HEAD.unpack(head)
    if version != 1 or count != items:
        raise _fault(
            file.path, f"holds {count} samples in version {version}, index.json says {items} in 1"
        )
    check_table(file.path, items, file.size_bytes)
    table_at = _FRAMED_HEAD.size + 4 * (items + 1)
    table_end = table_at + frame_count * _FRAME_DTYPE.itemsize
    if table_end > file.size_bytes:
        raise _fault(file.path, f"is too short for {frame_count} frames")
    frames = np.frombuffer(file.read_at(table_at, table_end - table_at), _FRAME_DTYPE)
    offsets = np.frombuffer(file.read_at(_FRAMED_HEAD.size, 4 * (items + 1)), "<u4")
    firsts = np.append(frames["first"], items).astype(np.int64)
    ends = frames["offset"].astype(np.float64) + frames["bytes"]
    if int(firsts[0]) != 0 or (np.diff(firsts) != frames["items"]).any():
        raise _fault(file.path, "has frames that do not follow one another")
    if (frames["offset"] < table_end).any() or (ends > file.size_bytes).any():
        raise _fault(file.path, "has frames beyond its end")
    raw_offsets = offsets.astype(np.int64)[firsts]
    if (np.diff(raw_offsets) != frames["raw_bytes"]).any():
        raise _fault(file.path, "has frames whose sizes its offsets contradict")
    frame_starts = _cut_frames(firsts, raw_offsets, rule)
    return ChunkLayout(
        "framed",
        firsts[frame_starts],
        offsets_at=_FRAMED_HEAD.size,
        frames=frames,
        first_frames=frame_starts,
    )


def _cut_frames(firsts: Numbers, offsets: Numbers, rule: ShuffleRule) -> Numbers:
    """Return the first frame of each block: as many as the limits allow, at least one."""
    starts = [0]
    for frame in range(1, len(firsts) - 1):
        begin = starts[-1]
        items = int(firsts[frame + 1] - firsts[begin])
        size = int(offsets[frame + 1] - offsets[begin])
        if items > rule.block_records or size > rule.block_bytes:
            starts.append(frame)
    return np.array([*starts, len(firsts) - 1], dtype=np.int64)


def unpack_frame(path: str, data: bytes, bytes_max: int) -> bytes:
    """Return what one zstd frame unpacks to.

    Raises:
        CorruptRecordError: It is damaged, or larger than it may be.
    """
    import zstandard

    try:
        stated = zstandard.frame_content_size(data)
        if stated > bytes_max:
            raise _fault(path, f"has a zstd frame of {stated} bytes, at most {bytes_max} are read")
        unpacked: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=bytes_max)
    except zstandard.ZstdError as error:
        raise _fault(path, f"has a zstd frame that is damaged ({error})") from error
    return unpacked


def _fault(path: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(f"{path} {what}", shard=path)
