"""Hold-out: who is held out follows from key or content alone; train and held_out are a partition."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import Part, ShuffleRule, SourceSpec
from msd_daemon.sources import hold_out as hold_out_module
from msd_daemon.sources.hold_out import HoldOut, content_hashes, hold_out_of
from tests.support.sources import (
    IN_ORDER,
    Placed,
    compress,
    id_tokenizer,
    make_loader,
    make_spec,
    read_chunks,
    read_stream,
    statuses_of,
    write_megatron,
)

HELD_OUT = int(RecordStatus.HELD_OUT)
MISSING = int(RecordStatus.FIELD_MISSING)
COUNT = 400
SHARE = 0.25


def test_hashes_are_golden() -> None:
    """Part of stream version 1: a change moves records between training and validation."""
    contents = [b"", b"a", b"17", "é 中 😀".encode(), b"x" * 5000, np.array([1, 2], "<i4")]
    assert [f"{value:016x}" for value in content_hashes(contents).tolist()] == GOLDEN


GOLDEN = [
    "b4b2797457a0a6e4",
    "2f42665b399ef840",
    "b47b4d8e138d3920",
    "ad5bab6bea417b01",
    "a1d199f0421c8377",
    "e607e0446b1de62b",
]


def test_the_threshold_is_exact() -> None:
    spec = make_rule(hold_out=0.5)
    assert spec.held_below == 1 << 63
    tiny = make_rule(hold_out=2.0**-60)
    assert tiny.held_below == 16
    smallest = make_rule(hold_out=5e-324)
    assert smallest.held_below == 1  # ceil: only the hash 0 is below


def make_rule(**fields: Any) -> HoldOut:
    rule = hold_out_of(
        SourceSpec("s", "jsonl", "none", "seekable", (), "", **({"part": "train"} | fields))
    )
    assert rule is not None
    return rule


def contents(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{n} " + "".join(rng.choices("abcé中 ", k=rng.randrange(60))) for n in range(COUNT)]


def ids_of(text: str) -> list[int]:
    return [byte + 300 for byte in text.encode()]


def write_lines(path: Path, texts: list[str], *, is_tokenized: bool = False) -> None:
    rows = [
        {"id": f"k{text[:5]}"} | ({"ids": ids_of(text)} if is_tokenized else {"text": text})
        for text in texts
    ]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    kind = path.suffix[1:]
    path.write_bytes(data if kind == "jsonl" else compress(data, kind, 2))


def write_table(path: Path, texts: list[str], *, is_tokenized: bool = False) -> None:
    columns: dict[str, Any] = {"id": [f"k{text[:5]}" for text in texts], "text": texts}
    if is_tokenized:
        columns["ids"] = pa.array([ids_of(text) for text in texts], pa.list_(pa.uint16()))
    pq.write_table(pa.table(columns), path, row_group_size=37)


def write_blank(path: Path, texts: list[str]) -> None:
    path.write_text("\n\n".join(texts))


def write_pair(path: Path, texts: list[str]) -> None:
    write_megatron(path.with_suffix(""), [[ids_of(text)] for text in texts])


Writer = Callable[[Path, list[str]], None]
FORMATS: dict[str, tuple[str, Writer, dict[str, Any]]] = {
    "jsonl": ("jsonl", write_lines, {}),
    "jsonl.zst": ("jsonl.zst", write_lines, {}),
    "jsonl ids": (
        "jsonl",
        lambda path, texts: write_lines(path, texts, is_tokenized=True),
        {"tokens_field": "ids"},
    ),
    "jsonl ids by key": (
        "jsonl",
        lambda path, texts: write_lines(path, texts, is_tokenized=True),
        {"tokens_field": "ids", "key_field": "id"},
    ),
    "parquet": ("parquet", write_table, {}),
    "parquet by key": ("parquet", write_table, {"key_field": "id"}),
    "parquet ids": (
        "parquet",
        lambda path, texts: write_table(path, texts, is_tokenized=True),
        {"tokens_field": "ids"},
    ),
    "parquet ids by key": (
        "parquet",
        lambda path, texts: write_table(path, texts, is_tokenized=True),
        {"tokens_field": "ids", "key_field": "id"},
    ),
    "text": ("txt", write_blank, {"text_document": "blank_line"}),
    "megatron": ("bin", write_pair, {}),
}


def read_part(paths: list[Path], part: Part, rule: ShuffleRule, **fields: Any) -> list[Placed]:
    spec = make_spec(paths, shuffle=rule, hold_out=SHARE, part=part, max_epochs=1, **fields)
    loader = make_loader(spec, tokenizer=id_tokenizer() if spec.is_tokenized else None)
    return read_stream(loader, payload_bytes_max=777)


def samples(records: list[Placed]) -> list[tuple[int, ...]]:
    return sorted(record.tokens for record in records if record.status == 0)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_disjoint_and_complete_under_any_resharding(tmp_path: Path, name: str) -> None:
    suffix, write, fields = FORMATS[name]
    texts = contents(1)
    held: list[list[tuple[int, ...]]] = []
    for number, (order, cuts) in enumerate(((texts, [COUNT]), (texts[::-1], [1, 100, 250, COUNT]))):
        begin, paths = 0, []
        for cut in cuts:
            paths.append(tmp_path / f"{number}-{cut}.{suffix}")
            write(paths[-1], order[begin:cut])
            begin = cut
        rule = ShuffleRule(is_shuffled=bool(number), block_bytes=900, stream_block_records=20)
        by_part = {
            part: read_part(paths, part, rule, **fields) for part in ("train", "held_out", "all")
        }
        train, out = samples(by_part["train"]), samples(by_part["held_out"])
        assert sorted(train + out) == samples(by_part["all"])
        assert len(train) + len(out) == COUNT
        assert 0.15 * COUNT < len(out) < 0.35 * COUNT
        assert not set(train) & set(out)
        assert statuses_of(by_part["train"]) == {0: len(train), HELD_OUT: len(out)}
        assert statuses_of(by_part["held_out"]) == {0: len(out), HELD_OUT: len(train)}
        held.append(out)
        keys = [[(r.block_key, r.index) for r in records] for records in by_part.values()]
        assert keys[0] == keys[1] == keys[2]  # a record keeps its place, whoever gets it
    assert held[0] == held[1]


def test_content_is_the_line_the_text_or_the_ids(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["one"])
    write_table(tmp_path / "a.parquet", ["one"], is_tokenized=True)
    write_pair(tmp_path / "a.bin", ["one"])
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    line = (tmp_path / "a.jsonl").read_bytes().rstrip(b"\n")
    for path, content, fields in (
        (tmp_path / "a.jsonl", line, {}),
        (tmp_path / "a.parquet", b"one", {}),
        (tmp_path / "a.parquet", np.array(ids_of("one"), "<i4").tobytes(), {"tokens_field": "ids"}),
        (tmp_path / "a.bin", np.array(ids_of("one"), "<u2").tobytes(), {}),
        (tmp_path / "a.txt", b"one\r\n", {}),
    ):
        (hashed,) = content_hashes([content]).tolist()
        share = (hashed + (1 << 12)) / (1 << 64)  # the first double that holds it out
        for hold_out, status in ((share, HELD_OUT), (share - 2**-51, 0)):
            spec = make_spec([path], shuffle=IN_ORDER, max_epochs=1, hold_out=hold_out, **fields)
            loader = make_loader(spec, tokenizer=id_tokenizer() if spec.is_tokenized else None)
            assert [record.status for record in read_stream(loader)] == [status], path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet text", "parquet ids"])
def test_a_string_and_an_integer_key_hash_as_text(tmp_path: Path, kind: str) -> None:
    """The same keys, as strings and as integers, hold out the same records of other contents."""
    held = []
    for number, convert in enumerate((str, int)):
        keys: list[Any] = [convert(n) for n in range(COUNT)]
        texts = [f"{number} {n}" for n in range(COUNT)]
        path = tmp_path / f"{number}.{kind.partition(' ')[0]}"
        if kind.startswith("parquet"):
            ids = pa.array([[n] for n in range(COUNT)], pa.list_(pa.int32()))
            pq.write_table(pa.table({"id": keys, "text": texts, "ids": ids}), path)
        else:
            rows = zip(keys, texts, strict=True)
            data = "".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in rows)
            path.write_bytes(compress(data.encode(), "gz") if kind == "jsonl.gz" else data.encode())
        fields = {"tokens_field": "ids"} if kind == "parquet ids" else {}
        records = read_part([path], "held_out", IN_ORDER, key_field="id", **fields)
        held.append([at for at, record in enumerate(records) if record.status == 0])
    assert held[0] == held[1]
    hashes = content_hashes(str(n).encode() for n in range(COUNT))
    assert held[0] == np.flatnonzero(hashes < SHARE * 2.0**64).tolist()


def test_a_record_without_its_key_is_a_named_fault_of_both_parts(tmp_path: Path) -> None:
    lines = [
        '{"text": "a"}',
        '{"text": "a", "id": null}',
        '{"text": "a", "id": 1.5}',
        '{"text": "a", "id": true}',
        '{"text": "a", "id": ["x"]}',
        '{"text": "a", "id": "\\ud800"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    for part in ("train", "held_out", "all"):
        records = read_part([path], part, IN_ORDER, key_field="id")
        encoding = int(RecordStatus.BAD_ENCODING)
        assert [record.status for record in records] == [MISSING] * 5 + [encoding]
    spec = make_spec([path], shuffle=IN_ORDER, hold_out=SHARE, key_field="id")
    fault = read_chunks(make_loader(spec))[0].meta.fault
    assert fault == f"{path}: record at byte offset 0: field 'id' is absent, it is the record's key"
    assert {r.status for r in read_stream(make_loader(make_spec([path], key_field="id")))} == {0}


@pytest.mark.parametrize("fields", [{}, {"tokens_field": "ids"}], ids=["text", "ids"])
def test_a_parquet_row_without_its_key_is_a_fault(tmp_path: Path, fields: dict[str, Any]) -> None:
    table = pa.table(
        {
            "id": pa.array([None, "a"], pa.string()),
            "text": ["x", "y"],
            "ids": pa.array([[1], [2]], pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    by_part = [
        [
            r.status
            for r in read_part([tmp_path / "a.parquet"], part, IN_ORDER, key_field="id", **fields)
        ]
        for part in ("train", "held_out")
    ]
    assert [statuses[0] for statuses in by_part] == [MISSING, MISSING]
    assert sorted(statuses[1] for statuses in by_part) == [0, HELD_OUT]


def test_a_faulty_record_is_a_fault_of_one_part_where_its_content_or_key_tells(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"id": {n}, "text": {n}}}\n' for n in range(50)))
    for fields in ({}, {"key_field": "id"}):
        counts = [
            statuses_of(read_part([path], part, IN_ORDER, **fields))
            for part in ("train", "held_out")
        ]
        assert counts[0][MISSING] + counts[1][MISSING] == 50
        assert counts[0][HELD_OUT] == counts[1][MISSING]


@pytest.mark.parametrize("part", ["train", "all"])
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_hashed_where_nothing_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: Part
) -> None:
    suffix, write, fields = FORMATS[name]
    write(tmp_path / f"a.{suffix}", contents(1)[:20])

    def refuse(_: object) -> None:
        raise AssertionError("a record was hashed")

    monkeypatch.setattr(hold_out_module, "content_hashes", refuse)
    spec = make_spec([tmp_path / f"a.{suffix}"], part=part, **fields)
    loader = make_loader(spec, tokenizer=id_tokenizer() if spec.is_tokenized else None)
    assert statuses_of(read_stream(loader)) == {0: 20}


def test_held_out_of_a_source_that_holds_nothing_out_is_empty(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", contents(1)[:20])
    spec = make_spec([tmp_path / "a.jsonl"], part="held_out")
    assert statuses_of(read_stream(make_loader(spec))) == {HELD_OUT: 20}


def test_a_large_document_of_a_pair_is_judged_by_itself(tmp_path: Path) -> None:
    """A block that lies scattered over the bin is read document by document."""
    documents = [[[n] * (40_000 if n % 3 else 3)] for n in range(1, 10)]
    path = write_megatron(tmp_path / "a", documents, "<i4")
    rule = ShuffleRule(block_bytes=1 << 30, window_records=3)
    train = read_part([path], "train", rule)
    out = read_part([path], "held_out", rule)
    assert samples(train) + samples(out) != []
    assert sorted(samples(train) + samples(out)) == samples(read_part([path], "all", rule))
    spec = make_spec([path], shuffle=rule, hold_out=SHARE, max_epochs=1)
    for record in train:
        fetched = make_loader(spec, tokenizer=id_tokenizer()).fetch(
            record.block_key, [record.index]
        )
        assert fetched.meta.status.tolist() == [record.status]
        assert int(fetched.meta.lengths[0]) == len(record.tokens)
