"""Writes the lineage of many steps as parquet: a row for each segment, some 64 Ki rows a row group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from federation.journal_reader import JournalReader
from msd_client.contract.errors import ResourceError
from msd_daemon.history.lineage_rows import LineageReader, LineageRow
from msd_daemon.history.runs import RunFolder
from msd_daemon.history.step_spans import step_spans

GROUP_ROWS = 1 << 16


class Exported(NamedTuple):
    """What an export wrote."""

    steps: int
    rows: int


def lineage_schema() -> Any:
    """Return the schema of the file: the fields of LineageRow, in their order."""
    import pyarrow as pa

    name = pa.dictionary(pa.int32(), pa.string())
    media = pa.struct(
        [
            pa.field("modality", pa.string(), nullable=False),
            pa.field("offset", pa.int32(), nullable=False),
            pa.field("tokens", pa.int32(), nullable=False),
            pa.field("grid", pa.list_(pa.int32(), 3), nullable=False),
            pa.field("encode_dp_group", pa.int32()),
        ]
    )
    columns = {
        "step": pa.int64(), "plan_step": pa.int64(), "generation": pa.int32(), "source": name, "shard": name,
        "shard_block": pa.int64(), "place_name": name, "place": pa.int64(), "key": pa.string(),
        "epoch": pa.int32(), "offset": pa.int32(), "length": pa.int32(), "dp_group": pa.int32(),
        "microbatch": pa.int32(), "row": pa.int32(), "column": pa.int32(),
        "canonical_row": pa.int32(), "ranks": pa.list_(pa.int32()), "begins_group": pa.bool_(),
        "media": pa.list_(media),
    }  # fmt: skip
    return pa.schema(
        [pa.field(name, kind, nullable=name == "shard_block") for name, kind in columns.items()]
    )


def export_steps(
    run: RunFolder,
    reader: JournalReader,
    steps: tuple[int, int],
    path: Path,
    *,
    generation: int | None = None,
    rank: int | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write the lineage of steps into a parquet file, which is there only once it is whole.

    Args:
        run: Whose steps.
        reader: Its journal.
        steps: (first, end), end not among them.
        path: Of the file; one that is there is replaced.
        generation: Of the journal; None: the newest that holds each step.
        rank: What this rank was given alone.
        tell: Told of each step that is done.

    Raises:
        NotFoundError: A step is not kept, or not planned yet.
        ResourceError: The file can't be written.
        DataError: See LineageReader.
    """
    import pyarrow.parquet as pq

    spans = step_spans(reader, *steps, generation)
    temporary = path.with_name(path.name + ".tmp")
    count = 0
    try:
        with pq.ParquetWriter(temporary, lineage_schema(), compression="zstd") as writer:
            waiting: list[LineageRow] = []
            for span in spans:
                with LineageReader(run, reader, span.kept, span.first) as opened:
                    for step in opened.steps(span.end, rank):
                        waiting += step.rows
                        count += len(step.rows)
                        if len(waiting) >= GROUP_ROWS:
                            writer.write_table(_table(waiting))
                            waiting = []
                        tell(1)
            writer.write_table(_table(waiting))
        temporary.replace(path)
    except OSError as error:
        raise ResourceError(
            f"{path} can't be written: {error.strerror or error}", path=str(path)
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(steps[1] - steps[0], count)


def _table(rows: list[LineageRow]) -> Any:
    import pyarrow as pa

    schema = lineage_schema()
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    columns["media"] = [[item._asdict() for item in media] for media in columns["media"]]
    arrays = [
        pa.array(values, field.type)
        if not pa.types.is_dictionary(field.type)
        else pa.array(values, pa.string()).dictionary_encode().cast(field.type)
        for field, values in zip(schema, columns.values(), strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
