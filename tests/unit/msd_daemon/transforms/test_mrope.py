"""Positions of time, height and width, against the published loop."""

from __future__ import annotations

import numpy as np
import pytest

from msd_daemon.transforms.mrope import mrope_positions


def get_rope_index(length: int, items: list[tuple[int, ...]], merge: int) -> list[list[int]]:
    """Qwen2-VL's rule, token by token: text goes on at the largest position so far plus 1."""
    places: list[tuple[int, int, int]] = []
    at = 0
    for offset, tokens, _, t, h, w in items:
        while at < offset:
            start = max((max(place) for place in places), default=-1) + 1
            places.append((start, start, start))
            at += 1
        start = max((max(place) for place in places), default=-1) + 1
        for frame in range(t):
            for row in range(h // merge):
                columns = range(w // merge)
                places += [(start + frame, start + row, start + column) for column in columns]
        at += tokens
    while at < length:
        start = max((max(place) for place in places), default=-1) + 1
        places.append((start, start, start))
        at += 1
    return [list(axis) for axis in zip(*places, strict=True)] if places else [[], [], []]


def items_of(*items: tuple[int, int, int, int], merge: int) -> list[tuple[int, ...]]:
    """Return rows of (offset, t, h, w), h and w in patches."""
    return [(at, t * h * w // merge**2, t * h * w, t, h, w) for at, t, h, w in items]


def test_an_image_between_texts() -> None:
    items = items_of((3, 1, 4, 6), merge=2)
    found = mrope_positions(12, np.array(items, np.int32), 2)
    assert found.dtype == np.int32
    assert found.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]


def test_text_alone_counts_up() -> None:
    none = np.zeros((0, 6), np.int32)
    assert mrope_positions(5, none, 2).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert mrope_positions(0, none, 2).shape == (3, 0)


@pytest.mark.parametrize("seed", range(60))
def test_samples_equal_the_published_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    merge = int(rng.choice([1, 2, 3]))
    at, rows = 0, []
    for _ in range(int(rng.integers(0, 6))):
        at += int(rng.integers(0, 5))
        t, h, w = int(rng.integers(1, 9)), *(int(n) * merge for n in rng.integers(1, 7, 2))
        rows.append((at, t, h, w))
        at += t * h * w // merge**2
    length = at + int(rng.integers(0, 4))
    items = items_of(*rows, merge=merge)
    found = mrope_positions(length, np.array(items, np.int32).reshape(-1, 6), merge)
    assert found.tolist() == get_rope_index(length, items, merge)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([(0, 5, 24, 1, 4, 6)], "not their grids"),
        ([(0, 6, 15, 1, 3, 5)], "not their grids"),
        ([(0, 6, 24, 1, 4, 6), (5, 6, 24, 1, 4, 6)], "overlap"),
        ([(8, 6, 24, 1, 4, 6)], "end behind the 12 tokens"),
        ([(-1, 6, 24, 1, 4, 6)], "overlap"),
    ],
)
def test_items_that_do_not_fit_are_refused(items: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mrope_positions(12, np.array(items, np.int32), 2)
