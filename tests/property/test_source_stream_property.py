"""One stream (P2): the same records in the same order, however a source is read."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.model.chunk import RecordStatus
from federation.model.job import ShuffleRule, SourceSpec
from tests.support.sources import (
    Placed,
    compress,
    json_lines,
    make_loader,
    make_spec,
    placed,
    read_stream,
    texts_of,
    write_megatron,
)

KINDS = (
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "jsonl.xz",
    "txt",
    "txt.gz",
    "blank.txt",
    "blank.txt.zst",
    "parquet",
    "bin",
    "ids.jsonl",
    "ids.jsonl.zst",
    "ids.parquet",
)
ANY_TEXT = {"jsonl", "parquet", "ids.jsonl", "ids.jsonl.zst", "ids.parquet"}
"""Kinds whose records may hold blank lines."""
PARTS_MAX = 5
HELD_OUT = RecordStatus.HELD_OUT


def make_texts(seed: int, count: int, *, has_blank_lines: bool) -> list[str]:
    rng = random.Random(seed)
    pieces = ["x", "word ", "é", "中文", "😀", "\n", "\t", "0123456789" * 8]
    if not has_blank_lines:
        pieces.remove("\n")
    return [
        f"{seed}:{number} " + "".join(rng.choices(pieces, k=rng.randrange(40))) + "."
        for number in range(count)
    ]


def write_shard(folder: Path, number: int, kind: str, texts: list[str]) -> Path:
    path = folder / f"shard-{number}.{kind.removeprefix('blank.').removeprefix('ids.')}"
    if kind == "bin":
        documents = [
            [[byte + 1 for byte in piece.encode()] for piece in text.split(" ")] for text in texts
        ]
        return write_megatron(path, documents)
    ids = [list(text.encode()) for text in texts]
    if kind == "parquet":
        pq.write_table(pa.table({"id": texts, "text": texts}), path, row_group_size=7)
        return path
    if kind == "ids.parquet":
        column = pa.array(ids, pa.list_(pa.uint16()))
        pq.write_table(pa.table({"text": texts, "ids": column}), path, row_group_size=7)
        return path
    data = json_lines(texts)
    if kind.startswith("ids"):
        data = b"".join(json.dumps({"ids": own}).encode() + b"\n" for own in ids)
    if kind.startswith("blank"):
        data = "\n\n".join(texts).encode()
    elif kind.startswith("txt"):
        data = "".join(texts).encode()
    if kind.rsplit(".", 1)[-1] in {"gz", "zst", "xz"}:
        data = compress(data, kind.rsplit(".", 1)[-1], pieces=3)
    path.write_bytes(data)
    return path


@contextmanager
def source(
    kind: str, seed: int, counts: list[int], rule: ShuffleRule, **fields: object
) -> Iterator[SourceSpec]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            write_shard(
                Path(folder),
                number,
                kind,
                make_texts(seed + number, count, has_blank_lines=kind in ANY_TEXT),
            )
            for number, count in enumerate(counts)
        ]
        document = "blank_line" if kind.startswith("blank") else "file"
        tokens_field = "ids" if kind.startswith("ids") else ""
        yield make_spec(
            paths, shuffle=rule, text_document=document, tokens_field=tokens_field, **fields
        )


RULES = st.builds(
    ShuffleRule,
    is_shuffled=st.booleans(),
    window_shards=st.integers(1, 3),
    window_records=st.integers(1, 9),
    window_bytes=st.integers(1, 2000),
    interleave=st.integers(1, 4),
    block_bytes=st.integers(30, 3000),
    block_records=st.integers(1, 9),
    stream_block_records=st.integers(1, 12),
)
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)
SEEDS = st.integers(0, 1000)
settings.register_profile(
    "sources", max_examples=12, deadline=None, suppress_health_check=list(HealthCheck)
)
few = settings.get_profile("sources")


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, counts=COUNTS, rule=RULES)
@few
def test_each_record_is_delivered_once(
    kind: str, seed: int, counts: list[int], rule: ShuffleRule
) -> None:
    with source(kind, seed, counts, rule) as spec:
        stream = read_stream(make_loader(spec), epochs=2)
        per_shard = [
            make_texts(seed + number, count, has_blank_lines=kind in ANY_TEXT)
            for number, count in enumerate(counts)
        ]
        if kind == "bin":
            got = ["".join(chr(token - 1) for token in record.tokens) for record in stream]
            want = [
                "".join(chr(byte) for byte in text.replace(" ", "").encode())
                for texts in per_shard
                for text in texts
            ]
        elif kind.startswith("txt"):
            got, want = texts_of(stream), ["".join(texts) for texts in per_shard if texts]
        else:
            got, want = texts_of(stream), [text for texts in per_shard for text in texts]
        assert sorted(got) == sorted(want * 2)
        keys = [(record.block_key, record.index) for record in stream]
        assert keys == sorted(set(keys))


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=SEEDS,
    counts=COUNTS,
    rule=RULES,
    parts=st.integers(2, PARTS_MAX),
    limit=st.integers(1, 900),
)
@few
def test_parts_and_chunk_sizes_and_indexes_change_nothing(
    kind: str, seed: int, counts: list[int], rule: ShuffleRule, parts: int, limit: int
) -> None:
    with source(kind, seed, counts, rule) as spec, tempfile.TemporaryDirectory() as folder:
        whole = read_stream(make_loader(spec), epochs=2)
        for index_dir in (None, Path(folder), Path(folder)):
            merged: list[Placed] = []
            for part in range(parts):
                loader = make_loader(spec, part, parts, index_dir)
                merged += read_stream(loader, limit, epochs=2)
            assert sorted(merged, key=lambda record: record[:2]) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, counts=COUNTS, rule=RULES, parts=st.integers(1, 3), data=st.data())
@few
def test_seek_continues_the_stream_from_any_position(
    kind: str, seed: int, counts: list[int], rule: ShuffleRule, parts: int, data: st.DataObject
) -> None:
    with source(kind, seed, counts, rule) as spec, tempfile.TemporaryDirectory() as folder:
        whole = read_stream(make_loader(spec, 0, 1, Path(folder)), epochs=2)
        if not whole:
            return
        at = data.draw(st.integers(0, len(whole) - 1))
        index_dir = data.draw(st.sampled_from((None, Path(folder))))
        rest: list[Placed] = []
        for part in range(parts):
            loader = make_loader(spec, part, parts, index_dir)
            loader.seek(whole[at].block_key, whole[at].index)
            rest += read_stream(loader, 300, epochs=2)
        assert sorted(rest, key=lambda record: record[:2]) == whole[at:]


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, counts=COUNTS, rule=RULES, data=st.data())
@few
def test_fetch_gives_the_same_records_and_moves_nothing(
    kind: str, seed: int, counts: list[int], rule: ShuffleRule, data: st.DataObject
) -> None:
    with source(kind, seed, counts, rule) as spec:
        whole = read_stream(make_loader(spec), epochs=2)
        if not whole:
            return
        loader = make_loader(spec, 0, 2)
        mine = read_stream(make_loader(spec, 0, 2), 200, epochs=2)
        got: list[Placed] = []
        while (draft := loader.next_chunk(200)) is not None and draft.meta.block_key >> 48 < 2:
            got += placed(draft)
            key = data.draw(st.sampled_from(whole)).block_key
            wanted = [record for record in whole if record.block_key == key]
            picked = data.draw(st.permutations(wanted))[: data.draw(st.integers(1, len(wanted)))]
            assert placed(loader.fetch(key, [record.index for record in picked])) == list(picked)
        assert got == mine


@pytest.mark.parametrize("kind", KINDS)
@given(seed=SEEDS, counts=COUNTS, rule=RULES)
@few
def test_blocks_and_lanes_end_as_the_planner_expects(
    kind: str, seed: int, counts: list[int], rule: ShuffleRule
) -> None:
    with source(kind, seed, counts, rule) as spec:
        loader = make_loader(spec)
        is_streaming = spec.order_class == "streaming"
        lanes = min(rule.interleave, len(counts)) if rule.is_shuffled else 1
        next_index: dict[int, int] = {}
        ended: set[int] = set()
        live = set(range(lanes))
        while (draft := loader.next_chunk(100)) is not None and draft.meta.block_key >> 48 == 0:
            meta = draft.meta
            key = meta.block_key
            assert key not in ended
            assert meta.first_index == next_index.get(key, 0)
            next_index[key] = meta.first_index + len(meta.lengths)
            if meta.is_block_end:
                ended.add(key)
            if is_streaming:
                assert meta.window_blocks == 0
                assert (key & ((1 << 25) - 1)) % lanes in live
                if meta.is_lane_end:
                    live.discard((key & ((1 << 25) - 1)) % lanes)
        assert ended == set(next_index)
        if is_streaming:
            assert not live
        else:
            windows = {key >> 25 for key in ended}
            assert len(windows) == -(-len(counts) // rule.window_shards)


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=SEEDS,
    counts=COUNTS,
    rule=RULES,
    share=st.sampled_from([0.0, 0.1, 0.5]),
    parts=st.integers(1, 3),
    limit=st.integers(1, 900),
)
@few
def test_train_and_held_out_are_a_partition_in_one_order(
    kind: str,
    seed: int,
    counts: list[int],
    rule: ShuffleRule,
    share: float,
    parts: int,
    limit: int,
) -> None:
    with source(kind, seed, counts, rule, hold_out=share) as spec:
        every = read_stream(make_loader(dataclasses.replace(spec, part="all")), epochs=2)
        split: dict[str, list[Placed]] = {}
        for name in ("train", "held_out"):
            own = dataclasses.replace(spec, part=name)
            merged: list[Placed] = []
            for part in range(parts):
                merged += read_stream(make_loader(own, part, parts), limit, epochs=2)
            split[name] = sorted(merged, key=lambda record: record[:2])
        for record, train, held in zip(every, split["train"], split["held_out"], strict=True):
            owners = [one for one in (train, held) if one.status != HELD_OUT]
            assert owners == ([record] if record.status == 0 else [record] * len(owners))
            assert train[:2] == held[:2] == record[:2]
            assert owners
        if share == 0:
            assert split["train"] == every
