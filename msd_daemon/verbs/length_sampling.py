"""Length statistics for `simulate` and `graph`: from a table of lengths, or from some records.

A sample reads records as training would, through the source's recipe, of a few windows spread evenly
over the source; how many records there are is then told by blocks (seekable sources: records of the
blocks that were read to their end) or by bytes (streams, and where no block ended).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from federation.model.chunk import ChunkMeta, Marks
from federation.model.job import ResolvedJob, SourceSpec
from federation.simulation.length_statistics import SourceLengths
from msd_client.contract.errors import ConfigError, DataError
from msd_client.contract.position import pack_block_key, unpack_block_key
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.transforms import open_tokenizer
from msd_daemon.transforms.tokenizer import Tokenizer

WINDOWS_SAMPLED_MAX = 4
SOURCE_S_MAX = 20.0
"""No further record is read of a source that has taken so long."""
_CHUNK_BYTES = 1 << 16
COLUMNS_SHOWN_MAX = 8
_FORMS = (
    "give parquet with the columns source and tokens, or JSON of "
    '{"name": {"lengths": [...], "records": N}}'
)


class _Sample(NamedTuple):
    metas: list[ChunkMeta]
    ended_blocks: int
    ended_records: int
    window_blocks: list[int]


def sampled_lengths(
    job: ResolvedJob, records: int, now_s: Callable[[], float] = time.monotonic
) -> list[SourceLengths]:
    """Return statistics of every source from about so many of its records.

    Raises:
        ConfigError: A recipe's list, template or code is not what the job was resolved with.
        DataError: None of the records of a source is a sample.
        StoreError: A store does not answer.
    """
    tokenizer = open_tokenizer(job.tokenizer)
    return [
        _sampled_source(job, number, tokenizer, records, now_s)
        for number in range(len(job.sources))
    ]


def _sampled_source(
    job: ResolvedJob,
    number: int,
    tokenizer: Tokenizer,
    records: int,
    now_s: Callable[[], float],
) -> SourceLengths:
    spec = job.sources[number]
    windows = 1
    if spec.order_class == "seekable":
        windows = -(-len(spec.shards) // spec.shuffle.window_shards)
    visited = sorted(
        {windows * place // WINDOWS_SAMPLED_MAX for place in range(WINDOWS_SAMPLED_MAX)}
    )
    loader = open_source_loader(job, number, tokenizer)
    end_s = now_s() + SOURCE_S_MAX
    sample = _Sample([], 0, 0, [])
    try:
        for window in visited:
            if now_s() < end_s:
                loader.seek(pack_block_key(0, window, 0), 0)
                wanted = -(-records // len(visited))
                sample = _read_window(loader, window, sample, wanted, lambda: now_s() < end_s)
        read_bytes = loader.statistics().read_bytes
    finally:
        loader.close()
    return _statistics(spec, sample, windows, read_bytes)


def _read_window(
    loader: SourceLoader,
    window: int,
    sample: _Sample,
    wanted: int,
    may_go_on: Callable[[], bool],
) -> _Sample:
    metas, ended_blocks, ended_records, window_blocks = sample
    begun = count = 0
    # One block is read to its end, to know how many records a block has.
    while (count < wanted or (count > begun and not ended_blocks)) and may_go_on():
        draft = loader.next_chunk(_CHUNK_BYTES)
        if draft is None or unpack_block_key(draft.meta.block_key)[:2] != (0, window):
            break
        meta = draft.meta
        if not count and meta.window_blocks:
            window_blocks = [*window_blocks, meta.window_blocks]
        metas = [*metas, meta]
        count += len(meta.lengths)
        if meta.is_block_end:
            ended_blocks, ended_records = ended_blocks + 1, ended_records + count - begun
            begun = count
    return _Sample(metas, ended_blocks, ended_records, window_blocks)


def _statistics(spec: SourceSpec, sample: _Sample, windows: int, read_bytes: int) -> SourceLengths:
    metas = sample.metas
    lengths = np.concatenate([np.zeros(0, np.int64), *(meta.lengths for meta in metas)])
    status = np.concatenate([np.zeros(0, np.uint8), *(meta.status for meta in metas)])
    if not (lengths > 0).any():
        fault = next((meta.fault for meta in metas if meta.fault), "no record was read")
        raise DataError(
            f"source {spec.name}: none of {len(lengths)} sampled records is a sample: {fault}; mend "
            "the source, or give --lengths",
            source=spec.name,
        )
    size_bytes = sum(shard.size_bytes for shard in spec.shards)
    records = len(lengths) * size_bytes / max(read_bytes, 1)
    if sample.ended_blocks and sample.window_blocks:
        mean_blocks = sum(sample.window_blocks) / len(sample.window_blocks)
        records = windows * mean_blocks * sample.ended_records / sample.ended_blocks
    marks = None
    if any(meta.marks is not None for meta in metas):
        marks = Marks(
            np.concatenate([_counts(meta) for meta in metas]),
            np.concatenate([meta.marks.table for meta in metas if meta.marks is not None]),
        )
    return SourceLengths(lengths, status, max(len(lengths), round(records)), marks)


def _counts(meta: ChunkMeta) -> Any:
    return np.zeros(len(meta.lengths), np.int32) if meta.marks is None else meta.marks.counts


def given_lengths(path: Path, sources: Sequence[str]) -> list[SourceLengths]:
    """Return statistics from a file: parquet with columns `source` and `tokens`, or JSON.

    JSON is a map by source of `{"lengths": [...], "records": N}`; without `records` the lengths are
    those of all records, as they are in parquet.

    Args:
        path: `.parquet`, else JSON.
        sources: Names of the job's sources; the file may hold others too.

    Raises:
        ConfigError: The file is not such a one, or lacks a source; one line names the file, the
            source, what it has and what is expected.
    """
    try:
        found = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
    except ConfigError as error:
        raise _refused(path, error.message) from error
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error).partition("\n")[0]
        raise _refused(path, f"can't be read: {problem}; {_FORMS}") from error
    missing = [name for name in sources if name not in found]
    if missing:
        has = ", ".join(sorted(found)) or "none"
        raise _refused(path, f"there are no lengths of {', '.join(missing)}; it has {has}")
    checked = []
    for name in sources:
        lengths, records = found[name]
        try:
            checked.append(SourceLengths.of(lengths, records))
        except ConfigError as error:
            raise _refused(path, f"source {name}: {error.message}", name) from error
    return checked


def _refused(path: Path, problem: str, source: str | None = None) -> ConfigError:
    named = {} if source is None else {"source": source}
    return ConfigError(f"{path}: {problem}", path=str(path), **named)


def _read_parquet(path: Path) -> dict[str, tuple[Any, Any]]:
    """Return lengths by source, not looked at yet, and no number of records."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as opened:
        columns = opened.schema_arrow.names
        lacking = [name for name in ("source", "tokens") if columns.count(name) != 1]
        if lacking:
            has = ", ".join(columns[:COLUMNS_SHOWN_MAX]) or "none"
            has += " ..." if len(columns) > COLUMNS_SHOWN_MAX else ""
            raise ConfigError(f"there is no column {' and '.join(lacking)}; it has {has}; {_FORMS}")
        table = opened.read(columns=["source", "tokens"])
    names = table.column("source").to_pylist()
    column = table.column("tokens")
    for row, name in enumerate(names):
        if not isinstance(name, str):
            raise ConfigError(f"row {row}: source is {_shown(name)}: write the name of a source")
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise ConfigError(
            f"source {names[row]}: row {row}: tokens is null: write an integer of at least 1"
        )
    tokens, by_row = column.to_numpy(), np.array(names, dtype=object)
    return {name: (tokens[by_row == name], None) for name in sorted(set(names))}


def _read_json(path: Path) -> dict[str, tuple[Any, Any]]:
    """Return lengths and records by source, not looked at yet."""
    with path.open("rb") as opened:
        plain = json.load(opened)
    if not isinstance(plain, dict):
        raise ConfigError(f"it holds {_shown(plain)}, no map by source; {_FORMS}")
    for name, entry in plain.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"source {name}: its entry is {_shown(entry)}, no map; {_FORMS}")
        if "lengths" not in entry:
            keys = ", ".join(list(entry)[:COLUMNS_SHOWN_MAX]) or "none"
            raise ConfigError(f"source {name}: there is no key lengths, its keys: {keys}; {_FORMS}")
    return {name: (entry["lengths"], entry.get("records")) for name, entry in plain.items()}


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
