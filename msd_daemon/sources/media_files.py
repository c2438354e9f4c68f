"""Reads images, sounds and videos that lie in files of their own, beside shards or in a store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import DataError, StoreError
from msd_daemon.shm.mark_page import InFlight
from msd_daemon.sources.record import MediaPath, ReadMeter
from msd_daemon.sources.record_fault import RecordFault
from msd_daemon.sources.record_guard import outside


class MissingMediaError(RecordFault):
    """A file that is not there."""


@dataclass(frozen=True)
class MediaFiles:
    """Opens the media of a source.

    Args:
        root: Folder or URL that relative paths start from; empty = the folder of the shard.
        bytes_max: Larger files are faults.
        meter: Counts what is read.
        in_flight: Is told that a store is waited for, which is no time of the record's.
    """

    root: str
    bytes_max: int
    meter: ReadMeter
    in_flight: InFlight = field(default_factory=InFlight)

    def read(self, media: MediaPath, shard_path: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            StoreError: A store did not answer.
            RecordFault: It cannot be read, is no file, or is too large; MissingMediaError where it
                is not there.
        """
        path = self.locate(media, shard_path)
        try:
            content: bytes = outside(self.in_flight, self._read)(path)
        except FileNotFoundError:
            raise MissingMediaError(RecordStatus.UNREADABLE, f"{path} is not there") from None
        except StoreError:
            raise  # a store that does not answer is no fault of the record
        except OSError as error:
            reason = error.strerror or str(error)
            raise RecordFault(RecordStatus.UNREADABLE, f"{path} cannot be read: {reason}") from None
        except DataError as error:
            raise RecordFault(RecordStatus.UNREADABLE, error.message) from None
        self.meter.read_bytes += len(content)
        return content

    def locate(self, media: MediaPath, shard_path: str) -> str:
        """Return the whole path of a file."""
        if "://" in media.path or os.path.isabs(media.path):
            return media.path
        root = self.root or os.path.dirname(shard_path)
        return (
            f"{root.rstrip('/')}/{media.path}" if "://" in root else os.path.join(root, media.path)
        )

    def _read(self, path: str) -> bytes:
        if "\0" in path:
            raise FileNotFoundError(path)
        if "://" in path:
            from msd_daemon.stores import read_object

            return read_object(path, self.bytes_max)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            size_bytes = os.fstat(descriptor).st_size
            if not os.path.isfile(path):
                raise OSError(0, "is no regular file")
            if size_bytes > self.bytes_max:
                raise RecordFault(
                    RecordStatus.TOO_LARGE,
                    f"{path} has {size_bytes} bytes, record_bytes_max = {self.bytes_max}",
                )
            return file.read(self.bytes_max)
