"""Shards that lie in object stores or on web servers: listing, ranged reads, retries, a disk cache.

Synchronous: loader workers have neither an event loop nor ZeroMQ. Bodies are fetched with the
standard library's HTTP client, which costs half of obstore's CPU a byte (loopback, 1 MiB: 0.16
against 0.31 s a GB) and shows Retry-After, which obstore hides; obstore signs (7 us), finds
credentials and lists, and reads GCS and Azure. fsspec has S3 through asyncio alone.
"""

from __future__ import annotations


def read_object(url: str, bytes_max: int) -> bytes:
    """Return all bytes of a small object, in one request where it fits into one.

    Raises:
        ConfigError: The URL is faulty.
        CorruptRecordError: It has over `bytes_max` bytes, or changed while it was read.
        StoreMissingError: It is not there.
        StoreError: It cannot be read.
    """
    # Late: a worker without remote shards needs neither ssl nor an HTTP client.
    from msd_daemon.stores.whole_object import read_whole

    return read_whole(url, bytes_max)
