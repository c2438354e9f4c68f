"""Reading shards through a format's own reader, without loaders."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from federation.model.job import Shard, ShuffleRule, SourceSpec
from federation.model.recipe import SampleRecipe
from msd_daemon.sources.formats import Columns, SeekableFormat, folder_shards, format_of
from msd_daemon.sources.record import RawRecord, ReadMeter
from tests.support.sources import IN_ORDER


def shard_of(path: Path) -> Shard:
    return Shard(str(path), path.stat().st_size if path.exists() else 0, "0" * 32)


def spec_of(name: str, shards: Iterable[Path] = (), where: str = "", **fields: Any) -> SourceSpec:
    spec = SourceSpec(
        "source",
        name,
        "none",
        "seekable",
        tuple(shard_of(path) for path in shards),
        "",
        shuffle=IN_ORDER,
        recipe=SampleRecipe(where=where) if where else None,
    )
    return dataclasses.replace(spec, **fields)


def open_rows(
    name: str,
    shards: Iterable[Path] = (),
    columns: Columns = None,
    meter: ReadMeter | None = None,
    **fields: Any,
) -> SeekableFormat:
    spec = spec_of(name, shards, **fields)
    opened: Any = format_of(name).open(spec, columns, meter or ReadMeter())
    return opened


def read_blocks(
    name: str, path: Path, columns: Columns = None, **fields: Any
) -> list[list[RawRecord]]:
    opened = open_rows(name, [path], columns, **fields)
    shard = shard_of(path)
    return [list(opened.records(shard, block)) for block in range(opened.measure(shard)[0])]


def read_rows(name: str, path: Path, columns: Columns = None, **fields: Any) -> list[RawRecord]:
    return [record for block in read_blocks(name, path, columns, **fields) for record in block]


def read_folder(name: str, folder: Path, columns: Columns = None, **fields: Any) -> list[RawRecord]:
    shards = folder_shards(format_of(name), folder)
    assert shards is not None
    return [record for path in shards for record in read_rows(name, path, columns, **fields)]


def fields_of(records: Iterable[RawRecord]) -> list[dict[str, Any]]:
    return [dict(record.fields) for record in records if record.fields is not None]


def count_statuses(records: Iterable[RawRecord]) -> dict[int, int]:
    return dict(Counter(record.status for record in records))


def small_blocks(records: int, size_bytes: int = 1 << 20) -> ShuffleRule:
    return dataclasses.replace(IN_ORDER, block_records=records, block_bytes=size_bytes)
