"""Where media are encoded: dealt to data-parallel groups apart from the rows that hold their text.

Rows are placed by what the backbone pays for them, which says little of their pictures. All groups
run microbatch j at the same time and wait for each other where embeddings go home, so the media of
each microbatch index are evened among the groups, each modality for itself. What is dealt is the
media of one segment: the metadata knows their sum, not the single item. A group never gets more
units of a modality than its slot holds. Media stay at home where moving them gains nothing.

Two deals are tried. One keeps at every group what fits under the even share, dearest first, and
deals the rest to the lightest; the other is LPT (Graham 1969) under the cap, its buckets then given
to the groups that most of their units are of. The first moves far fewer embeddings and is taken
where it is as even. Costs are integers and ties go by place and number, so plans agree on every
machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from federation.model.cost import EncoderCost
from federation.planning.capped_deal import deal_capped
from federation.planning.costs import encoder_costs

Int64Array = npt.NDArray[np.int64]

GAIN_DIVISOR = 64
"""Media leave home where the slowest group becomes faster by more than 1/64."""
LOCAL_DIVISOR = 128
"""The deal that moves less is taken where its slowest group is slower by no more than 1/128."""
NO_MEDIA = -1
"""Encoding group of a segment without units of a modality."""


def media_costs(
    units: Int64Array,
    modalities: Sequence[str],
    encoders: Sequence[EncoderCost],
    unit_cost: int = 1,
) -> Int64Array:
    """Return what encoding the media of each segment costs. Shape (modalities, n).

    Args:
        units: Units of each modality. Shape (modalities, n).
        modalities: Their names.
        encoders: Of the job's model.
        unit_cost: What a unit of a modality without an encoder costs.
    """
    by_name: dict[str, EncoderCost] = {encoder.modality: encoder for encoder in encoders}
    found = units * unit_cost
    for place, name in enumerate(modalities):
        encoder = by_name.get(name)
        if encoder is not None:
            found[place] = encoder_costs(encoder, units[place])
    return found


def encoder_loads(
    costs: Int64Array,
    group: Int64Array,
    microbatch: Int64Array,
    dp_count: int,
    microbatches: int,
) -> Int64Array:
    """Return what the encoders of each group cost in each microbatch. Shape (modalities, dp, M).

    Args:
        costs: Of the media of each segment, by modality. Shape (modalities, n).
        group: Group that encodes them, NO_MEDIA where there are none. Shape (modalities, n).
        microbatch: Microbatch index of each segment. Shape (n,).
        dp_count: Groups.
        microbatches: Of each group.
    """
    found = np.zeros((len(costs), dp_count, microbatches), np.int64)
    for loads, own, place in zip(found, costs, group, strict=True):
        has = place != NO_MEDIA
        np.add.at(loads, (place[has], microbatch[has]), own[has])
    return found


def encoder_sums(loads: Int64Array) -> tuple[int, float]:
    """Return the slowest group's encoders and the mean ones, summed over microbatches and modalities.

    Groups that exchange embeddings meet in each microbatch, modality by modality.

    Args:
        loads: From `encoder_loads`. Shape (modalities, dp, M).
    """
    if not loads.size:
        return 0, 0.0
    return int(loads.max(axis=1).sum()), float(loads.mean(axis=1).sum())


def stay_home(units: Int64Array, home: Int64Array) -> Int64Array:
    """Return the groups that encode media where every one stays with its text.

    Args:
        units: Units of each modality. Shape (modalities, n).
        home: Group that holds each segment. Shape (n,).

    Returns:
        Shape (modalities, n), NO_MEDIA where a segment has no units.
    """
    found: Int64Array = np.where(units > 0, home, NO_MEDIA)
    return found


def place_media(
    costs: Int64Array,
    units: Int64Array,
    home: Int64Array,
    microbatch: Int64Array,
    dp_count: int,
    units_max: tuple[int, ...],
) -> Int64Array:
    """Return the groups that encode the media of each segment, evened by microbatch index.

    Args:
        costs: What encoding the media of each segment costs, by modality. Shape (modalities, n).
        units: Units of each modality. Shape (modalities, n).
        home: Group that holds each segment. Shape (n,).
        microbatch: Microbatch index of each segment. Shape (n,).
        dp_count: Groups.
        units_max: Most units of a microbatch, of each modality; no group holds more at home.

    Returns:
        Shape (modalities, n), NO_MEDIA where a segment has no units.
    """
    found = stay_home(units, home)
    if dp_count == 1:
        return found
    for kind, most in enumerate(units_max):
        holders = np.flatnonzero(units[kind])
        by_index = holders[np.argsort(microbatch[holders], kind="stable")]
        cuts = np.flatnonzero(np.diff(microbatch[by_index])) + 1
        for own in np.split(by_index, cuts):
            found[kind, own] = deal_media(
                costs[kind, own], units[kind, own], home[own], dp_count, most
            )
    return found


def deal_media(
    costs: Int64Array, units: Int64Array, home: Int64Array, dp_count: int, units_max: int
) -> Int64Array:
    """Return the group that encodes each item. Shape (n,).

    Args:
        costs: Cost of each item, at least 0. Shape (n,).
        units: Units of each. Shape (n,).
        home: Group that holds its text. Shape (n,).
        dp_count: Groups.
        units_max: Most units of a group; those at home fit.
    """
    if not len(costs):
        return home
    even = max(-(-int(costs.sum()) // dp_count), int(costs.max()))
    most_home = _most(costs, home, dp_count)
    if _is_near(most_home, even, GAIN_DIVISOR):
        return home
    found = _keep_and_deal(costs, units, home, dp_count, units_max, even)
    most = _most(costs, found, dp_count)
    if not _is_near(most, even, LOCAL_DIVISOR):
        free = deal_capped(costs, units, dp_count, units_max)
        if free is not None:
            most_free = _most(costs, free, dp_count)
            if not _is_near(most, most_free, LOCAL_DIVISOR):
                found, most = _home_names(free, units, home, dp_count), most_free
    return home if _is_near(most_home, most, GAIN_DIVISOR) else found


def _is_near(value: int, best: int, divisor: int) -> bool:
    return value * divisor <= best * (divisor + 1)


def _most(costs: Int64Array, group_of: Int64Array, dp_count: int) -> int:
    loads = np.zeros(dp_count, np.int64)
    np.add.at(loads, group_of, costs)
    return int(loads.max())


def _keep_and_deal(
    costs: Int64Array,
    units: Int64Array,
    home: Int64Array,
    dp_count: int,
    units_max: int,
    even: int,
) -> Int64Array:
    """Keep at home what fits under `even`, dearest first; deal the rest to the lightest with room.

    Room at home is kept until an item has left, so that one that finds no other stays there.
    """
    found = home.copy()
    loads = [0] * dp_count
    held = np.zeros(dp_count, np.int64)
    np.add.at(held, home, units)
    room = (units_max - held).tolist()
    left: list[tuple[int, int, int, int]] = []
    order = np.argsort(-costs, kind="stable")
    columns = (order, costs[order], units[order], home[order])
    for item, cost, size, own in zip(*(column.tolist() for column in columns), strict=True):
        if loads[own] + cost <= even:
            loads[own] += cost
        else:
            left.append((item, cost, size, own))
    heap = [(load, group) for group, load in enumerate(loads)]
    heapq.heapify(heap)
    for item, cost, size, own in left:
        room[own] += size
        passed = []
        while room[heap[0][1]] < size:
            passed.append(heapq.heappop(heap))
        load, group = heap[0]
        heapq.heapreplace(heap, (load + cost, group))
        room[group] -= size
        found[item] = group
        for entry in passed:
            heapq.heappush(heap, entry)
    return found


def _home_names(
    bucket_of: Int64Array, units: Int64Array, home: Int64Array, dp_count: int
) -> Int64Array:
    """Give each bucket to the group that most of its units are of; the largest shares choose first."""
    pairs, place = np.unique(bucket_of * dp_count + home, return_inverse=True)
    shares = np.zeros(len(pairs), np.int64)
    np.add.at(shares, place, units)
    name_of = np.full(dp_count, -1, np.int64)
    is_taken = np.zeros(dp_count, np.bool_)
    for pair in pairs[np.argsort(-shares, kind="stable")].tolist():
        bucket, group = divmod(pair, dp_count)
        if name_of[bucket] < 0 and not is_taken[group]:
            name_of[bucket] = group
            is_taken[group] = True
    name_of[name_of < 0] = np.flatnonzero(~is_taken)
    named: Int64Array = name_of[bucket_of]
    return named
