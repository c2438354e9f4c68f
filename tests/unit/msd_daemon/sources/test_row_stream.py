"""Readers of row groups that are put away: every row is given once, a damage too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.chunk import RecordStatus
from msd_daemon.sources.row_stream import READERS_MAX, RowStream
from tests.support.sources import IN_ORDER, id_tokenizer, make_loader, make_spec, placed


class Group:
    """A row group of 5 rows whose 4th is damaged; counts how often it was opened."""

    def __init__(self, group_bytes: int = 100) -> None:
        self.opened: list[int] = []
        self._group_bytes = group_bytes

    def rows(self, first: int, end: Callable[[], None]) -> Iterator[str | int]:
        self.opened.append(first)
        yield self._group_bytes
        for row in range(first, 3):
            yield f"row {row}"
        end()
        yield "damage"


def test_a_stream_that_was_put_away_goes_on_and_meets_a_damage_once() -> None:
    for away in range(5):
        group = Group()
        stream = RowStream(group.rows)
        got = []
        for number, row in enumerate(stream):
            got.append(row)
            if number + 1 == away:
                stream.put_away()
        assert got == ["row 0", "row 1", "row 2", "damage"]
        assert group.opened == ([0, away] if 0 < away < 4 else [0])


def test_few_small_readers_stay_open_and_large_ones_all() -> None:
    groups = [Group() for _ in range(READERS_MAX + 2)]
    streams = [RowStream(group.rows) for group in groups]
    got = [[next(stream) for stream in streams] for _ in range(3)]
    assert got == [[f"row {row}"] * len(streams) for row in range(3)]
    assert all(group.opened == [0, 1, 2] for group in groups)
    large = [Group(1 << 30) for _ in range(READERS_MAX + 2)]
    held = [RowStream(group.rows) for group in large]
    for _ in range(3):
        assert [next(stream) for stream in held]
    assert all(group.opened == [0] for group in large)
    for stream in (*streams, *held):
        stream.close()
        assert list(stream) == []


@pytest.mark.parametrize("fields", [{}, {"tokens_field": "ids"}], ids=["text", "ids"])
def test_a_damage_is_counted_once_however_many_sources_take_turns(
    tmp_path: Path, fields: dict[str, str]
) -> None:
    """P2: what other sources of the worker do never changes a source's stream."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 1 << 20, (40, 30))
    table = pa.table(
        {"text": [str(row) for row in ids], "ids": pa.array(ids.tolist(), pa.list_(pa.int32()))}
    )
    loaders = []
    for number in range(READERS_MAX + 3):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(
            table, path, compression="none", use_dictionary=False, write_page_checksum=True
        )
        data = bytearray(path.read_bytes())
        for column in range(2):
            page = pq.ParquetFile(path).metadata.row_group(0).column(column)
            data[page.data_page_offset + page.total_compressed_size // 2] ^= 0xFF
        path.write_bytes(data)
        spec = make_spec([path], shuffle=IN_ORDER, max_epochs=1, **fields)
        loaders.append(make_loader(spec, tokenizer=id_tokenizer() if fields else None))
    found: list[list[int]] = [[] for _ in loaders]
    for _ in range(10):
        for statuses, loader in zip(found, loaders, strict=True):
            draft = loader.next_chunk(1)
            if draft is not None:
                statuses += [record.status for record in placed(draft)]
    assert found == [[int(RecordStatus.UNREADABLE)]] * len(loaders)
