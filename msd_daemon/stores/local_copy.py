"""An object as a memory map: copied once into an unlinked file, for what is read here and there."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import CorruptRecordError, ResourceError
from msd_daemon.stores.options import StoreOptions, configured_options
from msd_daemon.stores.remote_file import open_remote


@dataclass
class _NoMeter:
    read_bytes: int = 0


def map_object(
    url: str, fingerprint: str, options: StoreOptions | None = None
) -> npt.NDArray[np.uint8]:
    """Return all bytes of an object, shape (size,), mapped; gone with the last view.

    Args:
        url: Where it lies.
        fingerprint: Its fingerprint, or the beginning of it.
        options: Default: those of the process. The copy lies in `cache_dir`, else in TMPDIR.

    Raises:
        CorruptRecordError: It has changed since the manifest was frozen.
        StoreMissingError: It is not there.
        StoreError: It cannot be read.
        ResourceError: There is no room for the copy.
    """
    options = options or configured_options()
    opened = open_remote(url, _NoMeter(), options)
    try:
        if not opened.fingerprint.startswith(fingerprint):
            raise CorruptRecordError(
                f"{url} has another size or ETag than the frozen manifest: restore the object or "
                "submit the job anew",
                shard=url,
                byte_offset=0,
            )
        if not opened.size_bytes:
            return np.zeros(0, dtype=np.uint8)
        opened.advise(0, opened.size_bytes)
        with tempfile.TemporaryFile(dir=options.cache_dir or None) as file:
            for offset in range(0, opened.size_bytes, options.request_bytes_max):
                file.write(opened.read_at(offset, options.request_bytes_max))
            file.flush()
            return np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ResourceError(
            f"{url} cannot be copied ({error.strerror}): free space in stores.cache_dir or TMPDIR"
        ) from error
    finally:
        opened.close()
