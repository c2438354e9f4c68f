"""Items of a microbatch: exact fields, refusals, and what a job without media never imports."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import ChunkCorruptError
from msd_client.contract.media_fields import MediaField
from msd_daemon.gather.media_items import find_items
from msd_daemon.inline_media import InlineItem
from tests.support.media_rows import FIELDS, Cut, Sample, build, make_pool
from tests.support.microbatches import columns_of


def image(begin: int, first: int) -> tuple[int, InlineItem]:
    """Return an image of 2 x 4 patches that takes two placeholder tokens."""
    data = np.arange(first, first + 32, dtype=np.uint8).reshape(8, 4)
    return 0, InlineItem(begin, 2, (1, 2, 4), data)


FIRST = Sample([1, 900, 900, 2, 900, 900, 3], {1, 2, 4, 5}, [image(1, 0), image(4, 40)])
SECOND = Sample([4, 5, 902, 6], {2}, [(2, InlineItem(2, 1, (3, 1, 1), np.ones((3, 2), "f2")))])
TEXT = Sample([7, 8, 9])


def spec(**change: Any) -> BatchSpec:
    rule: dict[str, Any] = {
        "rows": 2,
        "row_tokens": 8,
        "row_segments_max": 4,
        "media": FIELDS,
        "positions": "mrope",
    }
    return BatchSpec.for_rule(**(rule | change))


def test_items_lie_by_row_and_column_with_places_of_the_whole_microbatch() -> None:
    cuts = [
        Cut(0, 0, 3, 4, 0, 0),  # its second image alone
        Cut(1, 1, 0, 4, 0, 4),
        Cut(2, 0, 0, 3, 1, 0),
        Cut(0, 0, 0, 3, 1, 3),
    ]
    (batch,) = build(spec(), [[FIRST], [TEXT, SECOND], [TEXT]], cuts, valid_tokens=5)
    assert batch.tokens.tolist() == [[2, 900, 900, 3, 4, 5, 902, 6], [7, 8, 9, 1, 900, 900, 0, 0]]
    assert batch.labels.tolist() == [
        [-100, -100, 3, -100, 5, -100, 6, -100],
        [8, 9, -100, -100, -100, -100, -100, -100],
    ]
    images = batch.media("image")
    assert images.patches.reshape(-1).tolist() == [*range(40, 72), *range(32)]
    assert images.grids.tolist() == [[1, 2, 4], [1, 2, 4]]
    assert images.cu_seqlens.tolist() == [0, 8, 16]
    assert images.places.tolist() == [1, 2, 12, 13]
    assert images.cu_places.tolist() == [0, 2, 4]
    assert images.segments.tolist() == [0, 3]
    assert images.max_seqlen == 8
    sounds = batch.media("audio")
    assert sounds.frames.shape == (3, 2)
    assert sounds.places.tolist() == [6]
    assert (sounds.segments.tolist(), sounds.max_seqlen) == ([1], 3)
    videos = batch.media("video")
    assert [array.shape for array in videos[:6]] == [(0, 3), (0, 3), (1,), (0,), (1,), (0,)]
    assert videos.cu_seqlens.tolist() == videos.cu_places.tolist() == [0]
    assert videos.max_seqlen == 0
    time, height, width = batch.mrope_position_ids.tolist()
    assert time == [[0, 1, 1, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 1, 0, 1]]
    assert height == time
    assert width == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 0, 1]]


def test_a_segment_never_cuts_through_an_item() -> None:
    for offset, length in ((0, 2), (2, 3), (5, 2)):
        with pytest.raises(ValueError, match="segment 0: it cuts through an item"):
            build(spec(), [[FIRST]], [Cut(0, 0, offset, length, 0, 0)])


def test_more_than_the_slot_has_room_for_is_refused() -> None:
    small = (MediaField("image", 4, "uint8", 7, 2), *FIELDS[1:])
    with pytest.raises(ValueError, match=r"image: 16 units and 2 items .* room for 14 and 14"):
        build(spec(media=small), [[FIRST]], [Cut(0, 0, 0, 7, 0, 0)])


def test_a_grid_that_is_not_the_placeholders_is_refused_where_positions_go_by_it() -> None:
    wrong = Sample([900, 1], {0}, [(0, InlineItem(0, 1, (1, 2, 4), np.zeros((8, 4), "u1")))])
    cuts = [Cut(0, 0, 0, 2, 0, 0)]
    with pytest.raises(
        ValueError, match=r"item 0 has 1 placeholder tokens and a grid of \[1, 2, 4"
    ):
        build(spec(), [[wrong]], cuts)
    (batch,) = build(spec(positions="plain"), [[wrong]], cuts)
    assert batch.media("image").places.tolist() == [0]


def test_chunks_of_other_media_and_wrong_numbers_are_refused() -> None:
    data, offsets = make_pool([[FIRST]])
    columns = columns_of([(offsets[0], 0, 0, 7, 0, 0, 0)])
    numbers = np.zeros(1, np.int32)
    with pytest.raises(ChunkCorruptError, match="media of 3 modalities, the job has 1"):
        find_items(memoryview(data), columns, FIELDS[:1], (2, 8), numbers)
    with pytest.raises(ValueError, match="segment numbers for 1 segments"):
        find_items(memoryview(data), columns, FIELDS, (2, 8), numbers[:0])
    with pytest.raises(ValueError, match="outside the pool"):
        find_items(
            memoryview(data),
            columns_of([(1 << 20, 0, 0, 7, 0, 0, 0)]),
            FIELDS,
            (2, 8),
            numbers,
        )


def test_an_empty_microbatch_has_empty_media() -> None:
    (batch,) = build(spec(), [[TEXT]], [])
    assert batch.media("image").patches.shape == (0, 4)
    assert batch.mrope_position_ids.tolist() == [[[*range(8)]] * 2] * 3
    assert batch.valid_tokens == 0


def test_constructors_of_plain_jobs_never_import_masks_and_media() -> None:
    code = """
    import sys
    from tests.support.microbatches import Document, build_batches
    from msd_client.contract.batch_spec import BatchSpec
    spec = BatchSpec.for_rule(rows=1, row_tokens=4, row_segments_max=2)
    print(build_batches(spec, [[Document([1, 2, 3])]], as_="numpy")[0].tokens.tolist())
    print([name for name in sys.modules if name.startswith("msd_daemon.gather.m")])
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": ":".join([os.getcwd(), *(p for p in sys.path if p)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[[1, 2, 3, 0]]\n[]\n", done.stderr
