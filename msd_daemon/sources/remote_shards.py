"""URLs of a job's paths: the objects they stand for, and each as a shard of the manifest."""

from __future__ import annotations

import hashlib

from federation.model.job import Shard
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.formats import companion_files, format_of
from msd_daemon.sources.shard_file import pair_fingerprint
from msd_daemon.stores.listing import FolderRule, expand_url
from msd_daemon.stores.remote_path import RemoteObject, RemotePath, info_fingerprint

__all__ = ["FolderRule", "RemoteObject", "RemotePath", "describe_remote", "expand_url"]


def describe_remote(found: RemoteObject, kind: str) -> Shard:
    """Return an object as a shard: what the listing said, no request for each (E19).

    The fingerprint of a shard of several files is of the shard's own object and of those beside it.

    Raises:
        ConfigError: A file beside it is not there.
        StoreError: The store does not answer.
    """
    beside = companion_files(format_of(kind), found.path)
    if not beside:
        return Shard(found.url, found.size_bytes, found.fingerprint)
    fingerprints = []
    for path in beside:
        if not path.is_file():
            raise ConfigError(
                f"{path} is not there: {found.name} needs it beside it", path=found.url
            )
        fingerprints.append(info_fingerprint(path.info()))
    others = fingerprints[0]
    if len(fingerprints) > 1:
        others = hashlib.sha256("".join(fingerprints).encode()).hexdigest()
    return Shard(found.url, found.size_bytes, pair_fingerprint(found.fingerprint, others))
