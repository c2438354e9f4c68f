"""Building the index of a shard ahead of use, and checking that a shard can be read at all."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np

from federation.model.job import SourceSpec
from msd_client.contract.errors import ResourceError
from msd_daemon.sources.formats import PLAIN_FORMATS, SeekableFormat, format_of
from msd_daemon.sources.index import IndexStore, ShardIndex
from msd_daemon.sources.lane import ShardRun, StreamReader
from msd_daemon.sources.megatron import MegatronShard, check_megatron
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_shard


def build_index(spec: SourceSpec, shard_number: int, directory: Path) -> ShardIndex | None:
    """Return the index of a shard, made where there is none that fits.

    Reads a compressed shard to its end; of parquet and Megatron shards only footer and idx. Plain
    JSONL and text need none: their blocks are byte ranges.

    Raises:
        CorruptRecordError: A parquet or Megatron shard cannot be opened.
        OSError: A shard cannot be read.
        ResourceError: The index cannot be written.
    """
    if spec.order_class == "seekable" and format_of(spec.format).order == "by_compression":
        return None
    shard = spec.shards[shard_number]
    store = IndexStore(directory, spec)
    found = store.load(shard)
    if found is not None:
        return found
    if spec.order_class == "streaming":
        _read_to_end(spec, shard_number, store)
    elif spec.format != "megatron":
        count, records = _seekable(spec).measure(shard)
        store.save(shard, records, np.zeros(count, dtype=np.int64), [])
    else:
        opened = MegatronShard(shard, ReadMeter())
        try:
            store.save(shard, opened.document_count, opened.block_starts(spec.shuffle), [])
        finally:
            opened.close()
    made = store.load(shard)
    if made is None:
        raise ResourceError(
            f"index of {shard.path} cannot be written to {directory}: free space there or name "
            "another folder",
            path=str(directory),
        )
    return made


def _seekable(spec: SourceSpec) -> SeekableFormat:
    """Return the reader of a format whose blocks are counted; no field is wanted."""
    if spec.format == "parquet":
        return ParquetFormat(spec, ReadMeter())
    return cast("SeekableFormat", format_of(spec.format).open(spec, (), ReadMeter()))


def _read_to_end(spec: SourceSpec, shard_number: int, store: IndexStore) -> None:
    shard = spec.shards[shard_number]
    open_shard(shard, ReadMeter()).close()  # a shard that is not there is no index, but an error
    reader = StreamReader(spec, store, ReadMeter(), columns=())  # places are all that is wanted
    run = ShardRun(reader, shard, 0)
    while run.peek() is not None:
        for _ in run.block():
            pass
    run.close()


def check_shard(spec: SourceSpec, shard_number: int) -> None:
    """Refuse a shard that cannot be opened, before a job starts.

    Raises:
        CorruptRecordError: What is wrong: a size other than the manifest's, a damaged footer or
            idx, a column that is not there.
        OSError: It cannot be read.
    """
    shard = spec.shards[shard_number]
    if spec.format == "megatron":
        check_megatron(spec, shard)
    elif spec.format == "parquet":
        ParquetFormat(spec, ReadMeter()).check(shard)
    elif spec.order_class == "seekable" and spec.format not in PLAIN_FORMATS:
        _seekable(spec).measure(shard)
    else:
        open_shard(shard, ReadMeter()).close()
