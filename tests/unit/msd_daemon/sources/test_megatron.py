"""Megatron pairs: documents of many sequences, 64-bit offsets (H19), and pairs that lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import ShuffleRule
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.megatron import MegatronShard, check_megatron
from msd_daemon.sources.record import ReadMeter
from tests.support.sources import (
    DATA,
    IN_ORDER,
    id_tokenizer,
    make_loader,
    make_spec,
    needs_data,
    read_chunks,
    read_stream,
    statuses_of,
    write_megatron,
)

DOCUMENTS = [[[1, 2], [3]], [], [[4]], [[], []], [[5, 6, 7]]]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_documents_are_their_sequences_joined(tmp_path: Path, dtype: str) -> None:
    spec = make_spec([write_megatron(tmp_path / "a", DOCUMENTS, dtype)], shuffle=IN_ORDER)
    check_megatron(spec, spec.shards[0])
    records = read_stream(make_loader(spec))
    assert [record.tokens for record in records] == [(1, 2, 3), (), (4,), (), (5, 6, 7)]
    assert [record.status for record in records] == [0, 1, 0, 1, 0]
    assert read_chunks(make_loader(spec))[0].dtype == np.dtype(dtype)


def test_blocks_close_at_records_and_bytes(tmp_path: Path) -> None:
    lengths = [10, 10, 10, 50, 1, 1, 1, 1, 1]
    documents = [[[7] * length] for length in lengths]
    path = write_megatron(tmp_path / "a", documents, "<u2")
    rule = ShuffleRule(is_shuffled=False, block_bytes=50, block_records=3)
    spec = make_spec([path], shuffle=rule)
    opened = MegatronShard(spec.shards[0], ReadMeter())
    assert opened.block_starts(rule).tolist() == [0, 2, 3, 4, 7, 9]
    opened.close()


def test_offsets_beyond_4_gib_are_exact(tmp_path: Path) -> None:
    first, second, third = (1 << 31) + 5, 1 << 31, 4
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(2 * (first + second))
        file.seek(0, 2)
        file.write(np.array([11, 12, 13, 14], "<u2").tobytes())
    sizes = np.array([1 << 30, 1 << 30, 5, 1 << 30, 1 << 30, third], "<i4")
    pointers = 2 * np.cumsum([0, *sizes[:-1].astype(np.int64)])
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08"
    head += len(sizes).to_bytes(8, "little") + (4).to_bytes(8, "little")
    entries = np.array([0, 3, 5, 6], "<i8")
    columns = sizes.tobytes() + pointers.astype("<i8").tobytes() + entries.tobytes()
    path.with_suffix(".idx").write_bytes(head + columns)
    spec = make_spec([path], shuffle=IN_ORDER)
    loader = make_loader(spec)
    records = read_stream(loader)
    assert [record.status for record in records] == [
        RecordStatus.TOO_LARGE,
        RecordStatus.TOO_LARGE,
        RecordStatus.OK,
    ]
    assert records[2].tokens == (11, 12, 13, 14)
    assert loader.statistics().read_bytes < 1000
    drafts = read_chunks(make_loader(spec))
    assert any("document 0 at byte 0 is too large" in draft.meta.fault for draft in drafts)


@pytest.mark.parametrize(
    ("column", "place", "value"),
    [("pointer", 2, 1), ("pointer", 2, 10**12), ("size", 1, 9), ("entry", 2, 99)],
)
def test_a_document_out_of_place_is_unreadable_and_the_rest_is_read(
    tmp_path: Path, column: str, place: int, value: int
) -> None:
    path = write_megatron(tmp_path / "a", [[[n, n], [n]] for n in range(1, 6)])
    idx = path.with_suffix(".idx")
    data = bytearray(idx.read_bytes())
    sequences = 10
    starts = {
        "size": (34, 4),
        "pointer": (34 + 4 * sequences, 8),
        "entry": (34 + 12 * sequences, 8),
    }
    start, width = starts[column]
    data[start + place * width : start + (place + 1) * width] = value.to_bytes(width, "little")
    idx.write_bytes(data)
    spec = make_spec([path], shuffle=IN_ORDER)
    with pytest.raises(CorruptRecordError, match="out of place"):
        check_megatron(spec, spec.shards[0])
    counts = statuses_of(read_stream(make_loader(spec)))
    assert counts[RecordStatus.UNREADABLE] in {1, 2}
    assert sum(counts.values()) == 5


@pytest.mark.parametrize(("code", "reason"), [(6, "float64"), (7, "float32"), (99, "code 99")])
def test_other_token_types_are_refused_by_name(tmp_path: Path, code: int, reason: str) -> None:
    path = write_megatron(tmp_path / "a", DOCUMENTS)
    data = bytearray(path.with_suffix(".idx").read_bytes())
    data[17] = code
    path.with_suffix(".idx").write_bytes(data)
    spec = make_spec([path])
    with pytest.raises(CorruptRecordError, match=reason):
        check_megatron(spec, spec.shards[0])


@pytest.mark.parametrize(
    ("dtype", "given"),
    [("u1", "<u2"), ("i1", "<i4"), ("<i2", "<i4"), ("<i4", "<i4"), ("<i8", "<i4"), ("<u2", "<u2")],
)
def test_every_integer_type_gives_its_ids(tmp_path: Path, dtype: str, given: str) -> None:
    spec = make_spec([write_megatron(tmp_path / "a", DOCUMENTS, dtype)], shuffle=IN_ORDER)
    check_megatron(spec, spec.shards[0])
    drafts = read_chunks(make_loader(spec))
    assert [r.tokens for r in read_stream(make_loader(spec))] == [
        (1, 2, 3),
        (),
        (4,),
        (),
        (5, 6, 7),
    ]
    assert drafts[0].dtype == np.dtype(given)


@pytest.mark.parametrize(("dtype", "bad"), [("<i8", 1 << 31), ("<i8", -1), ("<i2", -5)])
def test_an_id_that_is_none_costs_its_document(tmp_path: Path, dtype: str, bad: int) -> None:
    path = write_megatron(tmp_path / "a", [[[1, 2]], [[3, bad], [4]], [[5]]], dtype)
    spec = make_spec([path], shuffle=IN_ORDER)
    records = read_stream(make_loader(spec))
    assert [r.tokens for r in records] == [(1, 2), (), (5,)]
    assert records[1].status == RecordStatus.UNREADABLE
    with pytest.raises(CorruptRecordError, match=r"document 1 .* an id outside 0 to 2147483647"):
        check_megatron(spec, spec.shards[0])


def test_a_multimodal_idx_is_read_where_all_of_it_is_text(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", DOCUMENTS)
    idx = path.with_suffix(".idx")
    plain = idx.read_bytes()
    sequences = int.from_bytes(plain[18:26], "little")
    idx.write_bytes(plain + bytes(sequences))
    assert len(read_stream(make_loader(make_spec([path])))) == 5
    idx.write_bytes(plain + bytes([0, 1, *[0] * (sequences - 2)]))
    spec = make_spec([path])
    with pytest.raises(CorruptRecordError, match="multimodal: sequence 1 is of mode 1"):
        check_megatron(spec, spec.shards[0])


@needs_data
def test_documents_of_many_sequences_are_one_record_each() -> None:
    spec = make_spec([DATA / "shards/megatron/bible_o200k_text_sentence.bin"], shuffle=IN_ORDER)
    check_megatron(spec, spec.shards[0])
    records = read_stream(make_loader(spec, tokenizer=id_tokenizer()))
    assert len(records) == 350
    assert sum(len(record.tokens) for record in records) == 378190
    opened = MegatronShard(spec.shards[0], ReadMeter())
    assert (opened.sequence_count, opened.document_count) == (10761, 350)
    opened.close()


def test_a_pair_without_documents_has_no_record(tmp_path: Path) -> None:
    assert read_stream(make_loader(make_spec([write_megatron(tmp_path / "a", [])]))) == []
