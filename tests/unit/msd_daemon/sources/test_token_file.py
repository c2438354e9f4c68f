"""Files of ids without an index: raw ones, ones with a header, documents found by their end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federation.model.chunk import RecordStatus
from federation.model.recipe import TokenFileRule
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.token_file import TokenFile
from tests.support.records import fields_of, read_rows, shard_of, small_blocks, spec_of
from tests.support.sources import DATA, needs_data

EOT = 50256


def headed(magic: int, ids: np.ndarray, count: int | None = None) -> bytes:
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, len(ids) if count is None else count
    return head.tobytes() + ids.tobytes()


def read(path: Path, rule: TokenFileRule, records: int = 4096, width: int = 2) -> list[RawRecord]:
    spec = spec_of("token_file", token_bytes=width, shuffle=small_blocks(records))
    opened = TokenFile(spec, ReadMeter(), rule)
    shard = shard_of(path)
    blocks = range(opened.measure(shard)[0])
    return [record for block in blocks for record in opened.records(shard, block)]


def tokens(records: list[RawRecord]) -> list[list[int]]:
    return [row["tokens"].tolist() for row in fields_of(records)]


@needs_data
def test_a_file_of_nano_gpt() -> None:
    path = DATA / "shards" / "nanogpt" / "train.bin"
    found = read_rows("token_file", path, token_bytes=2)
    ids = np.fromfile(path, "<u2")
    assert len(ids) == 338025
    assert np.concatenate([row["tokens"] for row in fields_of(found)]).tolist() == ids.tolist()
    assert len(found) == -(-338025 // 2048)
    assert [record.place for record in found] == list(range(0, 338025, 2048))


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
def test_headers_say_which_ids_follow(tmp_path: Path, magic: int, dtype: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(headed(magic, np.arange(25, dtype=dtype)))
    found = read(path, TokenFileRule(10), records=1, width=2)
    assert tokens(found) == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert [record.fields_bytes for record in found] == [40, 40, 20]
    path.write_bytes(headed(magic, np.arange(25, dtype=dtype), 26))
    with pytest.raises(CorruptRecordError, match="26 tokens need"):
        read(path, TokenFileRule(10))


def test_documents_end_behind_their_last_id(tmp_path: Path) -> None:
    ids = [1, 2, EOT, EOT, 3, 4, 5, 6, 7, EOT, 8]
    path = tmp_path / "a.bin"
    path.write_bytes(np.array(ids, "<u2").tobytes())
    rule = TokenFileRule(4, EOT)
    found = read(path, rule)
    assert tokens(found) == [[1, 2, EOT], [EOT], [3, 4, 5, 6], [7, EOT], [8]]
    assert [record.place for record in found] == [0, 3, 4, 8, 10]
    assert tokens(read(path, rule, records=1)) == [[1, 2, EOT], [EOT], [3, 4, 5, 6], [7, EOT], [8]]


@needs_data
def test_documents_of_a_corpus() -> None:
    path = DATA / "shards" / "megatron" / "shakespeare_r50k_text_document.bin"
    found = read(path, TokenFileRule(2048, EOT))
    ids = np.fromfile(path, "<u2")
    assert np.concatenate([row["tokens"] for row in fields_of(found)]).tolist() == ids.tolist()
    ends = sum(row["tokens"][-1] == EOT for row in fields_of(found))
    assert ends == int((ids == EOT).sum()) == 7222


def test_files_that_are_cut_or_hold_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    with pytest.raises(CorruptRecordError, match="no multiple of 2 a token: write token_bytes"):
        read(path, TokenFileRule(2))
    path.write_bytes(np.array([7, 8], "<u2").tobytes())
    assert tokens(read(path, TokenFileRule(2, id_bytes=2), width=4)) == [[7, 8]]
    path.write_bytes(np.array([1, 2, 3, 1 << 31], "<u4").tobytes())
    found = read(path, TokenFileRule(2), width=4)
    assert tokens(found) == [[1, 2]]
    assert found[-1].status == RecordStatus.UNREADABLE
    assert "beyond 2147483647 at token 3" in found[-1].fault
    assert found[-1].place == 2
    path.write_bytes(b"")
    assert read(path, TokenFileRule(2)) == []
