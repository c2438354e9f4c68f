"""Best fit with caps on units of media."""

import numpy as np
import pytest

from federation.model.job import BatchRule
from federation.planning.best_fit import best_fit_rows
from federation.planning.packing import pack
from federation.planning.step_pool import LENGTH, Need, Pool, draw_need


def rows_of(sizes, units, rows, tokens, units_max, segments_max=64, carried=0):
    units = np.array(units).reshape(len(units_max), -1)
    return best_fit_rows(
        np.array(sizes), carried, rows, tokens, segments_max, None, units, units_max
    ).tolist()


def test_units_are_a_second_cap() -> None:
    # By tokens alone all three fit into the first row.
    assert rows_of([3, 3, 3], [6, 6, 0], 2, 10, (10,)) == [0, 1, 0]
    assert rows_of([3, 3, 3], [6, 6, 6], 2, 10, (10,)) == [0, 1, -1]


def test_a_fragment_with_units_goes_where_least_units_are_left() -> None:
    # Row 0 has 2 tokens and 7 units left, row 1 has 5 and 4: the fourth takes 4 units of row 1.
    assert rows_of([8, 5, 1, 1], [3, 6, 0, 4], 2, 10, (10,)) == [0, 1, 0, 1]


def test_the_scarcest_modality_decides() -> None:
    # Of the third 1/10 of the image units and 1/2 of the audio units: audio says row 1.
    units = [[9, 0, 1], [0, 4, 4]]
    assert rows_of([1, 5, 1], units, 2, 10, (10, 8)) == [0, 0, 0]
    units = [[9, 2, 1], [0, 4, 4]]
    assert rows_of([1, 5, 1], units, 2, 10, (10, 8)) == [0, 1, 1]


def test_ties_go_to_the_lowest_row() -> None:
    assert rows_of([1] * 4, [10, 10, 10, 1], 4, 10, (10,)) == [0, 1, 2, 3]
    assert rows_of([4, 4, 4], [2, 2, 0], 2, 10, (2,)) == [0, 1, 0]


def test_a_row_with_all_its_segments_is_closed() -> None:
    assert rows_of([1, 1, 1], [1, 1, 1], 2, 10, (10,), 2) == [0, 0, 1]
    assert rows_of([1, 1, 1], [1, 0, 1], 1, 10, (10,), 2) == [0, 0, -1]


def test_without_units_rows_are_those_of_tokens() -> None:
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 60, 200)
    for carried in (0, 70):
        plain = best_fit_rows(sizes, carried, 16, 100, 8).tolist()
        assert rows_of(sizes, np.zeros(200, np.int64), 16, 100, (10,), 8, carried) == plain
        # A cap that nothing reaches changes nothing either, but for the way it is worked out.
        wide = rows_of(sizes, np.zeros((2, 200), np.int64), 16, 100, (10, 10), 8, carried)
        assert wide == plain


def check_any_fit(sizes, units, found, rows, tokens, units_max, segments_max):
    free = np.tile(np.array([[tokens], *[[most] for most in units_max]]), (1, rows))
    room = [segments_max] * rows
    for size, taken, row in zip(sizes, units.T, found, strict=True):
        need = np.array([size, *taken])[:, None]
        fits = (free >= need).all(axis=0) & (np.array(room) > 0)
        assert fits.any() == (row >= 0)
        if row >= 0:
            assert fits[row]
            free[:, row] -= need[:, 0]
            room[row] -= 1


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_is_placed_and_caps_hold(seed) -> None:
    rng = np.random.default_rng(seed)
    units_max = tuple(rng.integers(1, 40, rng.integers(1, 4)).tolist())
    count, rows = int(rng.integers(1, 200)), int(rng.integers(1, 20))
    sizes = rng.integers(1, 51, count)
    units = np.array([rng.integers(0, most + 1, count) for most in units_max])
    units *= rng.random(units.shape) < 0.5
    for segments_max in (3, 64):
        found = rows_of(sizes, units, rows, 50, units_max, segments_max)
        check_any_fit(sizes, units, found, rows, 50, units_max, segments_max)


def media_pool(lengths, units, step=5, carried=0, documents=None, offsets=None, trained=None):
    pool = np.zeros((8, len(lengths)), np.int64)
    pool[2] = np.arange(len(lengths)) if documents is None else documents
    pool[3] = 0 if offsets is None else offsets
    pool[4] = lengths
    pool[5] = step
    pool[5, :carried] = step - 1
    pool[6] = 2 * pool[4] + 1 if trained is None else trained
    pool[7] = units
    return pool


def test_larger_parts_of_a_row_are_placed_first() -> None:
    # By length the texts came first; the image takes all units of a row and a tenth of its tokens.
    pool = media_pool([5, 1, 9], [0, 10, 0])
    packed = pack(Pool(pool, 0, is_last=True, units_max=(10,)), BatchRule(3, 10))
    assert packed.row.tolist() == [0, 0, 1]
    assert packed.segments[LENGTH].tolist() == [1, 9, 5]
    assert packed.extras.tolist() == [[3, 19, 11], [10, 0, 0]]


def test_a_later_part_waits_for_an_earlier_one_of_its_sample() -> None:
    # Parts of 4, 9 and 3 tokens of one document: the first is tried before the larger second.
    rule = BatchRule(1, 10)
    parts = media_pool([4, 9, 3, 6], 0, documents=[7, 7, 7, 8], offsets=[0, 4, 13, 0])
    packed = pack(Pool(parts, 0, units_max=(10,)), rule)
    assert [tuple(part) for part in packed.segments[2:5].T.tolist()] == [(7, 0, 4), (8, 0, 6)]
    assert packed.carried_in[4].tolist() == [9, 3]
    # Where the record's samples are told apart, they wait for nothing of each other.
    samples = np.insert(parts, 6, [1, 1, 1, 1], axis=0)
    packed = pack(Pool(samples, 0, units_max=(10,), has_begins=True), rule)
    assert [tuple(part) for part in packed.segments[2:5].T.tolist()] == [(7, 4, 9)]


def test_needs_count_units() -> None:
    carried = media_pool([10, 2], [3, 4])
    rule = BatchRule(4, 64)
    need = draw_need(rule, carried, None, (100,))
    assert need == Need(256 + 8 - 12, 4 * 64 - 2, None, (400 + 12 - 7,))
    assert not need.is_met
    assert need.after(media_pool([1], [405]), 1).is_met
    assert not need.after(media_pool([1], [404]), 1).is_met
    padded = BatchRule(4, 64, packing="padded")
    assert draw_need(padded, carried, None, (100,)) == Need(256, 2)


def vision_steps(share, steps=40, rows=64, tokens=8192, most=16384):
    """Yield (pool, carried, packed) of steps of texts and of samples with images."""
    rng = np.random.default_rng(3)
    count = 60_000
    is_image = rng.random(count) < share
    units = rng.choice([256, 576, 1024, 1600, 2304, 3136, 4096], count) * rng.integers(1, 4, count)
    units = units * is_image
    texts = np.minimum(tokens, (rng.lognormal(6.3, 1.2, count) + 1).astype(np.int64))
    lengths = np.where(is_image, units // 4 + rng.integers(20, 400, count), texts)
    rule = BatchRule(rows, tokens)
    carried = np.zeros((8, 0), np.int64)
    place = 0
    for step in range(steps):
        need = draw_need(rule, carried, None, (most,))
        ends = [
            int(np.searchsorted(np.cumsum(column[place:]), wanted)) + 1
            for column, wanted in ((lengths, need.places), (units, need.units[0]))
        ]
        stop = place + (0 if need.is_met else min(ends))
        drawn = media_pool(lengths[place:stop], units[place:stop], step)
        drawn[2] += place
        place = stop
        pool = np.concatenate((carried, drawn), axis=1)
        packed = pack(Pool(pool, carried.shape[1], units_max=(most,)), rule)
        keep = np.ones(carried.shape[1], bool)
        keep[packed.carried_out] = False
        carried = np.concatenate((carried[:, keep], packed.carried_in), axis=1)
        yield carried, packed, step


@pytest.mark.parametrize(
    ("share", "tokens_fill", "units_fill"),
    [(0.1, 0.99, 0.15), (0.45, 0.99, 0.7), (0.6, 0.89, 0.89), (0.9, 0.6, 0.97)],
)
def test_rows_of_text_and_images_fill_well(share, tokens_fill, units_fill) -> None:
    placed, held, count = 0, 0, 0
    for carried, packed, step in vision_steps(share):
        assert len(packed.row_starts) == 64
        row_units = np.add.reduceat(packed.extras[1], packed.row_starts)
        assert int(row_units.max()) <= 16384
        placed += int(packed.segments[LENGTH].sum())
        held += int(row_units.sum())
        count += 1
        if carried.shape[1]:
            assert step + 1 - int(carried[5].min()) <= 2
    assert placed / (count * 64 * 8192) >= tokens_fill
    assert held / (count * 64 * 16384) >= units_fill
