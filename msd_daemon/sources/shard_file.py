"""Opening a shard as the manifest has it: a file of this machine, or an object of a store."""

from __future__ import annotations

from federation.model.job import Shard
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import (
    GZIP_MAGIC,
    START,
    XZ_MAGIC,
    ByteFile,
    ByteStream,
    MemberStream,
    PlainStream,
    SeekPoint,
    ShardFile,
)
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.zstd_stream import ZstdStream, is_zstd
from msd_daemon.stores.urls import is_url

_PAIR_DIGITS = 16


def pair_fingerprint(own: str, others: str) -> str:
    """Return the fingerprint of a shard in a store that has files beside it: `own-others`.

    Args:
        own: Of the shard's own object.
        others: Of the objects beside it.
    """
    return f"{own[:_PAIR_DIGITS]}-{others[:_PAIR_DIGITS]}"


def other_fingerprint(shard: Shard) -> str:
    """Return the beginning of the fingerprint of what lies beside a shard in a store."""
    return shard.fingerprint.partition("-")[2]


def open_shard(shard: Shard, meter: ReadMeter) -> ByteFile:
    """Open a shard and check that it has the size that the manifest froze.

    Of an object in a store nothing is asked here: each of its answers is checked as it comes, so
    that opening 40,000 shards costs no request (E19).

    Args:
        shard: As the manifest has it.
        meter: Counts what is read.

    Raises:
        ConfigError: The store of a URL cannot be used.
        CorruptRecordError: Its size differs.
        OSError: It cannot be opened.
    """
    if is_url(shard.path):
        from msd_daemon.stores.remote_file import RemoteFile

        own = shard.fingerprint.partition("-")[0]
        return RemoteFile(shard.path, shard.size_bytes, own, meter)
    try:
        file = ShardFile(shard.path, meter)
    except OSError:
        meter.lost.add(shard.path)
        raise
    if file.size_bytes != shard.size_bytes:
        size_bytes = file.size_bytes
        file.close()
        meter.lost.add(shard.path)
        raise CorruptRecordError(
            f"{shard.path} has {size_bytes} bytes, the frozen manifest says {shard.size_bytes}: "
            "restore the file or submit the job anew",
            shard=shard.path,
            byte_offset=0,
        )
    return file


def open_path(path: str, meter: ReadMeter) -> ByteFile:
    """Open a file or an object that no manifest has; of an object size and ETag are asked for.

    Raises:
        ConfigError: The URL is faulty, or its store cannot be used.
        OSError: It cannot be opened; of a store only where it is not there.
        StoreError: A store did not answer.
    """
    if is_url(path):
        from msd_daemon.stores.remote_file import open_remote

        return open_remote(path, meter)
    return ShardFile(path, meter)


def open_stream(file: ByteFile, start: SeekPoint = START) -> ByteStream:
    """Return the decompressed bytes of a file, by what its first bytes say, not its name."""
    head = file.read_at(0, len(XZ_MAGIC))
    if head.startswith(GZIP_MAGIC):
        return MemberStream(file, "gzip", start)
    if head == XZ_MAGIC:
        return MemberStream(file, "xz", start)
    if is_zstd(head):
        return ZstdStream(file, start)
    return PlainStream(file, start)
