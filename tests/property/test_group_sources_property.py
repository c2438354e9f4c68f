"""Sources of groups: blocks, windows and any number of loaders give the same whole groups."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.chunk import RecordStatus
from federation.model.job import GroupRule, ShuffleRule, SourceSpec, TokenizerSpec
from federation.planning.run_marks import continued_records
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.sources.order import group_windows, permutation, record_windows, spread_groups
from msd_daemon.sources.record import RawRecord
from msd_daemon.transforms import open_tokenizer
from tests.support.records import shard_of

seeds = st.integers(0, 2**32 - 1)
TOKENIZER = open_tokenizer(TokenizerSpec("bytes"))
BAD, UNKEYED = "bad", "unkeyed"
Line = tuple[str, str]
"""(key, or BAD, or UNKEYED; text)."""


def random_shard(rng: random.Random, name: str, faults: tuple[str, ...]) -> list[Line]:
    """Return lines in groups; one key may come again later, and some groups are large."""
    lines: list[Line] = []
    for _ in range(rng.randint(0, 40)):
        key = rng.choice("abcdef") + rng.choice("xyz")
        if lines and lines[-1][0] == key:
            continue
        for member in range(rng.choice([1, 1, 2, 2, 3, 30])):
            lines.append((key, f"{name} {len(lines)} {member} " + "w" * rng.randint(0, 40)))
            if faults and rng.random() < 0.1:
                lines += [(rng.choice(faults), "-")] * rng.choice([1, 1, 9])
    return lines or [("a", f"{name} 0")]


def groups_of(lines: list[Line]) -> list[list[str]]:
    """Return the texts of each group: neighbours of one key, whatever has none between them."""
    groups: list[list[str]] = []
    last = None
    for key, text in lines:
        if key in (BAD, UNKEYED):
            continue
        if key != last:
            groups.append([])
        groups[-1].append(text)
        last = key
    return groups


def write_jsonl(path: Path, lines: list[Line], rng: random.Random) -> None:
    told = {BAD: lambda _: '{"text": ', UNKEYED: lambda text: json.dumps({"text": text})}
    path.write_text(
        "".join(
            told.get(key, lambda text, key=key: json.dumps({"text": text, "k": key}))(text) + "\n"
            for key, text in lines
        )
    )


def write_parquet(path: Path, lines: list[Line], rng: random.Random) -> None:
    keys = [None if key == UNKEYED else key for key, _ in lines]
    table = pa.table({"text": [text for _, text in lines], "k": pa.array(keys, pa.string())})
    pq.write_table(table, path, row_group_size=rng.choice([1, 2, 5, 1000]))


class Reader:
    """Loaders of one source; reads an epoch and puts it into the order of the source."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec

    def epoch(self, parts: int, chunk_bytes: int) -> list[tuple[str | None, bool, int]]:
        """Return (text, whether it continues a group, status) of each record in order."""
        blocks: dict[int, list[tuple[str | None, bool, int]]] = {}
        for part in range(parts):
            loader = SourceLoader(self.spec, 0, TOKENIZER, 7, part, parts, None)
            while (draft := loader.next_chunk(chunk_bytes)) is not None:
                meta = draft.meta
                ids = np.concatenate([np.zeros(0, np.uint8), *draft.payload]).astype(np.uint8)
                ends = np.cumsum(meta.lengths)
                continued = continued_records(meta.marks, 0, len(meta.lengths))
                for number, (end, length) in enumerate(zip(ends, meta.lengths, strict=True)):
                    text = bytes(ids[end - length : end]).decode() if length else None
                    record = (text, bool(continued[number]), int(meta.status[number]))
                    blocks.setdefault(meta.block_key, []).append(record)
            loader.close()
        assert all(not block[0][1] for block in blocks.values()), "a block begins inside a group"
        return [record for key in sorted(blocks) for record in blocks[key]]


def made_source(rng: random.Random, folder: Path, kind: str) -> tuple[SourceSpec, list[list[Line]]]:
    faults = (BAD, UNKEYED) if kind == "jsonl" else (UNKEYED,)
    faults = faults if rng.random() < 0.6 else ()
    write: Callable[..., None] = write_jsonl if kind == "jsonl" else write_parquet
    shards = [random_shard(rng, f"s{number}", faults) for number in range(rng.randint(1, 3))]
    paths = [folder / f"{number}.{kind}" for number in range(len(shards))]
    for path, lines in zip(paths, shards, strict=True):
        write(path, lines, rng)
    rule = ShuffleRule(
        is_shuffled=rng.random() < 0.8,
        window_shards=rng.choice([1, 16]),
        window_records=rng.choice([1, 4, 256]),
        window_bytes=rng.choice([60, 1 << 19]),
        block_bytes=rng.choice([32, 300, 1 << 20]),
    )
    files = tuple(map(shard_of, paths))
    spec = SourceSpec("source", kind, "none", "seekable", files, "", shuffle=rule, max_epochs=1)
    return replace(spec, group=GroupRule("field", "k")), shards


@pytest.mark.parametrize(
    "part", range(3)
)  # 60 examples; in one test they take a slow machine too long
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@given(seed=seeds)
@settings(deadline=None, max_examples=20)
def test_an_epoch_has_every_group_once_and_whole(kind: str, part: int, seed: int) -> None:
    rng = random.Random(3 * seed + part)
    with tempfile.TemporaryDirectory() as folder:
        spec, shards = made_source(rng, Path(folder), kind)
        reader = Reader(spec)
        whole = reader.epoch(1, 1 << 20)
        assert reader.epoch(rng.choice([2, 3]), rng.choice([1, 100])) == whole
    found: list[list[str]] = []
    for text, is_continued, status in whole:
        if not is_continued:
            found.append([])
        assert (text is None) == (status != RecordStatus.OK)
        if text is not None:
            found[-1].append(text)
    wanted = [group for lines in shards for group in groups_of(lines)]
    # A shard may begin with records that have no key: they are a group without a sample.
    assert sorted(group for group in found if group) == sorted(wanted)
    assert sum(not group for group in found) <= len(shards)
    assert len(whole) == sum(len(lines) for lines in shards)
    if not spec.shuffle.is_shuffled:
        assert [group for group in found if group] == wanted


def records_of(rng: random.Random, count: int, ratio: float) -> list[RawRecord]:
    return [
        RawRecord(n, b"x" * rng.randint(0, 30), is_continuing=n > 0 and rng.random() < ratio)
        for n in range(count)
    ]


@given(seeds, st.integers(1, 9), st.integers(1, 90))
def test_windows_hold_whole_groups_or_a_part_of_one(seed: int, records: int, size: int) -> None:
    rng = random.Random(seed)
    rule = ShuffleRule(window_records=records, window_bytes=size)
    made = records_of(rng, rng.randint(0, 60), rng.choice([0, 0.3, 0.9]))
    windows = list(group_windows(iter(made), rule))
    assert [record for window, _ in windows for record in window] == made
    assert [is_last for _, is_last in windows] == [False] * (len(windows) - 1) + [True]
    if not any(record.is_continuing for record in made):
        assert windows == list(record_windows(iter(made), rule))
    for (window, _), following in zip(windows, [*windows[1:], ([], True)], strict=True):
        held = sum(record.size_bytes for record in window)
        assert len(window) <= records and (held <= size or len(window) <= 1)
        is_torn = bool(following[0]) and following[0][0].is_continuing
        begun = [record for record in window if not record.is_continuing]
        if is_torn or (window and window[0].is_continuing):
            # What is torn by its size alone has windows of its own.
            assert len(begun) <= 1 and (not begun or window[0] is begun[0])


@given(seeds)
def test_a_window_is_shuffled_by_groups(seed: int) -> None:
    rng = random.Random(seed)
    made = records_of(rng, rng.randint(1, 40), rng.choice([0, 0.4, 1]))
    is_continuing = np.array([record.is_continuing for record in made])
    count = int((~is_continuing).sum())
    places = spread_groups(permutation(seed, count), is_continuing)
    assert sorted(places.tolist()) == list(range(len(made)))
    for before, here in zip(places.tolist(), places.tolist()[1:], strict=False):
        assert not is_continuing[here] or here == before + 1
    if count == len(made):
        assert places.tolist() == permutation(seed, count).tolist()


def test_what_where_and_lists_leave_out_parts_no_group(tmp_path: Path) -> None:
    """A refused record keeps its place in its group, in formats that refuse by columns too."""
    from federation.model.recipe import SampleRecipe

    lines = [("a", "1"), ("a", "no"), ("a", "2"), ("b", "no"), ("a", "3"), ("a", "4")]
    texts: dict[str, Any] = {}
    for kind, write in (("jsonl", write_jsonl), ("parquet", write_parquet)):
        path = tmp_path / f"a.{kind}"
        write(path, lines, random.Random(1))
        spec = SourceSpec(
            "source", kind, "none", "seekable", (shard_of(path),), "", max_epochs=1,
            shuffle=ShuffleRule(is_shuffled=False), group=GroupRule("field", "k"),
            recipe=SampleRecipe(where='text != "no"'),
        )  # fmt: skip
        texts[kind] = Reader(spec).epoch(1, 1 << 20)
    refused = int(RecordStatus.FILTERED)
    assert texts["jsonl"] == texts["parquet"]
    assert texts["jsonl"] == [
        ("1", False, 0), (None, True, refused), ("2", True, 0), (None, False, refused),
        ("3", False, 0), ("4", True, 0),
    ]  # fmt: skip


def test_a_record_without_a_group_is_a_fault_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"text": "one", "k": 1},
        {"text": "two", "k": 1.5},
        {"text": "three"},
        {"text": "4", "k": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = SourceSpec(
        "source", "jsonl", "none", "seekable", (shard_of(path),), "", max_epochs=1,
        shuffle=ShuffleRule(is_shuffled=False), group=GroupRule("field", "k"),
    )  # fmt: skip
    loader = SourceLoader(spec, 0, TOKENIZER, 7, 0, 1, None)
    draft = loader.next_chunk(1 << 20)
    loader.close()
    assert draft is not None
    missing = int(RecordStatus.FIELD_MISSING)
    assert draft.meta.status.tolist() == [0, missing, missing, 0]
    assert continued_records(draft.meta.marks, 0, 4).tolist() == [False, True, True, True]
    assert "field 'k', which names its group" in draft.meta.fault
