"""Small objects read whole, without a manifest: media that a record names by URL, an idx beside a bin."""

from __future__ import annotations

from msd_client.contract.errors import CorruptRecordError
from msd_daemon.stores.options import StoreOptions, configured_options
from msd_daemon.stores.store import open_store
from msd_daemon.stores.urls import parse_url


def read_whole(url: str, bytes_max: int, options: StoreOptions | None = None) -> bytes:
    """Return all bytes of an object.

    Args:
        url: Where it lies.
        bytes_max: A larger one is refused; at most one request of it is read.
        options: Default: those of the process.

    Raises:
        ConfigError: The URL is faulty.
        CorruptRecordError: It has over `bytes_max` bytes, or changed while it was read.
        StoreMissingError: It is not there.
        StoreError: It cannot be read.
    """
    options = options or configured_options()
    store, key = open_store(url, options), parse_url(url).key
    step = options.request_bytes_max
    first = store.read(key, 0, max(1, min(bytes_max, step)))
    if first.size_bytes > bytes_max:
        raise CorruptRecordError(
            f"{url} has {first.size_bytes} bytes, at most {bytes_max} are read: raise "
            "record_bytes_max or leave it out",
            shard=url,
        )
    body = bytearray(first.body)
    while len(body) < first.size_bytes:
        more = store.read(key, len(body), min(len(body) + step, first.size_bytes))
        if (more.size_bytes, more.validator) != (first.size_bytes, first.validator):
            raise CorruptRecordError(
                f"{url} changed while it was read: read it again when it is at rest", shard=url
            )
        body += more.body
    return bytes(body)
