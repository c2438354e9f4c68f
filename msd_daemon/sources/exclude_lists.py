"""The entries of a list of keys: lines of a text, or a column of a parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from federation.model.job import Shard
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.parquet_columns import text_values
from msd_daemon.sources.parquet_file import OpenParquet, arrow_modules
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_path, open_stream

LINE_BYTES_MAX = 64 << 10
_PARQUET_MAGIC = b"PAR1"
_BATCH_ROWS = 4096


def list_keys(path: str, column: str = "") -> Iterator[bytes]:
    """Yield the keys of a list; blank lines and nulls are none.

    Args:
        path: A text with one key a line, plain or compressed, or a parquet file; a URL too.
        column: Of a parquet file; empty = its only one.

    Raises:
        ConfigError: A line is too long, or a parquet file has no such column of texts or integers.
        CorruptRecordError: The list is damaged.
        OSError: It cannot be read.
    """
    file = open_path(path, ReadMeter())
    try:
        is_parquet = file.read_at(0, 4) == _PARQUET_MAGIC
        shard = Shard(path, file.size_bytes, getattr(file, "fingerprint", ""))
        if not is_parquet:
            yield from _lines(path, open_stream(file))
    finally:
        file.close()
    if is_parquet:
        yield from _column(shard, column)


def _lines(path: str, stream: Any) -> Iterator[bytes]:
    rest = b""
    while data := stream.read():
        *lines, rest = (rest + data).split(b"\n")
        for line in [*lines, rest]:
            if len(line) > LINE_BYTES_MAX:
                raise ConfigError(
                    f"exclude: a line of {path} has over {LINE_BYTES_MAX} bytes, it is no key"
                )
        yield from (key for line in lines if (key := line.strip(b"\r\n")))
    if key := rest.strip(b"\r\n"):
        yield key


def _column(shard: Shard, column: str) -> Iterator[bytes]:
    path = shard.path
    arrow, _ = arrow_modules()
    with OpenParquet(shard, [], ReadMeter()) as opened:
        names = opened.schema.names
        if not column and len(names) == 1:
            column = names[0]
        if names.count(column) != 1:
            raise ConfigError(f"exclude: {path} has the columns {', '.join(names)}: name one")
        for group in range(opened.metadata.num_row_groups):
            batches = opened.batches(group, _BATCH_ROWS, 0, lambda batch: batch.column(0), [column])
            for batch in batches:
                try:
                    keys = text_values(arrow, batch)
                except arrow.ArrowException as error:
                    raise ConfigError(
                        f"exclude: column {column!r} of {path} holds {batch.type}, not keys"
                    ) from error
                yield from (key for key in keys if key)
