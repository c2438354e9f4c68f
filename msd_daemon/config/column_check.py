"""Checks that a parquet source has the columns that a job reads, before anything starts.

One footer, that of the first shard, not one per shard (E19): a later shard that lacks a column is
counted row by row, and the error budget stops the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

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
    arrow, parquet = arrow_modules()
    try:
        with open_shard_binary(shard, ReadMeter()) as opened:
            schema = parquet.read_schema(opened)
    except CorruptRecordError:
        return
    except (arrow.ArrowException, OSError, ValueError, OverflowError):
        return
    file = owner + os.path.basename(shard.path)
    for path, column in wanted:
        remedy = f"write the one that holds {column.kind.value}"
        if column.name not in schema.names:
            names = ", ".join(schema.names[:COLUMNS_SHOWN_MAX])
            shown = names + (" ..." if len(schema.names) > COLUMNS_SHOWN_MAX else "")
            problem = f"{file} has no such column (it has {shown})"
            faults.append(Fault(path, column.name, problem, remedy))
        elif column.kind is ColumnKind.TEXT:
            continue  # its rows are counted one by one, as those of a later shard are
        elif problem := column_fault(arrow, schema, (column,)):
            faults.append(Fault(path, column.name, f"{file}: {problem}", remedy))
