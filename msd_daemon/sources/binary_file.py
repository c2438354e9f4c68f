"""Shards as Python file objects, for libraries that take one: pyarrow, PIL, av, soundfile."""

from __future__ import annotations

import io
from typing import Any

from federation.model.job import Shard
from msd_client.contract.errors import MsdError
from msd_daemon.sources.byte_stream import ByteFile
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_path, open_shard


class BinaryFile(io.RawIOBase):
    """A seekable, readable file object over a shard; it owns and closes the shard.

    A library may turn what a read raises into an error of its own: `failure` keeps the typed one.
    """

    def __init__(self, file: ByteFile) -> None:
        super().__init__()
        self._file = file
        self._offset = 0
        self.failure: MsdError | None = None
        """The first typed error of a read, which says more than what the library made of it."""

    @property
    def name(self) -> str:
        """Path or URL."""
        return self._file.path

    def size(self) -> int:
        """Return the file's bytes."""
        return self._file.size_bytes

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that it can be sought."""
        return True

    def tell(self) -> int:
        """Return the place of the next read."""
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; beyond the end is allowed, before the beginning is not.

        Raises:
            ValueError: The place is negative, or `whence` is unknown.
        """
        if self.closed:
            raise ValueError("seek of a closed file")
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._file.size_bytes}
        if whence not in bases:
            raise ValueError(f"whence is {whence}, it must be 0, 1 or 2")
        place = bases[whence] + offset
        if place < 0:
            raise ValueError(f"seek to {place}, before the file's beginning")
        self._offset = place
        return place

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes, all to the end where it is negative or None.

        Raises:
            MsdError: The shard changed, or its store does not answer.
            OSError: It cannot be read.
        """
        if self.closed:
            raise ValueError("read of a closed file")
        left = max(0, self._file.size_bytes - self._offset)
        count = left if size is None or size < 0 else min(size, left)
        try:
            data = self._file.read_at(self._offset, count)
        except MsdError as error:
            self.failure = self.failure or error
            raise
        self._offset += len(data)
        return data

    def readall(self) -> bytes:
        """Return all bytes to the end."""
        return self.read(-1)

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer as far as there are bytes; returns how many there were."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the shard; calling again does nothing."""
        if not self.closed:
            self._file.close()
        super().close()


def open_binary(path: str, meter: ReadMeter) -> BinaryFile:
    """Open a path or URL as a Python file object; the caller closes it.

    Raises:
        ConfigError: The URL is faulty, or its store cannot be used.
        OSError: It cannot be opened; of a store only where it is not there.
        StoreError: A store did not answer.
    """
    return BinaryFile(open_path(path, meter))


def open_shard_binary(shard: Shard, meter: ReadMeter) -> BinaryFile:
    """Open a shard of a manifest as a Python file object; the caller closes it.

    Raises:
        CorruptRecordError: Its size differs from the manifest's.
        OSError: It cannot be opened.
    """
    return BinaryFile(open_shard(shard, meter))
