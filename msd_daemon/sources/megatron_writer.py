"""Writes a Megatron pair of `.bin` and `.idx`, document by document, in bounded memory.

The layout is that of megatron.py; each document is one sequence.
Both are written under temporary names and renamed when they are whole, the `.idx` last: whoever
finds an `.idx` finds the `.bin` that it speaks of.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from msd_daemon.sources.chunk_draft import TokenDtype
from msd_daemon.sources.index import sync_folder

_HEAD = struct.Struct("<9sQBQQ")
_DTYPE_CODES = {2: 8, 4: 4}
_ENTRIES_AT_ONCE = 1 << 16


class MegatronWriter:
    """One pair that is being written; as a context, what is not finished is removed.

    Args:
        stem: Path of the pair without `.bin` and `.idx`; its folder is there.
        dtype: uint16 or int32.

    Raises:
        OSError: A file cannot be written.
    """

    def __init__(self, stem: Path, dtype: TokenDtype) -> None:
        self.dtype = dtype.newbyteorder("<")
        self.documents = 0
        self.tokens = 0
        self._bin_path = stem.with_name(stem.name + ".bin")
        self._idx_path = stem.with_name(stem.name + ".idx")
        self._temporary = {
            path: path.with_name(f".{path.name}.{os.getpid()}.tmp")
            for path in (self._bin_path, self._idx_path)
        }
        self._sizes_path = stem.with_name(f".{stem.name}.sizes.{os.getpid()}.tmp")
        self._bin: BinaryIO = self._temporary[self._bin_path].open("wb")
        # The idx begins with the sizes of all documents; they wait in a file, not in memory.
        self._sizes: BinaryIO = self._sizes_path.open("w+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bin.close()
        self._sizes.close()
        for path in (*self._temporary.values(), self._sizes_path):
            path.unlink(missing_ok=True)

    def append(
        self, payload: Sequence[npt.NDArray[Any]], lengths: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Add documents; those of no tokens are left out.

        Args:
            payload: Their tokens one behind the other, in any number of arrays.
            lengths: Tokens of each document.
        """
        whole = np.asarray(lengths[lengths > 0], dtype="<i4")
        for part in payload:
            self._bin.write(np.ascontiguousarray(part, dtype=self.dtype).data)
        self._sizes.write(whole.data)
        self.documents += len(whole)
        self.tokens += int(whole.sum(dtype=np.int64))

    def finish(self) -> None:
        """Make both files durable and give them their names."""
        idx = self._temporary[self._idx_path]
        with idx.open("wb") as file:
            self._write_index(file)
            _sync(file)
        _sync(self._bin)
        self._bin.close()
        # An idx of an earlier run speaks of another bin: it goes before that bin does.
        self._idx_path.unlink(missing_ok=True)
        for path, temporary in self._temporary.items():
            temporary.replace(path)
        sync_folder(self._bin_path.parent)

    def _write_index(self, file: BinaryIO) -> None:
        code = _DTYPE_CODES[self.dtype.itemsize]
        file.write(_HEAD.pack(b"MMIDIDX\0\0", 1, code, self.documents, self.documents + 1))
        self._copy_sizes(file)
        self._sizes.seek(0)
        begin = 0
        while raw := self._sizes.read(4 * _ENTRIES_AT_ONCE):
            ends = begin + np.cumsum(np.frombuffer(raw, "<i4"), dtype=np.int64)
            begins = np.concatenate([[begin], ends[:-1]]).astype("<i8")
            file.write((begins * self.dtype.itemsize).data)
            begin = int(ends[-1])
        for first in range(0, self.documents + 1, _ENTRIES_AT_ONCE):
            last = min(first + _ENTRIES_AT_ONCE, self.documents + 1)
            file.write(np.arange(first, last, dtype="<i8").data)

    def _copy_sizes(self, file: BinaryIO) -> None:
        self._sizes.seek(0)
        while raw := self._sizes.read(4 * _ENTRIES_AT_ONCE):
            file.write(raw)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
