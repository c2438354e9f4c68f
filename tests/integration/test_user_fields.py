"""User fields end to end (E10): every value a trainer gets belongs to the token beside it.

Pre-tokenized JSONL and parquet with fields, a Megatron pair without; ids say record and place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msd_client.contract.errors import DataError
from tests.support.node import Node, run_ranks, running_node
from tests.support.sources import write_megatron

pytestmark = pytest.mark.processes

STRIDE = 1000
BARE = 900_000
"""Ids of the source without fields begin here."""
FILLS = {"exact": -1, "record": -2, "first": -3}


def lengths_of(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 150, count).tolist()


def row_of(record: int, length: int) -> dict[str, Any]:
    ids = [STRIDE * record + k for k in range(length)]
    return {"ids": ids, "exact": ids, "record": record, "id": f"r{record}"}


def make_job(folder: Path, **changes: Any) -> dict[str, Any]:
    lines = [row_of(record, n) for record, n in enumerate(lengths_of(150, 1))]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    rows = [row_of(200 + record, n) for record, n in enumerate(lengths_of(150, 2))]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in ("record", "id")}
    for name in ("ids", "exact"):
        columns[name] = pa.array([row[name] for row in rows], pa.list_(pa.int32()))
    pq.write_table(pa.table(columns), folder / "b.parquet", row_group_size=40)
    documents = [[[BARE + k for k in range(n)]] for n in lengths_of(60, 3)]
    write_megatron(folder / "c", documents, "<i4")
    return {
        "tokenizer": {"vocabulary": 1 << 20},
        "batch": {"rows": 8, "row_tokens": 64, "microbatch_rows": 2, "segment_multiple": 4},
        "defaults": {"tokens": "ids", "key": "id"},
        "sources": {
            "lines": {"paths": str(folder / "a.jsonl"), "hold_out": 0.2},
            "rows": str(folder / "b.parquet"),
            "bare": str(folder / "c.bin"),
        },
        "fields": {
            "exact": {"dtype": "float64", "fill": FILLS["exact"]},
            "record": {"per": "segment", "dtype": "int32", "fill": FILLS["record"]},
            "first": {"from": "record", "per": "row", "dtype": "int64", "fill": FILLS["first"]},
        },
        "loaders": {"val": {"from": "lines", "rows": 4}},
        "epochs": 1,
    } | changes


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_node(tmp_path_factory.mktemp("node")) as node:
        yield node


def check_batch(batch: Any) -> set[int]:
    """Check every value of a batch against the token beside it; return the records seen."""
    numbers = batch.segment_ids
    sources = batch.segment_source
    tokens = np.asarray(batch.tokens)
    true_ends = np.diff(batch.cu_seqlens)
    places = batch.position_ids
    is_real = (sources[numbers] >= 0) & (places < true_ends[numbers])
    has_values = is_real & (tokens < BARE)
    assert batch["exact"].dtype == np.float64
    assert (batch["exact"][has_values] == tokens[has_values]).all()
    assert (batch["exact"][~has_values] == FILLS["exact"]).all()
    record = np.full(batch.segments, FILLS["record"])
    record[numbers[has_values]] = tokens[has_values] // STRIDE
    assert batch["record"].tolist() == record.tolist()
    firsts = [record[row[0]] for row in numbers]
    firsts = [FILLS["first"] if value == FILLS["record"] else value for value in firsts]
    assert batch["first"].tolist() == firsts
    return set(record.tolist()) - {FILLS["record"]}


def read_all(
    node: Node, job: dict[str, Any], mesh: dict[str, int], steps: int | None, **options: Any
) -> tuple[set[int], list[bytes], dict[str, bytes]]:
    """Read steps on every rank; return the records, all tokens, and the last state."""
    seen: set[int] = set()
    read: list[bytes] = []
    states: list[dict[str, bytes]] = []

    def read_step(data: Any, step: Any) -> None:
        for batch in step:
            seen.update(check_batch(batch))
            read.append(np.asarray(batch.tokens).tobytes())

    def at_end(data: Any) -> None:
        states.append(data.train.state_dict())

    run_ranks(node, job, mesh, steps, read_step=read_step, at_end=at_end, **options)
    return seen, read, states[0]


def test_every_value_belongs_to_the_token_beside_it(node: Node, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    seen, _, _ = read_all(node, job, {"dp": 2}, None)
    assert {record for record in seen if record >= 200} == set(range(200, 350))
    held: set[int] = set()

    def at_end(data: Any) -> None:
        for step in data.val.once():
            for batch in step:
                held.update(check_batch(batch))

    run_ranks(node, job, {"dp": 1}, 1, at_end=at_end)
    trained = {record for record in seen if record < 200}
    assert trained | held == set(range(150))
    assert not trained & held
    assert 10 < len(held) < 60


def test_carried_records_bring_their_values_back_after_a_restore(
    node: Node, tmp_path: Path
) -> None:
    job = make_job(tmp_path, mixture={0: {"lines": 1, "rows": 1, "bare": 1}})
    _, whole, _ = read_all(node, job, {"dp": 1}, 12)
    _, head, state = read_all(node, job, {"dp": 1}, 5)
    _, tail, _ = read_all(node, job, {"dp": 1}, 7, state=state)
    assert head + tail == whole


def test_a_record_without_its_value_stops_a_job_that_does_not_skip(
    node: Node, tmp_path: Path
) -> None:
    job = make_job(tmp_path)
    path = tmp_path / "a.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[70])
    row["exact"].append(1)
    lines[70] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")
    job["sources"]["lines"] |= {"on_error": "fail", "hold_out": 0}
    del job["loaders"]
    with pytest.raises(DataError) as raised:
        read_all(node, job, {"dp": 1}, None)
    assert "field 'exact' has " in str(raised.value)
    assert "a.jsonl: record at byte offset" in str(raised.value)
