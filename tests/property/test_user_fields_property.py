"""User fields travel with their token (E10): through chunks of any size, splits, copies, fetches.

Every value says which record and token it belongs to, so that a place of a microbatch is checked by
itself: the value there against the token there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.model.job import FieldRule, ShuffleRule, SourceSpec
from msd_client.contract.codec import pack
from msd_client.contract.user_fields import UserField
from msd_daemon.gather import GatherOutputs, GatherRule, gather_rows
from msd_daemon.gather.user_fields import gather_fields
from msd_daemon.shm.chunk_layout import single_bytes
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.transforms import Tokenizer, describe_tokenizer, open_tokenizer
from msd_daemon.workers.loader_main import LoaderWorker
from msd_daemon.workers.messages import ToLoader
from tests.support.microbatches import columns_of
from tests.support.sources import compress, id_tokenizer, make_loader, make_spec

STRIDE = 1000
"""Ids of record r are r * STRIDE + k; no record is longer."""
PAD = (1 << 20) - 1
KINDS = ("jsonl ids", "jsonl.zst ids", "parquet ids", "jsonl text", "parquet text", "text")
FIELDS = (
    FieldRule("exact", "exact", "token", "int64", -1),
    FieldRule("reward", "record", "segment", "float32", -2),
    FieldRule("place", "place", "token", "float32", -3),
    FieldRule("group", "record", "row", "int32", -4),
)
USER_FIELDS = tuple(UserField(f.name, f.per, f.dtype, f.fill) for f in FIELDS)
ROW_TOKENS = 24

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def letter(record: int) -> str:
    return chr(33 + record)


@contextmanager
def source(
    kind: str, lengths: list[int], rule: ShuffleRule, hold_out: float = 0.0
) -> Iterator[SourceSpec]:
    """Write a source of records whose values follow from record and place."""
    suffix, _, content = kind.partition(" ")
    rows = [
        {
            "ids": [STRIDE * record + k for k in range(length)],
            "text": letter(record) * length,
            "exact": [STRIDE * record + k for k in range(length)],
            "place": list(range(length)),
            "record": record,
        }
        for record, length in enumerate(lengths)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{'txt' if suffix == 'text' else suffix}"
        if suffix == "text":
            path.write_text("\n\n".join(str(row["text"]) for row in rows))
        elif suffix == "parquet":
            lists = pa.list_(pa.int64())
            columns: dict[str, Any] = {
                name: pa.array([row[name] for row in rows], lists)
                for name in ("ids", "exact", "place")
            }
            columns |= {name: [row[name] for row in rows] for name in ("text", "record")}
            pq.write_table(pa.table(columns), path, row_group_size=5)
        else:
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(compress(data, "zst", 2) if suffix.endswith("zst") else data)
        fields: dict[str, Any] = {"tokens_field": "ids"} if content == "ids" else {}
        yield make_spec(
            [path],
            shuffle=rule,
            text_document="blank_line",
            max_epochs=1,
            hold_out=hold_out,
            **fields,
        )


def tokenizer_of(spec: SourceSpec) -> Tokenizer:
    if spec.is_tokenized:
        return id_tokenizer()
    return open_tokenizer(describe_tokenizer(None, kind="bytes", eos="end", bos="start"))


class Pool:
    """Chunks one after the other, and where the pieces of records lie."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.pieces: list[tuple[int, int, int, int]] = []
        """Chunk, record in it, first token, tokens."""
        self.records: list[int] = []
        """Which record a piece is of, as its tokens say."""

    def add(self, draft: ChunkDraft, cut: int) -> None:
        at = len(self.data)
        chunk = bytearray(draft.encoded_bytes())
        draft.write_into(memoryview(chunk))
        self.data += chunk
        tokens = np.concatenate([np.zeros(0, np.int64), *draft.payload])
        ends = np.cumsum(draft.meta.lengths).tolist()
        for sample, (length, end) in enumerate(zip(draft.meta.lengths.tolist(), ends, strict=True)):
            for first in range(0, length, cut):
                self.pieces.append((at, sample, first, min(cut, length - first)))
                self.records.append(record_of(tokens[end - length : end]))

    def copy(self, numbers: set[int]) -> None:
        """Have a loader worker copy pieces into chunks of their own, as for carried ones."""
        copies = []
        size = len(self.data)
        for number in sorted(numbers):
            at, sample, first, tokens = self.pieces[number]
            needed = single_bytes(tokens, 4, FIELDS)
            copies.append([at, size - at, sample, first, tokens, len(self.data), needed])
            self.pieces[number] = (len(self.data), 0, 0, tokens)
            self.data += bytes(needed)
        link = SimpleNamespace(send=lambda *_: None)
        worker: Any = LoaderWorker(link)  # type: ignore[arg-type] # a link that only takes answers
        worker._pool = memoryview(self.data)
        worker._job = SimpleNamespace(fields=FIELDS, media=())
        worker._handle(int(ToLoader.COPY), pack({"task": 1, "copies": copies}), [])
        worker._pool.release()


def place_pieces(pieces: list[tuple[int, int, int, int]]) -> tuple[list[list[int]], list[int], int]:
    """Return segments one behind the other in rows, their numbers, and the number of rows."""
    segments, numbers = [], []
    row = column = number = 0
    for at, sample, first, tokens in pieces:
        if column + tokens > ROW_TOKENS:
            number += column < ROW_TOKENS  # what is left of the row is a segment of its own
            row, column = row + 1, 0
        segments.append([at, sample, first, tokens, row, column, 0])
        numbers.append(number)
        number, column = number + 1, column + tokens
    return segments, numbers, row + 1


def check(spec: SourceSpec, pool: Pool, has_fields: bool) -> None:
    segments, numbers, rows = place_pieces(pool.pieces)
    shape = (rows, ROW_TOKENS)
    tokens = np.zeros(shape, np.int64)
    outputs: dict[str, np.ndarray] = {
        "exact": np.full(shape, 5, np.int64),
        "place": np.full(shape, 5, np.float32),
        "reward": np.full(len(segments) + rows, 5, np.float32),
        "group": np.full(rows, 5, np.int32),
    }
    columns = columns_of(segments)
    gather_rows(pool.data, columns, shape, GatherOutputs(tokens), GatherRule(PAD, -100))
    gather_fields(
        memoryview(pool.data), columns, USER_FIELDS, shape, np.array(numbers, np.int32), outputs
    )
    firsts: dict[int, int] = {}
    for (*_, row, _, _), number, record in zip(segments, numbers, pool.records, strict=True):
        assert outputs["reward"][number] == (record if has_fields else -2)
        firsts.setdefault(row, number)
    for row in range(rows):
        first = outputs["reward"][firsts[row]] if row in firsts else -2
        assert outputs["group"][row] == (first if first != -2 else -4)
    padding = sorted(set(range(len(segments) + rows)) - set(numbers))
    assert (outputs["reward"][padding] == -2).all()
    for token, exact, place in zip(
        tokens.ravel().tolist(),
        outputs["exact"].ravel().tolist(),
        outputs["place"].ravel().tolist(),
        strict=True,
    ):
        if token == PAD or not has_fields or (not spec.is_tokenized and token >= 256):
            assert (exact, place) == (-1, -3)
        elif spec.is_tokenized:
            assert (exact, place) == (token, token % STRIDE)
        else:
            assert (exact // STRIDE, exact % STRIDE) == (token - 33, place)


def record_of(tokens: np.ndarray) -> int:
    """Return which record the tokens of a whole one say they are of."""
    is_text = tokens.max() in (256, 257)  # EOS and BOS; ids of records end in less than 60
    return int(tokens[tokens < 256][0]) - 33 if is_text else int(tokens[0]) // STRIDE


RULES = st.builds(
    ShuffleRule,
    is_shuffled=st.booleans(),
    window_records=st.integers(1, 9),
    window_bytes=st.integers(1, 2000),
    block_bytes=st.integers(200, 3000),
    stream_block_records=st.integers(1, 12),
)
LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=25)


@pytest.mark.parametrize("kind", KINDS)
@given(
    lengths=LENGTHS,
    rule=RULES,
    limit=st.integers(1, 4000),
    cut=st.integers(1, ROW_TOKENS),
    data=st.data(),
)
@few
def test_a_value_travels_with_its_token(
    kind: str, lengths: list[int], rule: ShuffleRule, limit: int, cut: int, data: st.DataObject
) -> None:
    with source(kind, lengths, rule) as spec:
        pool = Pool()
        loader = make_loader(spec, tokenizer=tokenizer_of(spec), fields=FIELDS)
        drafts = []
        while (draft := loader.next_chunk(limit)) is not None:
            drafts.append(draft)
            pool.add(draft, cut)
        for draft in data.draw(st.lists(st.sampled_from(drafts), max_size=3)):
            count = len(draft.meta.lengths)
            first = draft.meta.first_index
            picked = data.draw(st.permutations(range(first, first + count)))[:4]
            if picked:
                fetcher = make_loader(spec, tokenizer=tokenizer_of(spec), fields=FIELDS)
                pool.add(fetcher.fetch(draft.meta.block_key, picked), cut)
        if pool.pieces:
            pool.copy(data.draw(st.sets(st.integers(0, len(pool.pieces) - 1), max_size=6)))
        check(spec, pool, has_fields=kind != "text")


@pytest.mark.parametrize("kind", KINDS[:-1])
@given(
    lengths=LENGTHS,
    rule=RULES,
    hold_out=st.sampled_from([0.0, 0.4]),
    parts=st.integers(1, 4),
    limit=st.integers(1, 3000),
)
@few
def test_values_do_not_depend_on_chunks_loaders_and_indexes(
    kind: str, lengths: list[int], rule: ShuffleRule, hold_out: float, parts: int, limit: int
) -> None:
    with (
        source(kind, lengths, rule, hold_out) as spec,
        tempfile.TemporaryDirectory() as folder,
    ):
        whole = records_with_values(spec, 1 << 20, 1, None)
        for index_dir in (None, Path(folder), Path(folder)):
            assert records_with_values(spec, limit, parts, index_dir) == whole


def records_with_values(
    spec: SourceSpec, limit: int, parts: int, index_dir: Path | None
) -> list[tuple[Any, ...]]:
    """Return every record with its place, status, tokens and values, by place."""
    found = []
    for part in range(parts):
        loader = make_loader(spec, part, parts, index_dir, tokenizer_of(spec), FIELDS)
        while (draft := loader.next_chunk(limit)) is not None:
            tokens = np.concatenate([np.zeros(0, np.int64), *draft.payload])
            ends = np.cumsum(draft.meta.lengths)
            for number, end in enumerate(ends.tolist()):
                span = slice(end - int(draft.meta.lengths[number]), end)
                values = tuple(
                    tuple(array[span].tolist()) if rule.per == "token" else array[number].item()
                    for rule, array in zip(FIELDS, draft.values, strict=True)
                )
                place = (draft.meta.block_key, draft.meta.first_index + number)
                status = int(draft.meta.status[number])
                if status:
                    values = ()
                found.append((*place, status, tuple(tokens[span].tolist()), values))
    return sorted(found)
