"""A shard that cannot be opened is one counted fault that says what its loss costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import SourceSpec
from msd_daemon.sources.index import IndexStore
from tests.support.sources import (
    IN_ORDER,
    compress,
    json_lines,
    make_loader,
    make_spec,
    read_chunks,
    read_stream,
    statuses_of,
    write_megatron,
)

COUNT = 90


def write_jsonl(path: Path) -> None:
    data = json_lines([f"text {n}" for n in range(COUNT)])
    path.write_bytes(compress(data, "zst") if path.suffix == ".zst" else data)


def write_parquet(path: Path) -> None:
    ids = pa.array([[n] for n in range(COUNT)], pa.list_(pa.int32()))
    table = pa.table({"text": [f"text {n}" for n in range(COUNT)], "ids": ids})
    pq.write_table(table, path, row_group_size=40)


def write_text(path: Path) -> None:
    path.write_text("\n\n".join(f"text {n}" for n in range(COUNT)))


def write_pair(path: Path) -> None:
    write_megatron(path.with_suffix(""), [[[n]] for n in range(COUNT)])


KNOWN = f"; all its {COUNT} records are lost"
UNKNOWN = "; an unknown number of records is lost"
CASES: dict[str, tuple[str, Callable[[Path], None], dict[str, Any], str, str]] = {
    # name: file, writer, fields, loss without an index, loss with one
    "jsonl": ("a.jsonl", write_jsonl, {}, UNKNOWN, UNKNOWN),
    "stream": ("a.jsonl.zst", write_jsonl, {}, UNKNOWN, KNOWN),
    "text": ("a.txt", write_text, {"text_document": "blank_line"}, UNKNOWN, UNKNOWN),
    "file": (
        "b.txt",
        write_text,
        {},
        "; all its 1 records are lost",
        "; all its 1 records are lost",
    ),
    "parquet": ("a.parquet", write_parquet, {}, UNKNOWN, KNOWN),
    "parquet ids": ("a.parquet", write_parquet, {"tokens_field": "ids"}, UNKNOWN, KNOWN),
    "megatron": ("a.bin", write_pair, {}, KNOWN, KNOWN),  # its idx is still there
}


def make_source(folder: Path, name: str) -> SourceSpec:
    file, write, fields, *_ = CASES[name]
    write(folder / file)
    return make_spec([folder / file], shuffle=IN_ORDER, max_epochs=1, **fields)


def only_fault(spec: SourceSpec, index_dir: Path | None) -> str:
    loader = make_loader(spec, index_dir=index_dir)
    drafts = read_chunks(loader)
    assert sum(len(draft.meta.status) for draft in drafts) == 1
    assert loader.statistics().faults == {"UNREADABLE": 1}
    return next(draft.meta.fault for draft in drafts if draft.meta.fault)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_index", [False, True])
def test_a_shard_that_is_gone_says_how_many_records_it_had(
    tmp_path: Path, name: str, has_index: bool
) -> None:
    spec = make_source(tmp_path, name)
    index_dir = tmp_path / "index" if has_index else None
    assert statuses_of(read_stream(make_loader(spec, index_dir=index_dir)))[0] >= 1
    Path(spec.shards[0].path).unlink()
    fault = only_fault(spec, index_dir)
    assert fault.startswith(spec.shards[0].path)
    assert "cannot be read: No such file or directory" in fault
    assert fault.endswith(CASES[name][4 if has_index else 3])


@pytest.mark.parametrize("name", ["stream", "parquet", "megatron"])
def test_a_shard_that_changed_says_so_and_keeps_its_index(tmp_path: Path, name: str) -> None:
    spec = make_source(tmp_path, name)
    index_dir = tmp_path / "index"
    read_stream(make_loader(spec, index_dir=index_dir))
    whole = Path(spec.shards[0].path).read_bytes()
    Path(spec.shards[0].path).write_bytes(whole + b"more")
    for _ in range(2):
        fault = only_fault(spec, index_dir)
        assert "the frozen manifest says" in fault
        assert fault.endswith(KNOWN)
    assert IndexStore(index_dir, spec).records_of_lost(spec.shards[0]) == COUNT


def test_an_idx_that_tells_nothing_is_an_unknown_loss(tmp_path: Path) -> None:
    spec = make_source(tmp_path, "megatron")
    Path(spec.shards[0].path).with_suffix(".idx").write_bytes(b"short")
    assert only_fault(spec, None).endswith(UNKNOWN)
    Path(spec.shards[0].path).with_suffix(".idx").unlink()
    assert only_fault(spec, None).endswith(UNKNOWN)


def test_other_shards_are_read_beside_a_lost_one(tmp_path: Path) -> None:
    for name in "abc":
        write_parquet(tmp_path / f"{name}.parquet")
    spec = make_spec(sorted(tmp_path.glob("*.parquet")), max_epochs=1)
    (tmp_path / "b.parquet").unlink()
    counts = statuses_of(read_stream(make_loader(spec)))
    assert counts == {0: 2 * COUNT, RecordStatus.UNREADABLE: 1}
