"""Tells shards that are not what the job was resolved with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.manifest import describe_shard
from msd_daemon.stores.urls import is_url


def check_shards(spec: SourceSpec, shards: Iterable[Shard]) -> None:
    """Compare size and fingerprint of shards with the frozen manifest.

    A fingerprint is over the size and the first and last 64 KiB. Shards in stores are passed over:
    every answer of a store is compared with the frozen ETag as it is read.

    Raises:
        CorruptRecordError: A shard was changed or is gone; it is named.
    """
    for shard in shards:
        if is_url(shard.path):
            continue
        try:
            seen = describe_shard(Path(shard.path), spec.format, spec.compression)
        except (ConfigError, CorruptRecordError, OSError) as error:
            raise _changed(spec, shard, str(error)) from error
        if seen.size_bytes != shard.size_bytes:
            raise _changed(spec, shard, f"{seen.size_bytes} bytes instead of {shard.size_bytes}")
        if seen.fingerprint != shard.fingerprint:
            found = f"fingerprint {seen.fingerprint} instead of {shard.fingerprint}"
            raise _changed(spec, shard, found)


def _changed(spec: SourceSpec, shard: Shard, what: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"source {spec.name}: shard {shard.path} was changed since the job was resolved ({what}): "
        "restore the file; what was trained on can't be read any more",
        source=spec.name,
        shard=shard.path,
    )
