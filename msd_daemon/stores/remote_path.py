"""Places in a store, as `Path` is one on this machine, and the objects that a job's paths stand for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Self

from msd_client.contract.errors import StoreMissingError
from msd_daemon.stores.answers import ObjectInfo, object_fingerprint
from msd_daemon.stores.store import Store
from msd_daemon.stores.urls import parse_url


class Listed:
    """What is known of a store's objects: those of one listing; others are asked for, once each.

    Args:
        store: Where they lie.
        infos: Of the listing, by key.
        folder: What was listed: all below it is known. None: nothing was.
    """

    def __init__(
        self, store: Store, infos: Mapping[str, ObjectInfo], folder: str | None = None
    ) -> None:
        self.store = store
        self._infos = infos
        self._folder = folder
        self._asked: dict[str, ObjectInfo | None] = {}
        self._lock = threading.Lock()

    def info(self, key: str) -> ObjectInfo | None:
        """Return size and validator of an object, None where there is none.

        Raises:
            StoreError: The store does not answer.
        """
        if key in self._infos or (self._folder is not None and key.startswith(self._folder)):
            return self._infos.get(key)
        with self._lock:
            if key not in self._asked:
                try:
                    self._asked[key] = self.store.stat(key)
                except StoreMissingError:
                    self._asked[key] = None
            return self._asked[key]


@dataclass(frozen=True)
class RemotePath:
    """A key of a store."""

    url: str
    """Without a slash at its end."""
    listed: Listed = field(compare=False, repr=False)

    @property
    def parent(self) -> Self:
        """The folder that it lies in."""
        return replace(self, url=self.url.rpartition("/")[0])

    @property
    def name(self) -> str:
        """Last part of its key, without a query."""
        return self.url.partition("?")[0].rpartition("/")[2]

    @property
    def suffixes(self) -> list[str]:
        """Extensions of its name, each with its dot."""
        return PurePosixPath(self.name).suffixes

    @property
    def key(self) -> str:
        """Its key below the bucket."""
        return parse_url(self.url).key

    def is_file(self) -> bool:
        """Tell whether there is such an object.

        Raises:
            StoreError: The store does not answer.
        """
        return self.listed.info(self.key) is not None

    def info(self) -> ObjectInfo:
        """Return size and validator of the object.

        Raises:
            StoreMissingError: It is not there.
            StoreError: The store does not answer.
        """
        found = self.listed.info(self.key)
        if found is None:
            raise StoreMissingError(f"{self.url} is not there: restore it", path=self.url)
        return found

    def __truediv__(self, name: str, /) -> Self:
        return replace(self, url=f"{self.url}/{name}")

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class RemoteObject:
    """An object that a job's path stands for; what a `Path` is to a local shard."""

    path: RemotePath
    size_bytes: int
    fingerprint: str
    """Of name, size and ETag."""
    format: str = ""
    """Of the data set that its folder is, empty where its name tells the format."""

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.path.url

    @property
    def name(self) -> str:
        """Last part of its key."""
        return self.path.name

    @property
    def suffixes(self) -> list[str]:
        """Extensions of its name, each with its dot."""
        return self.path.suffixes

    def is_file(self) -> bool:
        """Tell that it can be read."""
        return True

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url


def remote_object(path: RemotePath, kind: str = "") -> RemoteObject:
    """Return what is known of an object, asked for where no listing has told.

    Raises:
        StoreMissingError: It is not there.
        StoreError: The store does not answer.
    """
    info = path.info()
    return RemoteObject(path, info.size_bytes, info_fingerprint(info), kind)


def info_fingerprint(info: ObjectInfo) -> str:
    """Return the fingerprint of an object."""
    return object_fingerprint(info.key.rpartition("/")[2], info.size_bytes, info.validator)
