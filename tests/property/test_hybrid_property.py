"""Media encoded anywhere: each once, under the caps, and every embedding comes to its placeholder."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.planning.hybrid import GAIN_DIVISOR, NO_MEDIA, deal_media, place_media
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_daemon.core.encoding import StepEncoding
from msd_daemon.gather.encode_columns import EncodeColumns
from msd_daemon.gather.segment_columns import SegmentColumns
from tests.support.media_rows import (
    FIELDS,
    RULES,
    Cut,
    Sample,
    build,
    make_sample,
    place_cuts,
    segments_of,
)

ROWS, ROW_TOKENS = 2, 32
MEDIA = tuple(replace(field, row_units_max=5 * ROW_TOKENS) for field in FIELDS)
Ints = npt.NDArray[np.int64]

ITEMS = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90), st.integers(0, 6)), max_size=60)


def loads_of(costs: Ints, groups: Ints, count: int) -> Ints:
    found = np.zeros(count, np.int64)
    np.add.at(found, groups, costs)
    return found


@given(items=ITEMS, dp_count=st.integers(7, 9), slack=st.integers(0, 60))
def test_a_deal_keeps_the_cap_and_is_never_worse_than_home(
    items: list[tuple[int, int, int]], dp_count: int, slack: int
) -> None:
    costs, units, home = np.array(items, np.int64).reshape(-1, 3).T
    cap = int(loads_of(units, home, dp_count).max()) + slack
    found = deal_media(costs, units, home, dp_count, cap)
    assert found.shape == home.shape
    assert int(loads_of(units, found, dp_count).max()) <= cap
    at_home = int(loads_of(costs, home, dp_count).max())
    most = int(loads_of(costs, found, dp_count).max())
    assert most <= at_home
    if (found != home).any():
        assert at_home * GAIN_DIVISOR > most * (GAIN_DIVISOR + 1)
    assert np.array_equal(found, deal_media(costs, units, home, dp_count, cap))


@given(items=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 6)), max_size=60))
def test_a_deal_without_a_cap_is_within_the_bound_of_list_scheduling(
    items: list[tuple[int, int]],
) -> None:
    """Graham 1969: at most mean + (1 - 1/m) largest, and the gates on top."""
    costs, home = np.array(items, np.int64).reshape(-1, 2).T
    count = 7
    found = deal_media(costs, costs, home, count, 1 << 40)
    bound = costs.sum() / count + (1 - 1 / count) * costs.max(initial=0)
    gates = (1 + 1 / 64) * (1 + 1 / 128) ** 2
    assert loads_of(costs, found, count).max(initial=0) <= bound * gates + 1


def test_equal_media_move_no_further_than_they_must() -> None:
    home = np.array([0] * 6 + [1] * 2 + [2] * 4 + [3] * 4)
    costs = np.full(16, 256)
    found = deal_media(costs, costs, home, 4, 1 << 20)
    assert loads_of(costs, found, 4).tolist() == [1024] * 4
    assert int((found != home).sum()) == 2


def test_a_single_huge_item_bounds_the_rest() -> None:
    costs = np.array([5000, 100, 100, 100, 100, 100])
    home = np.array([0, 0, 0, 0, 1, 1])
    found = deal_media(costs, costs, home, 3, 6000)
    assert loads_of(costs, found, 3).max() == 5000
    assert found[0] == 0


@given(
    seed=st.integers(0, 1 << 30),
    dp_count=st.integers(1, 6),
    microbatches=st.integers(1, 3),
    modalities=st.integers(1, 3),
)
def test_every_holder_of_media_is_given_one_group(
    seed: int, dp_count: int, microbatches: int, modalities: int
) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 80))
    units = rng.integers(0, 50, (modalities, count)) * rng.integers(0, 2, (modalities, count))
    home, microbatch = rng.integers(0, dp_count, count), rng.integers(0, microbatches, count)
    cells = home * microbatches + microbatch
    caps = tuple(int(loads_of(own, cells, dp_count * microbatches).max(initial=0)) for own in units)
    found = place_media(units, units, home, microbatch, dp_count, caps)
    assert np.array_equal(found == NO_MEDIA, units == 0)
    assert int(found.max(initial=0)) < dp_count
    for own, groups, cap in zip(units, found, caps, strict=True):
        is_held = own > 0
        held = loads_of(
            own[is_held], (groups * microbatches + microbatch)[is_held], dp_count * microbatches
        )
        assert int(held.max(initial=0)) <= cap


# ---- from placed segments to slots of all groups, and embeddings home ----


def spec_of(dp_count: int, cp_count: int = 1) -> BatchSpec:
    return BatchSpec.for_rule(
        rows=ROWS,
        row_tokens=ROW_TOKENS,
        row_segments_max=16,
        media=MEDIA,
        positions="mrope",
        segment_multiple=2 * cp_count,
        cp_count=cp_count,
        cp_layout="zigzag_document",
        encode_dp_count=dp_count,
    )


class Cells:
    """The microbatches of all groups at one index, and the pool that they are built from."""

    def __init__(self, seed: int, dp_count: int, cp_count: int, *, is_random: bool) -> None:
        rng = random.Random(seed)
        self.dp_count = dp_count
        self.spec, self.plain = spec_of(dp_count, cp_count), spec_of(0, cp_count)
        self.chunks: list[list[Sample]] = []
        self.cuts: list[list[Cut]] = []
        for group in range(dp_count):
            has_media = rng.random() < 0.8
            samples = [
                make_sample(rng, rng.randint(1, 20), has_media=has_media)
                for _ in range(rng.randint(1, 6))
            ]
            self.chunks.append(samples)
            placed = place_cuts(rng, [samples], self.spec)
            self.cuts.append([replace(cut, chunk=group) for cut in placed])
        self.encode_dp = self._encode_dp(rng, is_random=is_random)

    @property
    def all_cuts(self) -> list[Cut]:
        return [cut for cuts in self.cuts for cut in cuts]

    @property
    def home(self) -> Ints:
        return np.repeat(np.arange(self.dp_count), [len(cuts) for cuts in self.cuts])

    def units(self) -> Ints:
        found = np.zeros((len(RULES), len(self.all_cuts)), np.int64)
        for number, cut in enumerate(self.all_cuts):
            for kind, item in self.chunks[cut.chunk][cut.sample].items:
                if cut.offset <= item.begin < cut.offset + cut.length:
                    found[kind, number] += len(item.data)
        return found

    def _encode_dp(self, rng: random.Random, *, is_random: bool) -> Ints:
        units = self.units()
        caps = tuple(ROWS * field.row_units_max for field in MEDIA)
        zeros = np.zeros(units.shape[1], np.int64)
        found = place_media(units, units, self.home, zeros, self.dp_count, caps)
        if is_random:
            for kind, cap in enumerate(caps):
                anywhere = np.array([rng.randrange(self.dp_count) for _ in zeros], np.int64)
                if loads_of(units[kind], anywhere, self.dp_count).max(initial=0) <= cap:
                    found[kind] = np.where(units[kind] > 0, anywhere, NO_MEDIA)
        return found

    def encodings(self) -> list[EncodeColumns]:
        """Return what each group's task says, over the wire."""
        cuts = self.all_cuts
        plan: Any = SimpleNamespace(
            encode_dp=self.encode_dp.astype(np.int32),
            dp_count=self.dp_count,
            microbatch_count=1,
            row=np.arange(len(cuts), dtype=np.int32),
            row_dp=self.home.astype(np.int32),
            row_microbatch=np.zeros(len(cuts), np.int32),
        )
        columns: SegmentColumns = segments_of(self.chunks, cuts)
        order = np.arange(len(cuts))
        encoding = StepEncoding.of(plan, columns, order, ROWS)
        assert encoding is not None
        ends = np.cumsum([0, *(len(own) for own in self.cuts)]).tolist()
        return [
            EncodeColumns.decode(
                b"x" * 7 + encoding.encode_cell(group, ends[group], ends[group + 1]),
                ends[group + 1] - ends[group],
                len(RULES),
                7,
            )
            for group in range(self.dp_count)
        ]

    def batches(self) -> list[list[Batch]]:
        """Return the batches of each group, one a context-parallel rank."""
        return [
            build(self.spec, self.chunks, cuts, encoding=encoding)
            for cuts, encoding in zip(self.cuts, self.encodings(), strict=True)
        ]


def marks_of(units: Any, cu_seqlens: Any, cu_tokens: Any) -> list[tuple[bytes, int]]:
    """Return an embedding for each placeholder token: its item's bytes, and its number in it."""
    found = []
    for item in range(len(cu_seqlens) - 1):
        content = np.asarray(units)[cu_seqlens[item] : cu_seqlens[item + 1]].tobytes()
        tokens = int(cu_tokens[item + 1] - cu_tokens[item])
        found += [(content, token) for token in range(tokens)]
    return found


def exchanged(batches: list[Batch], modality: Any) -> list[list[tuple[bytes, int]]]:
    """Do what an all-to-all does with the embeddings of each group."""
    parts = []
    for batch in batches:
        media, route = batch.media(modality), batch.route(modality)
        sent = marks_of(media.patches, media.cu_seqlens, media.cu_embeddings)
        assert len(sent) == sum(route.send_counts)
        ends = np.cumsum([0, *route.send_counts]).tolist()
        parts.append([sent[begin:end] for begin, end in itertools.pairwise(ends)])
    received = []
    for group, batch in enumerate(batches):
        own = [part[group] for part in parts]
        assert [len(rows) for rows in own] == batch.route(modality).recv_counts
        received.append([mark for rows in own for mark in rows])
    return received


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    dp_count=st.integers(1, 5),
    cp_count=st.sampled_from([1, 2]),
    is_random=st.booleans(),
)
def test_every_embedding_comes_to_its_placeholder(
    seed: int, dp_count: int, cp_count: int, is_random: bool
) -> None:
    cells = Cells(seed, dp_count, cp_count, is_random=is_random)
    batches = cells.batches()
    for kind, rule in enumerate(RULES):
        name: Any = rule.modality
        received = exchanged([own[0] for own in batches], name)
        held = [int(own[0].media(name).cu_seqlens[-1]) for own in batches]
        wanted_units = np.zeros(dp_count, np.int64)
        units = cells.units()[kind]
        np.add.at(wanted_units, cells.encode_dp[kind][units > 0], units[units > 0])
        assert held == wanted_units.tolist()
        for group, marks in enumerate(received):
            plain = build(cells.plain, cells.chunks, cells.cuts[group])
            home = plain[0].media(name)
            wanted = dict(
                zip(
                    home.places.tolist(),
                    marks_of(home.patches, home.cu_seqlens, home.cu_places),
                    strict=True,
                )
            )
            route = batches[group][0].route(name)
            assert dict(zip(route.recv_places.tolist(), marks, strict=True)) == wanted
            taken: list[int] = []
            for own, other in zip(batches[group], plain, strict=True):
                media = own.media(name)
                for field in ("places", "cu_places", "segments"):
                    assert np.array_equal(getattr(media, field), getattr(home, field))
                assert np.array_equal(own.tokens, other.tokens)
                assert np.array_equal(own.labels, other.labels)
                assert np.array_equal(own.mrope_position_ids, other.mrope_position_ids)
                places, numbers = own.local_places(name)
                whole = own.cp_places.reshape(-1)[places]
                assert [marks[n] for n in numbers] == [wanted[place] for place in whole.tolist()]
                taken += numbers.tolist()
            assert sorted(taken) == list(range(len(marks)))
