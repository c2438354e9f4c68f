"""An open parquet file: row groups as batches of columns, every failure a typed error.

The only file that imports pyarrow, and late, so that jobs without parquet never load it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Self, TypeVar

from federation.model.job import Shard
from msd_client.contract.errors import CorruptRecordError, MsdError
from msd_daemon.sources.binary_file import open_shard_binary
from msd_daemon.sources.record import ReadMeter
from msd_daemon.stores.urls import is_url

_READ_BUFFER_BYTES = 64 * 1024

Decoded = TypeVar("Decoded")


@cache
def arrow_modules() -> tuple[Any, Any]:
    """Import pyarrow once, with a memory pool that gives back what is freed.

    pyarrow's own pool keeps 3 MiB for each row group that was read. C++ readers take the pool that
    the environment names at the first import, so a process that imports pyarrow earlier must set it
    there too; `set_memory_pool` reaches Python's side alone.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_memory_pool(pa.system_memory_pool())
    pa.set_cpu_count(1)
    return pa, pq


class OpenParquet:
    """An open parquet file; every pyarrow failure leaves it as CorruptRecordError."""

    def __init__(self, shard: Shard, columns: list[str], meter: ReadMeter) -> None:
        self._shard = shard
        self._meter = meter
        self._columns = columns
        self._remote = open_shard_binary(shard, meter.uncounted())
        if not is_url(shard.path):
            self._remote.close()  # its size is as it should be; pyarrow reads files itself
        arrow, parquet = arrow_modules()
        self._arrow = arrow
        try:
            self._file = parquet.ParquetFile(
                self._remote if is_url(shard.path) else shard.path,
                memory_map=False,
                pre_buffer=False,
                buffer_size=_READ_BUFFER_BYTES,
                page_checksum_verification=True,
            )
            self.metadata = self._file.metadata
            self.schema = self._file.schema_arrow
        except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            self._remote.close()
            meter.lost.add(shard.path)
            raise self._cause(f"is no readable parquet file ({first_line(error)})") from error
        except MsdError:
            self._remote.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close(force=True)
        self._remote.close()

    def batches(
        self,
        block: int,
        rows: int,
        first: int,
        decode: Callable[[Any], Decoded],
        columns: list[str] | None = None,
    ) -> Iterator[Decoded]:
        """Yield what `decode` makes of a row group from row `first` on, some rows at a time.

        Args:
            block: Number of the row group.
            rows: Most rows of a batch.
            first: First row wanted.
            decode: Gets a pyarrow record batch with the columns.
            columns: Those of the batches; None: those that the file was opened for.

        Raises:
            CorruptRecordError: The row group is damaged, or a column cannot be decoded.
        """
        try:
            iterator = self._file.iter_batches(
                batch_size=rows,
                row_groups=[block],
                columns=self._columns if columns is None else columns,
                use_threads=False,
            )
            for batch in iterator:
                if first >= batch.num_rows:
                    first -= batch.num_rows
                    continue
                if first:
                    batch, first = batch.slice(first), 0
                self._meter.read_bytes += batch.nbytes
                yield decode(batch)
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self._cause(f"row group {block} is damaged ({first_line(error)})") from error

    def measure(self, block: int) -> tuple[int, int]:
        """Return rows and uncompressed bytes of a row group, all columns together.

        Nothing is asked of single columns: pyarrow aborts the process where a column's metadata is
        damaged (RowGroupMetaData.column lets a C++ exception through, seen with 26.0.1).
        """
        try:
            group = self.metadata.row_group(block)
            return int(group.num_rows), int(group.total_byte_size)
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.damage(block, f"is damaged ({first_line(error)})") from error

    def damage(self, block: int, what: str) -> CorruptRecordError:
        """Return the error of a damaged row group."""
        return self._fault(f"row group {block} {what}")

    def _cause(self, what: str) -> MsdError:
        """Return what a store said where that is why pyarrow failed, else the file's damage."""
        return self._remote.failure or self._fault(what)

    def _fault(self, what: str) -> CorruptRecordError:
        return CorruptRecordError(f"{self._shard.path} {what}", shard=self._shard.path)


def first_line(error: BaseException) -> str:
    """Return what an error of a library says, cut to one line."""
    return str(error).split("\n", 1)[0][:200]
