"""Values of user fields leave a source beside their tokens, or their record is a named fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule, SourceSpec
from msd_daemon.shm.chunk_layout import ChunkView
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.transforms import Tokenizer, describe_tokenizer, open_tokenizer
from tests.support.sources import (
    IN_ORDER,
    compress,
    id_tokenizer,
    make_loader,
    make_spec,
    read_chunks,
    read_stream,
    write_megatron,
)

MISSING = int(RecordStatus.FIELD_MISSING)
ADVANTAGE = FieldRule("advantage", "adv", "token", "float32", -1.0)
TURN = FieldRule("turn", "turn", "token", "int32", -7.0)
REWARD = FieldRule("reward", "reward", "segment", "float64", 0.5)
GROUP = FieldRule("group", "group", "row", "int64")
FIELDS = (ADVANTAGE, REWARD, TURN, GROUP)

RECORDS: list[dict[str, Any]] = [
    {"n": 3, "adv": [0.5, 1, -2e3], "turn": [0, 1, 1], "reward": 1, "group": 1 << 60},
    {"n": 0, "adv": [], "turn": [], "reward": 2, "group": 0},
    {"n": 2, "adv": [4, 5], "turn": [2, 3], "reward": -0.25, "group": -5},
]

KINDS = ("jsonl text", "jsonl ids", "jsonl.gz text", "parquet text", "parquet ids")


def write(folder: Path, kind: str, records: list[dict[str, Any]]) -> SourceSpec:
    """Write a source whose records have `n` tokens, if nothing is put around them."""
    suffix, _, content = kind.partition(" ")
    path = folder / f"a.{suffix}"
    rows = [record | {"text": "x" * record["n"], "ids": [7] * record["n"]} for record in records]
    if suffix == "parquet":
        schema = {"ids": pa.list_(pa.int32()), "adv": pa.list_(pa.float64())}
        schema |= {"turn": pa.list_(pa.int64()), "reward": pa.float64(), "group": pa.int64()}
        columns: dict[str, Any] = {
            name: pa.array([row.get(name) for row in rows], kind) for name, kind in schema.items()
        }
        pq.write_table(pa.table({"text": [row["text"] for row in rows]} | columns), path)
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(compress(data, "gz") if suffix.endswith("gz") else data)
    fields: dict[str, Any] = {"tokens_field": "ids"} if content == "ids" else {}
    return make_spec([path], shuffle=IN_ORDER, max_epochs=1, **fields)


def tokenizer_of(spec: SourceSpec) -> Tokenizer | None:
    return id_tokenizer() if spec.is_tokenized else None


def read_values(
    spec: SourceSpec, fields: tuple[FieldRule, ...] = FIELDS, **options: Any
) -> list[list[Any]]:
    """Return the values of each field, as they lie in the chunks."""
    options.setdefault("tokenizer", tokenizer_of(spec))
    drafts = read_chunks(make_loader(spec, fields=fields, **options), 40)
    columns: list[list[Any]] = [[] for _ in fields]
    for draft in drafts:
        for column, array in zip(columns, written(draft).values(fields), strict=True):
            column += array.tolist()
    return columns


def written(draft: ChunkDraft) -> ChunkView:
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    return ChunkView(view)


def fault_of(spec: SourceSpec, fields: tuple[FieldRule, ...] = FIELDS, record: int = 0) -> str:
    """Return the fault of a record, which has to be one for a field."""
    loader = make_loader(spec, tokenizer=tokenizer_of(spec), fields=fields)
    draft = loader.fetch(0, [record])
    assert draft.meta.status.tolist() == [MISSING]
    assert draft.meta.lengths.tolist() == [0]
    prefix, _, fault = draft.meta.fault.partition(": ")
    assert prefix == spec.shards[0].path
    return fault.partition(": ")[2]


@pytest.mark.parametrize("kind", KINDS)
def test_values_lie_beside_their_tokens_and_records(tmp_path: Path, kind: str) -> None:
    values = read_values(write(tmp_path, kind, RECORDS))
    assert values == [
        [0.5, 1, -2000, 4, 5],
        [1, 2, -0.25],
        [0, 1, 1, 2, 3],
        [1 << 60, 0, -5],
    ]


def test_added_tokens_have_the_fill(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(describe_tokenizer(None, kind="bytes", eos="end", bos="start"))
    for kind in ("jsonl text", "parquet text"):
        advantage, _, turn, _ = read_values(write(tmp_path, kind, RECORDS), tokenizer=tokenizer)
        assert advantage == [-1, 0.5, 1, -2000, -1, -1, 4, 5, -1]
        assert turn == [-7, 0, 1, 1, -7, -7, 2, 3, -7]


@pytest.mark.parametrize("kind", ["text", "megatron"])
def test_formats_without_fields_carry_none(tmp_path: Path, kind: str) -> None:
    if kind == "text":
        path = tmp_path / "a.txt"
        path.write_text("abc")
    else:
        path = write_megatron(tmp_path / "a", [[[1, 2, 3]]])
    (draft, *_) = read_chunks(make_loader(make_spec([path]), fields=FIELDS))
    assert draft.values == ()
    assert not written(draft).header.has_fields


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"adv": [1, 2]}, "'adv' has 2 numbers, its record has 3 tokens"),
        ({"adv": [1, 2, 3, 4]}, "'adv' has 4 numbers, its record has 3 tokens"),
        ({"adv": None}, "'adv' is null"),
        ({"reward": None}, "'reward' is null"),
        ({"adv": [1, None, 3]}, "'adv' holds None at 1"),
        ({"adv": [1, 2, 1e300]}, "'adv' holds 1e+300 at 2, no float32"),
        ({"turn": [0, 1, 1 << 31]}, "'turn' holds 2147483648 at 2, no int32"),
        ({"turn": [0, -(1 << 31) - 1, 1]}, "'turn' holds -2147483649 at 1, no int32"),
    ],
    ids=str,
)
def test_a_value_that_is_not_there_or_does_not_fit_is_named(
    tmp_path: Path, kind: str, change: dict[str, Any], fault: str
) -> None:
    spec = write(tmp_path, kind, [*RECORDS, RECORDS[0] | change, RECORDS[2]])
    assert fault in fault_of(spec, record=3)
    good = [[0.5, 1, -2000, 4, 5, 4, 5]]
    assert read_values(spec, (ADVANTAGE, TURN, REWARD))[:1] == good
    lengths = [len(record.tokens) for record in _stream(spec)]
    assert lengths == [3, 0, 2, 0, 2]


def _stream(spec: SourceSpec) -> list[Any]:
    return read_stream(make_loader(spec, tokenizer=tokenizer_of(spec), fields=FIELDS))


@pytest.mark.parametrize("kind", ["parquet text", "parquet ids"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(tmp_path: Path, kind: str, value: float) -> None:
    listed = write(tmp_path, kind, [RECORDS[0] | {"adv": [1, value, 2]}])
    assert f"'adv' holds {value} at 1, no float32" in fault_of(listed)
    single = write(tmp_path, kind, [RECORDS[0] | {"reward": value}])
    assert f"'reward' holds {value}, no float64" in fault_of(single)


@pytest.mark.parametrize("kind", ["jsonl text", "jsonl ids"])
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('"adv": [1, 2, 3]', "field 'reward' is absent"),
        ('"adv": 1, "reward": 1', "field 'adv' is a int, not a list of numbers"),
        ('"adv": [1, true, 3], "reward": 1', "holds True at 1, not a number"),
        ('"adv": ["1", 2, 3], "reward": 1', "holds '1' at 0, not a number"),
        ('"adv": [1, 2, 3], "reward": "1"', "'reward' holds '1', not a number"),
        ('"adv": [1, 2, 3], "reward": [1]', "'reward' holds [1], not a number"),
        ('"adv": [1, 2, 3], "reward": 1e999', "'reward' holds inf, no float64"),
        ('"adv": [1, 2, 1e999], "reward": 1', "holds inf at 2, no float32"),
        (f'"adv": [1, 2, {10**400}], "reward": 1', "... at 2, no float32"),
    ],
)
def test_odd_json_values_are_named(tmp_path: Path, kind: str, line: str, fault: str) -> None:
    spec = write(tmp_path, kind, [])
    path = Path(spec.shards[0].path)
    path.write_text(f'{{"text": "xyz", "ids": [1, 2, 3], {line}}}\n')
    fields = {"tokens_field": "ids"} if spec.tokens_field else {}
    spec = make_spec([path], shuffle=IN_ORDER, **fields)
    assert fault in fault_of(spec, (ADVANTAGE, REWARD))


@pytest.mark.parametrize("number", ["1.5", "1.0", str(1 << 63), "true", str(10**700)])
def test_only_integers_of_its_range_fit_an_integer_field(tmp_path: Path, number: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "x", "group": {number}}}\n')
    assert "'group' holds" in fault_of(make_spec([path], shuffle=IN_ORDER), (GROUP,))


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        (None, "column 'adv' is there 0 times"),
        (pa.array(["x"]), "column 'adv' holds string, not lists of numbers"),
        (pa.array([1.0]), "column 'adv' holds double, not lists of numbers"),
        (pa.array([["x"]]), "not lists of numbers"),
    ],
)
def test_a_column_of_another_type_is_a_fault_of_each_row(
    tmp_path: Path, column: pa.Array | None, fault: str
) -> None:
    columns: dict[str, Any] = {"text": ["x"], "ids": [[1]]}
    if column is not None:
        columns["adv"] = column
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for fields in ({}, {"tokens_field": "ids"}):
        spec = make_spec([tmp_path / "a.parquet"], shuffle=IN_ORDER, **fields)
        assert fault in fault_of(spec, (ADVANTAGE,))


def test_a_float_column_does_not_become_integers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"], "turn": [[1.0]]}), tmp_path / "a.parquet")
    spec = make_spec([tmp_path / "a.parquet"], shuffle=IN_ORDER)
    assert "holds list<element: double>, not lists of integers" in fault_of(spec, (TURN,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_out_record_needs_no_field(tmp_path: Path, kind: str) -> None:
    """A fault of a field costs the part that the record belongs to, not the other one."""
    records = [{"n": n, "adv": []} for n in range(1, 40)]
    spec = write(
        tmp_path, kind, [record | {"reward": 1, "turn": [], "group": 1} for record in records]
    )
    counts = []
    for part in ("train", "held_out"):
        held = make_spec(
            [Path(spec.shards[0].path)],
            hold_out=0.5,
            part=part,
            max_epochs=1,
            tokens_field=spec.tokens_field,
            is_tokenized=spec.is_tokenized,
        )
        loader = make_loader(held, tokenizer=tokenizer_of(held), fields=(ADVANTAGE,))
        read_stream(loader)
        counts.append(dict(loader.statistics().faults))
    assert counts[0]["FIELD_MISSING"] + counts[1]["FIELD_MISSING"] == 39
    assert counts[0]["FIELD_MISSING"] == counts[1]["HELD_OUT"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_grant_holds_the_chunk_made_for_it(tmp_path: Path, kind: str) -> None:
    records = [
        {"n": n % 50, "adv": [1] * (n % 50), "turn": [1] * (n % 50), "reward": n, "group": n}
        for n in range(400)
    ]
    spec = write(tmp_path, kind, records)
    loader = make_loader(spec, tokenizer=tokenizer_of(spec), fields=FIELDS)
    limit, count = 16_000, 0
    while (draft := loader.next_chunk(limit * 7 // 8)) is not None:
        assert draft.encoded_bytes() <= limit
        token_bytes = draft.dtype.itemsize + 8  # advantage and turn
        used = draft.payload_tokens * token_bytes + len(draft.meta.lengths) * 16
        assert used <= limit * 7 // 8
        count += 1
    assert count >= 3
    (first, *_) = read_chunks(make_loader(spec, tokenizer=tokenizer_of(spec), fields=FIELDS), 1)
    assert len(first.meta.lengths) == 1  # one at least, however small the piece


def test_values_are_little_endian_of_the_dtype(tmp_path: Path) -> None:
    spec = write(tmp_path, "jsonl text", RECORDS)
    (draft, *_) = read_chunks(make_loader(spec, fields=FIELDS))
    assert [array.dtype for array in draft.values] == [
        np.dtype("<f4"), np.dtype("<f8"), np.dtype("<i4"), np.dtype("<i8")
    ]  # fmt: skip
