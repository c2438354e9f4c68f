"""Records that are not touched, windows that are handled one by one, and what is marked meanwhile."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import TokenizerSpec
from federation.model.recipe import SampleRecipe
from msd_client.contract.errors import TransformError
from msd_daemon.shm.mark_page import PAGE_BYTES, InFlight, MarkPage, MarkState
from msd_daemon.sources import block_cursor
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.sources.record_guard import SUSPECTS_MAX, SourceGuard, outside
from msd_daemon.transforms.tokenizer import BytesTokenizer
from tests.support.sources import make_spec

QUARANTINED = int(RecordStatus.QUARANTINED)


class Watching(BytesTokenizer):
    """Notes what is marked while texts are tokenized."""

    def __init__(self, page: MarkPage) -> None:
        super().__init__(TokenizerSpec("bytes"))
        self.page = page
        self.seen: list[tuple[Any, ...]] = []

    def encode_batch(self, texts: Any) -> Any:
        mark = self.page.mark()
        assert mark is not None
        self.seen.append((mark.state, mark.shard, mark.epoch, mark.first_place, mark.last_place))
        return super().encode_batch(texts)


@pytest.fixture(autouse=True)
def whole_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first records of a source encoded at once, as later ones that are fast."""
    monkeypatch.setattr(block_cursor, "FIRST_RECORDS", 8)


@pytest.fixture
def page() -> Iterator[MarkPage]:
    made = MarkPage()
    yield made
    made.close()


def open_loader(tmp_path: Path, page: MarkPage, recipe: SampleRecipe | None) -> tuple[Any, ...]:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(8)))
    spec = make_spec([path], recipe=recipe, max_epochs=2)
    tokenizer = Watching(page)
    view = mmap.mmap(page.fd, PAGE_BYTES)
    guard = SourceGuard(0, InFlight(view), {str(path): 3})
    return SourceLoader(spec, 0, tokenizer, 1, 0, 1, None, guard=guard), tokenizer, guard


def read(loader: SourceLoader) -> tuple[list[int], list[int], list[tuple[int, str]]]:
    """Return tokens, statuses, and (place, text) of the bad ones, of a block."""
    draft = loader.next_chunk(1 << 20)
    assert draft is not None
    tokens = [int(token) for part in draft.payload for token in part]
    return tokens, draft.meta.status.tolist(), [(bad.place, bad.text) for _, bad in draft.bad]


PLACES = [14 * number for number in range(8)]


@pytest.mark.parametrize("recipe", [None, SampleRecipe(where="text != 'x'")])
def test_a_window_is_marked_while_it_is_tokenized(tmp_path, page, recipe):
    loader, tokenizer, _ = open_loader(tmp_path, page, recipe)
    for epoch in range(2):
        read(loader)
        assert tokenizer.seen == [(MarkState.WINDOW, 3, epoch, 0, PLACES[-1])]
        tokenizer.seen.clear()
    assert page.mark() is None
    loader.close()


@pytest.mark.parametrize("recipe", [None, SampleRecipe(where="text != 'x'")])
def test_a_quarantined_record_keeps_its_place_and_is_named(tmp_path, page, recipe):
    plain, _, _ = open_loader(tmp_path, page, recipe)
    tokens, _, _ = read(plain)
    loader, _, guard = open_loader(tmp_path, page, recipe)
    order = {"source": 0, "records": [[3, PLACES[5], 0, "it hung"], [2, PLACES[4], 0, "other"]]}
    guard.learn(order | {"suspects": []})
    found, statuses, bad = read(loader)
    assert found == [token for token in tokens if token != ord("5")]
    at = tokens.index(ord("5"))
    assert statuses == [QUARANTINED if number == at else 0 for number in range(8)]
    text = f"{tmp_path / 'a.jsonl'}: record at byte offset {PLACES[5]}: it hung"
    assert bad == [(PLACES[5], text)]


def test_an_entry_holds_from_its_epoch_on_and_reaches_open_readers(tmp_path, page):
    loader, _, guard = open_loader(tmp_path, page, None)
    guard.learn({"source": 0, "records": [[3, PLACES[5], 1, "later"]], "suspects": []})
    assert read(loader)[2] == []
    assert [place for place, _ in read(loader)[2]] == [PLACES[5]]


@pytest.mark.parametrize("recipe", [None, SampleRecipe(where="text != 'x'")])
def test_a_suspect_window_is_handled_record_by_record_with_the_same_result(tmp_path, page, recipe):
    plain, _, _ = open_loader(tmp_path, page, recipe)
    wanted = read(plain)
    loader, tokenizer, guard = open_loader(tmp_path, page, recipe)
    guard.learn({"source": 0, "records": [], "suspects": [[3, PLACES[2], PLACES[3]]]})
    assert read(loader) == wanted
    assert {seen[0] for seen in tokenizer.seen} == {MarkState.RECORD}
    assert sorted(seen[3] for seen in tokenizer.seen) == PLACES
    assert all(seen[3] == seen[4] for seen in tokenizer.seen)
    # Of another shard: nothing is changed.
    loader, tokenizer, guard = open_loader(tmp_path, page, recipe)
    guard.learn({"source": 0, "records": [], "suspects": [[2, 0, 1 << 60]]})
    assert read(loader) == wanted
    assert [seen[0] for seen in tokenizer.seen] == [MarkState.WINDOW]


@pytest.mark.parametrize("recipe", [None, SampleRecipe(where="text != 'x'")])
def test_what_killed_another_worker_is_heard_of_in_the_middle_of_a_chunk(tmp_path, page, recipe):
    loader, tokenizer, guard = open_loader(tmp_path, page, recipe)
    heard = []

    def hear() -> None:
        heard.append(len(tokenizer.seen))
        order = {"source": 0, "records": [[3, PLACES[5], 0, "it hung"]], "suspects": []}
        guard.learn(order)

    guard.hear = hear
    read(loader)
    assert heard == []  # nothing was told
    page.tell()
    _, _, bad = read(loader)
    assert [place for place, _ in bad] == [PLACES[5]]
    assert len(heard) == 1  # once for each word


def test_suspects_are_bounded():
    guard = SourceGuard()
    for number in range(SUSPECTS_MAX + 3):
        guard.learn({"source": 0, "records": [], "suspects": [[0, number, number]]})
    assert len(guard.suspects) == SUSPECTS_MAX
    assert guard.suspects[0].first_place == 3


def test_the_users_code_is_away(page):
    with mmap.mmap(page.fd, PAGE_BYTES) as view:
        in_flight = InFlight(view)
        seen = []

        def call(*arguments: object) -> object:
            mark = page.mark()
            assert mark is not None
            seen.append(mark.state)
            if arguments == ("raise",):
                raise TransformError("no")
            return arguments

        guarded = outside(in_flight, call)
        in_flight.begin(0, 0, 0, 1, 1)
        assert guarded(1, 2) == (1, 2)
        with pytest.raises(TransformError):
            guarded("raise")
        assert seen == [MarkState.AWAY] * 2
        mark = page.mark()
        assert mark is not None
        assert (mark.state, mark.sequence) == (MarkState.RECORD, 3)
