"""Opening a shard as the manifest has it."""

from __future__ import annotations

from federation.model.job import Shard
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import (
    GZIP_MAGIC,
    START,
    XZ_MAGIC,
    ByteStream,
    MemberStream,
    PlainStream,
    SeekPoint,
    ShardFile,
)
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.zstd_stream import ZstdStream, is_zstd


def open_shard(shard: Shard, meter: ReadMeter) -> ShardFile:
    """Open a shard and check that it has the size that the manifest froze.

    Raises:
        CorruptRecordError: Its size differs.
        OSError: It cannot be opened.
    """
    file = ShardFile(shard.path, meter)
    if file.size_bytes != shard.size_bytes:
        size_bytes = file.size_bytes
        file.close()
        raise CorruptRecordError(
            f"{shard.path} has {size_bytes} bytes, the frozen manifest says {shard.size_bytes}: "
            "restore the file or submit the job anew",
            shard=shard.path,
            byte_offset=0,
        )
    return file


def open_stream(file: ShardFile, start: SeekPoint = START) -> ByteStream:
    """Return the decompressed bytes of a file, by what its first bytes say, not its name."""
    head = file.read_at(0, len(XZ_MAGIC))
    if head.startswith(GZIP_MAGIC):
        return MemberStream(file, "gzip", start)
    if head == XZ_MAGIC:
        return MemberStream(file, "xz", start)
    if is_zstd(head):
        return ZstdStream(file, start)
    return PlainStream(file, start)
