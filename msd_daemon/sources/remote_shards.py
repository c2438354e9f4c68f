"""URLs of a job's paths: the objects they stand for, and each as a shard of the manifest."""

from __future__ import annotations

from collections.abc import Callable

from federation.model.job import Shard
from msd_daemon.sources.shard_file import PAIR_DIGITS
from msd_daemon.stores.listing import RemoteObject, expand_url, stat_index

__all__ = ["RemoteObject", "describe_remote", "expand_remote"]


def expand_remote(url: str, is_wanted: Callable[[str], bool]) -> list[RemoteObject]:
    """Return the objects that a URL stands for, by one listing; `is_wanted` judges names in folders.

    Raises:
        ConfigError: The URL is faulty or matches nothing.
        StoreError: The store does not answer.
    """
    return expand_url(url, is_wanted)


def describe_remote(found: RemoteObject, kind: str) -> Shard:
    """Return an object as a shard: what the listing said, no request for each (E19).

    Of a Megatron pair half of the fingerprint is the bin's and half the idx's.

    Raises:
        ConfigError: A bin has no idx beside it.
    """
    fingerprint = found.fingerprint
    if kind == "megatron":
        index = found.index_fingerprint or stat_index(found.url.removesuffix(".bin") + ".idx")
        fingerprint = fingerprint[:PAIR_DIGITS] + index[:PAIR_DIGITS]
    return Shard(found.url, found.size_bytes, fingerprint)
