"""Blocks that are fetched before they are needed: several requests at once, the same records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from federation.model.job import Shard
from msd_daemon.sources import fetch_ahead
from msd_daemon.sources.fetch_ahead import BlockExtent, FetchAhead
from msd_daemon.stores.options import StoreOptions, configure_stores, configured_options
from tests.support.faulty_proxy import Answer, Seen, running_server, serve_objects
from tests.support.sources import json_lines, make_loader, make_spec

SHARDS = 8
OBJECTS = {
    f"a-{number}.jsonl": json_lines([f"{number} {line} " + "x" * 90 for line in range(20)])
    for number in range(SHARDS)
}
BLOCK_BYTES = 4096
assert all(len(content) < BLOCK_BYTES for content in OBJECTS.values())


class Crowd:
    """Serves objects; a request waits a little for another one to come."""

    def __init__(self) -> None:
        self._serve = serve_objects(OBJECTS)
        self._came = threading.Condition()
        self._in_flight = 0
        self.most = 0

    def __call__(self, seen: Seen) -> Answer:
        with self._came:
            self._in_flight += 1
            self.most = max(self.most, self._in_flight)
            self._came.notify_all()
            self._came.wait_for(lambda: self._in_flight > 1, 0.05)
        answer = self._serve(seen)
        with self._came:
            self._in_flight -= 1
        return answer


@pytest.fixture
def fresh_stores(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Stores whose blocks are not in memory yet, however often: other options, another pool."""
    before = configured_options()
    yield lambda turn: configure_stores(
        StoreOptions(
            block_bytes=BLOCK_BYTES,
            request_bytes_max=BLOCK_BYTES,
            shared_dir=str(tmp_path / f"shared-{turn}"),
        )
    )
    configure_stores(before)


def test_an_object_store_is_asked_for_several_blocks_at_once_and_gives_the_same(
    fresh_stores: Callable[[int], None],
) -> None:
    found, most = [], []
    for blocks in (0, 4):
        fresh_stores(blocks)
        crowd = Crowd()
        with running_server(crowd) as server:
            loader = make_loader(make_spec([f"{server.url}/{name}" for name in sorted(OBJECTS)]))
            crowd.most = 0
            loader.fetch_ahead(blocks)
            records = []
            for _ in range(SHARDS):
                draft = loader.next_chunk(1 << 20)
                assert draft is not None
                records.append((draft.meta.block_key, [part.tobytes() for part in draft.payload]))
            loader.close()
        found.append(records)
        most.append(crowd.most)
    assert found[0] == found[1]
    assert most[0] == 1
    assert most[1] >= 2


def test_files_are_advised_of_what_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(fetch_ahead, "_advise_file", lambda *extent: asked.append(extent))
    shards = [Shard(f"/{number}", 1000, "") for number in range(3)]
    ahead = FetchAhead(shards, 2)
    wished = [BlockExtent(1, 0, 4), BlockExtent(2, 3, 4)]
    ahead.wish(wished)
    ahead.wish(wished)
    assert asked == [("/1", 0, 250), ("/2", 750, 1000)]


def test_what_cannot_be_opened_is_left_to_the_reader(tmp_path: Path) -> None:
    FetchAhead([Shard(str(tmp_path / "gone"), 100, "")], 1).wish([BlockExtent(0, 0, 1)])


def test_a_local_source_reads_the_same_with_blocks_ahead(tmp_path: Path) -> None:
    paths = []
    for name, content in OBJECTS.items():
        (tmp_path / name).write_bytes(content)
        paths.append(tmp_path / name)
    found = []
    for blocks in (0, 3):
        loader = make_loader(make_spec(paths, max_epochs=2))
        loader.fetch_ahead(blocks)
        keys = []
        while (draft := loader.next_chunk(1 << 20)) is not None:
            keys.append((draft.meta.block_key, draft.meta.first_index, len(draft.meta.lengths)))
        loader.close()
        found.append(keys)
    assert found[0] == found[1]
    assert len(found[0]) == 2 * SHARDS


def test_a_loader_begins_no_block_behind_where_it_is_to_stop(tmp_path: Path) -> None:
    for name, content in OBJECTS.items():
        (tmp_path / name).write_bytes(content)
    spec = make_spec([tmp_path / name for name in OBJECTS], max_epochs=2)

    def keys_of(part: int, parts: int, begin: int, until: int | None) -> list[int]:
        loader = make_loader(spec, part, parts)
        if until is not None:
            loader.stop_before(until)
        loader.seek(begin, 0)
        keys = []
        while (draft := loader.next_chunk(1 << 20)) is not None:
            keys.append(draft.meta.block_key)
        assert loader.next_chunk(1 << 20) is None
        loader.close()
        return keys

    whole = keys_of(0, 1, 0, None)
    for watermark in (whole[5], whole[8], whole[11]):
        before = [key for part in (0, 1) for key in keys_of(part, 2, 0, watermark)]
        behind = [key for part in (0, 1, 2) for key in keys_of(part, 3, watermark, None)]
        assert sorted(before) + sorted(behind) == whole
