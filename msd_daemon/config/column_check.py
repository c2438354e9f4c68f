"""Checks that a parquet source has the columns that a job reads, before anything starts.

One footer, that of the first shard, not one per shard (E19): a later shard that lacks a column is
counted row by row, and the error budget stops the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from federation.model.job import Shard
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.config.faults import Fault
from msd_daemon.sources.binary_file import open_shard_binary
from msd_daemon.sources.parquet_columns import (
    COLUMNS_SHOWN_MAX,
    ColumnKind,
    WantedColumn,
    column_fault,
)
from msd_daemon.sources.parquet_file import arrow_modules
from msd_daemon.sources.record import ReadMeter


def check_columns(
    wanted: Iterable[tuple[str, WantedColumn]], shard: Shard, faults: list[Fault], owner: str = ""
) -> None:
    """Check the columns of a shard; a damaged footer is left to the source's error policy.

    Args:
        wanted: Columns, each with the key of the job that asks for it.
        shard: The first of the source.
        faults: Receives what is wrong.
        owner: Begins each message, where the key does not name the source.
    """
    arrow, _ = arrow_modules()
    schema = _schema_of(shard)
    if schema is None:
        return
    file = owner + os.path.basename(shard.path)
    for path, column in wanted:
        remedy = f"write the one that holds {column.kind.value}"
        if column.name not in schema.names:
            faults.append(Fault(path, column.name, _absent(file, schema), remedy))
        elif column.kind is ColumnKind.TEXT:
            continue  # its rows are counted one by one, as those of a later shard are
        elif problem := column_fault(arrow, schema, (column,)):
            faults.append(Fault(path, column.name, f"{file}: {problem}", remedy))


def check_names(path: str, names: Iterable[str], shard: Shard, faults: list[Fault]) -> None:
    """Check that fields are there, whatever they hold; `a.b` may be key `b` of column `a`.

    Args:
        path: Key of the source.
        names: Fields that its recipe asks for.
        shard: The first of the source.
        faults: Receives what is wrong.
    """
    schema = _schema_of(shard)
    if schema is None:
        return
    for name in names:
        prefixes = {name, *(name[:at] for at, letter in enumerate(name) if letter == ".")}
        if prefixes.isdisjoint(schema.names):
            problem = _absent(os.path.basename(shard.path), schema)
            faults.append(Fault(path, name, problem, "write one of them"))


def _schema_of(shard: Shard) -> Any:
    """Return the schema of a shard, None where its footer cannot be read."""
    arrow, parquet = arrow_modules()
    try:
        with open_shard_binary(shard, ReadMeter()) as opened:
            return parquet.read_schema(opened)
    except (CorruptRecordError, arrow.ArrowException, OSError, ValueError, OverflowError):
        return None


def _absent(file: str, schema: Any) -> str:
    names = ", ".join(schema.names[:COLUMNS_SHOWN_MAX])
    shown = names + (" ..." if len(schema.names) > COLUMNS_SHOWN_MAX else "")
    return f"{file} has no such column (it has {shown})"
