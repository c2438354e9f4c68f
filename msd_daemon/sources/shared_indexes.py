"""Where nodes share the indexes of shards: a folder or a bucket, by content-addressed names.

Whatever happens here is no fault: an index saves reading and nothing else.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from msd_client.contract.errors import MsdError, StoreError
from msd_daemon.stores.options import configured_options
from msd_daemon.stores.urls import is_url

INDEX_BYTES_MAX = 1 << 30


class SharedIndexes(Protocol):
    """Role: a place of indexes that other nodes read too."""

    def get(self, name: str) -> bytes | None:
        """Return an index, None where there is none or it cannot be had."""
        ...

    def put(self, name: str, path: Path) -> None:
        """Give a copy of an index."""
        ...


class FolderIndexes:
    """Indexes in a folder of a shared file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> bytes | None:
        """Return an index, None where there is none or it cannot be had."""
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return None

    def put(self, name: str, path: Path) -> None:
        """Give a copy of an index."""
        from msd_daemon.sources.index import write_durably

        with suppress(OSError):
            write_durably(self._folder / name, path.read_bytes())


class BucketIndexes:
    """Indexes in a bucket; a store that does not answer is not asked again."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._is_silent = False

    def get(self, name: str) -> bytes | None:
        """Return an index, None where there is none or it cannot be had."""
        if self._is_silent:
            return None
        from msd_daemon.stores import read_object

        try:
            return read_object(f"{self._url}/{name}", INDEX_BYTES_MAX)
        except FileNotFoundError:
            return None
        except StoreError:
            self._is_silent = True
        except MsdError:
            return None
        return None

    def put(self, name: str, path: Path) -> None:
        """Give a copy of an index."""
        if self._is_silent:
            return
        from msd_daemon.stores.store import open_store
        from msd_daemon.stores.urls import parse_url

        url = f"{self._url}/{name}"
        try:
            open_store(url).write(parse_url(url).key, path.read_bytes())
        except (MsdError, OSError):
            self._is_silent = True


def shared_indexes() -> SharedIndexes | None:
    """Return the place that this process's store options name, None where they name none."""
    place = configured_options().index_store
    if not place:
        return None
    return BucketIndexes(place) if is_url(place) else FolderIndexes(Path(place))
