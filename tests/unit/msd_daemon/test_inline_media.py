"""Records with media in the stream of one process: kept whole, given in parts, read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from msd_daemon.inline_documents import ReadDocuments
from msd_daemon.inline_media import InlineItem, items_of_row
from msd_daemon.sources.chunk_draft import ChunkDraft
from tests.support.media_rows import RULES, Sample, make_draft


def image(begin: int, value: int) -> InlineItem:
    return InlineItem(begin, 1, (1, 2, 2), np.full((4, 4), value, np.uint8))


SAMPLES = [
    Sample([1, 2]),
    Sample([900, 3, 4, 900, 5], {0, 3}, [(0, image(0, 7)), (0, image(3, 8))]),
]


class Loader:
    """Gives one chunk, and any record of it again."""

    def __init__(self) -> None:
        self.drafts: list[ChunkDraft] = [make_draft(SAMPLES)]

    def next_chunk(self, payload_bytes_max: int) -> ChunkDraft | None:
        return self.drafts.pop() if self.drafts else None

    def fetch(self, block_key: int, indices: Sequence[int]) -> ChunkDraft:
        return make_draft([SAMPLES[index] for index in indices])

    def close(self) -> None:
        pass


def test_a_piece_has_the_items_inside_it_from_its_own_start() -> None:
    loader: Any = Loader()
    for is_read in (True, False):  # then as of a state, which has nothing but places
        documents = ReadDocuments(loader, ())
        if is_read:
            draft = loader.next_chunk(1)
            assert draft is not None
            documents.keep(draft)
        assert documents.piece(0, 0, 0, 2).items in ((), ((), (), ()))
        whole = documents.piece(0, 1, 0, 5)
        assert [item.begin for item in whole.items[0]] == [0, 3]
        part = documents.piece(0, 1, 1, 4)
        (item,) = part.items[0]
        assert (item.begin, item.data.tolist()) == (2, [[8] * 4] * 4)
        assert part.tokens.tolist() == SAMPLES[1].pool_ids[1:].tolist()
        assert documents.piece(0, 1, 1, 2).items == ((), (), ())


def test_items_of_a_row_name_their_segment_and_column() -> None:
    items = items_of_row(RULES, [0, 6], [(), ((image(1, 1),), (), ())])
    assert [(item.begin, item.segment) for item in items[0]] == [(7, 1)]
    assert items[1:] == ((), ())
