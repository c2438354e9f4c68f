"""A shard that cannot be opened is waited for, and then counts with all its records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import ErrorPolicy, SourceSpec
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.sources.record_guard import Loss, LostPlace, SourceGuard
from tests.support.sources import (
    IN_ORDER,
    byte_tokenizer,
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
OVER = 11
"""Faults that spend the default budget, 0.001 of 10,000 records."""
COUNTED = f"{UNKNOWN}: it counts as {OVER}, more than on_error.budget_ratio allows"
CASES: dict[str, tuple[str, Callable[[Path], None], dict[str, Any], str, str]] = {
    # name: file, writer, fields, loss without an index, loss with one
    "jsonl": ("a.jsonl", write_jsonl, {}, COUNTED, COUNTED),
    "stream": ("a.jsonl.zst", write_jsonl, {}, COUNTED, KNOWN),
    "text": ("a.txt", write_text, {"text_document": "blank_line"}, COUNTED, COUNTED),
    "file": (
        "b.txt",
        write_text,
        {},
        "; all its 1 records are lost",
        "; all its 1 records are lost",
    ),
    "parquet": ("a.parquet", write_parquet, {}, COUNTED, KNOWN),
    "parquet ids": ("a.parquet", write_parquet, {"tokens_field": "ids"}, COUNTED, KNOWN),
    "megatron": ("a.bin", write_pair, {}, KNOWN, KNOWN),  # its idx is still there
}


def make_source(folder: Path, name: str) -> SourceSpec:
    file, write, fields, *_ = CASES[name]
    write(folder / file)
    return make_spec([folder / file], shuffle=IN_ORDER, max_epochs=1, **fields)


def only_fault(spec: SourceSpec, index_dir: Path | None, count: int = 1) -> str:
    loader = make_loader(spec, index_dir=index_dir)
    drafts = read_chunks(loader)
    assert sum(len(draft.meta.status) for draft in drafts) == count
    assert loader.statistics().faults == {"UNREADABLE": count}
    (fault,) = {draft.meta.fault for draft in drafts if draft.meta.fault}
    return re.sub(r": record at .*?: ", " ", fault)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_index", [False, True])
def test_a_shard_that_is_gone_says_how_many_records_it_had(
    tmp_path: Path, name: str, has_index: bool
) -> None:
    spec = make_source(tmp_path, name)
    index_dir = tmp_path / "index" if has_index else None
    assert statuses_of(read_stream(make_loader(spec, index_dir=index_dir)))[0] >= 1
    Path(spec.shards[0].path).unlink()
    told = CASES[name][4 if has_index else 3]
    fault = only_fault(spec, index_dir, {COUNTED: OVER, KNOWN: COUNT}.get(told, 1))
    assert fault.startswith(f"{spec.shards[0].path} cannot be read: No such file or directory;")
    assert fault.endswith(told)


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
    Path(spec.shards[0].path).unlink()
    assert only_fault(spec, None, OVER).endswith(COUNTED)


def test_other_shards_are_read_beside_a_lost_one(tmp_path: Path) -> None:
    for name in "abc":
        write_parquet(tmp_path / f"{name}.parquet")
    spec = make_spec(sorted(tmp_path.glob("*.parquet")), max_epochs=1)
    (tmp_path / "b.parquet").unlink()
    counts = statuses_of(read_stream(make_loader(spec)))
    assert counts == {0: 2 * COUNT, RecordStatus.UNREADABLE: OVER}


@pytest.mark.parametrize("name", ["jsonl", "stream", "text", "parquet", "parquet ids", "megatron"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_shard_that_comes_back_in_time_is_read_as_if_it_had_been_there(
    tmp_path: Path, name: str, begun: bool
) -> None:
    spec = small_blocks(make_source(tmp_path, name))
    whole = read_stream(make_loader(spec))
    assert statuses_of(whole) == {0: COUNT}
    path, away = Path(spec.shards[0].path), tmp_path / "away"
    tries = []

    def hear() -> None:
        """Stand in for the link of a worker, which listens between its tries."""
        tries.append(path.exists())
        if len(tries) == 2:
            away.rename(path)

    guard = SourceGuard(0, shards={spec.shards[0].path: 0}, hear=hear)
    tokenizer = byte_tokenizer()
    loader = SourceLoader(spec, 3, tokenizer, 17, 0, 1, None, guard=guard, open_wait_s=60)
    drafts = []
    if begun and name != "stream":  # whose file stays open
        drafts.append(loader.next_chunk(64))
    path.rename(away)
    while (draft := loader.next_chunk(1 << 20)) is not None:
        drafts.append(draft)
    assert tries == [False, False]
    lengths = [length for draft in drafts for length in draft.meta.lengths.tolist()]
    assert lengths == [len(one.tokens) for one in whole]
    assert loader.statistics().faults == {}
    assert loader.lost_shards <= {spec.shards[0].path}


def small_blocks(spec: SourceSpec) -> SourceSpec:
    rule = replace(spec.shuffle, block_bytes=256, block_records=16)
    return replace(spec, shuffle=rule)


@pytest.mark.parametrize("name", ["jsonl", "text", "parquet", "parquet ids", "megatron"])
def test_each_block_of_a_shard_that_went_away_in_its_midst_is_told(
    tmp_path: Path, name: str
) -> None:
    spec = replace(small_blocks(make_source(tmp_path, name)), on_error=ErrorPolicy("quarantine"))
    index_dir = tmp_path / "index"
    loader = make_loader(spec, index_dir=index_dir)
    first = loader.next_chunk(1 << 20)
    assert first is not None
    assert first.meta.is_block_end
    assert not first.meta.status.any()
    Path(spec.shards[0].path).unlink()
    rest = read_chunks(loader)
    blocks = {draft.meta.block_key for draft in rest if len(draft.meta.status)}
    assert len(blocks) == first.meta.window_blocks - 1 > 1
    assert all((draft.meta.status == RecordStatus.UNREADABLE).all() for draft in rest)
    lost = sum(len(draft.meta.status) for draft in rest)
    if name in ("parquet", "parquet ids", "megatron"):  # whose records are counted
        assert lost == COUNT - COUNT // first.meta.window_blocks
    else:
        assert lost == len(blocks)


@pytest.mark.parametrize("name", ["jsonl", "stream", "text", "parquet", "parquet ids", "megatron"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_loss_that_was_noted_is_the_same_once_the_shard_is_back(
    tmp_path: Path, name: str, begun: bool
) -> None:
    spec = small_blocks(make_source(tmp_path, name))
    rule = replace(spec.shuffle, stream_block_records=16)
    spec = replace(spec, on_error=ErrorPolicy("quarantine"), shuffle=rule, max_epochs=2)
    index_dir = tmp_path / "index"
    read_stream(make_loader(replace(spec, max_epochs=1), index_dir=index_dir))  # it is known
    path = spec.shards[0].path
    guard = SourceGuard(0, shards={path: 0})
    noted = []

    def report(place: LostPlace, loss: Loss) -> None:
        noted.append(place)
        guard.losses[place] = loss

    guard.report = report
    loader = SourceLoader(spec, 3, byte_tokenizer(), 17, 0, 1, index_dir, guard=guard)
    first = []
    if begun:
        chunk = loader.next_chunk(1 << 20)
        assert chunk is not None
        first.append(chunk)
        if name == "stream":  # its file stays open: as another worker goes on
            loader.seek(chunk.meta.block_key + 1, 0)
    Path(path).rename(tmp_path / "away")
    first += read_chunks(loader)
    assert noted
    (tmp_path / "away").rename(path)
    again = SourceLoader(
        spec, 3, byte_tokenizer(), 17, 0, 1, index_dir,
        guard=SourceGuard(0, shards={path: 0}, losses=guard.losses),
    )  # fmt: skip
    second = read_chunks(again)

    def told(drafts: list[ChunkDraft]) -> list[tuple[int, int, int, int]]:
        return [
            (draft.meta.block_key, draft.meta.first_index + at, status, length)
            for draft in drafts
            for at, (status, length) in enumerate(
                zip(draft.meta.status.tolist(), draft.meta.lengths.tolist(), strict=True)
            )
        ]

    assert told(first) == told(second)
    statuses = {status for _, _, status, _ in told(second)}
    assert statuses == ({0, RecordStatus.UNREADABLE} if begun else {RecordStatus.UNREADABLE})
    assert again.lost_shards == frozenset()


def test_a_loss_that_the_policy_does_not_pass_is_not_noted(tmp_path: Path) -> None:
    for policy, is_noted in (
        (ErrorPolicy("fail"), False),
        (ErrorPolicy("skip"), False),
        (ErrorPolicy("skip", budget_ratio=0.01), True),
        (ErrorPolicy("skip", budget_ratio=1.0), True),
    ):
        spec = replace(make_source(tmp_path, "megatron"), on_error=policy)
        Path(spec.shards[0].path).unlink()
        noted: list[LostPlace] = []
        guard = SourceGuard(
            0, shards={spec.shards[0].path: 0}, report=lambda place, _, to=noted: to.append(place)
        )
        loader = SourceLoader(spec, 3, byte_tokenizer(), 17, 0, 1, None, guard=guard)
        assert sum(len(draft.meta.status) for draft in read_chunks(loader)) == COUNT
        assert bool(noted) == is_noted, policy
