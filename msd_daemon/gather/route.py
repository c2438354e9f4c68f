"""Writes the media of a microbatch: those that its ranks encode, and the way of their embeddings.

Where media may be encoded anywhere, the items in a slot are those of the segments that the plan
gives to its group, sorted by (group, place) of their text: embeddings in this order are the send
buffer of an all-to-all. What arrives is sorted by the group that sends it, then as the sender has
it, which is by place: so a stable sort of the local items by their encoding group says where each
embedding goes, and no rank needs to be told of another's items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.media_fields import MediaField
from msd_daemon.gather.encode_columns import EncodeColumns
from msd_daemon.gather.media_items import (
    FoundItems,
    MediaCounts,
    find_items,
    put_bounds,
    token_places,
    write_items,
    write_places,
    write_units,
)
from msd_daemon.gather.segment_chunks import Places
from msd_daemon.gather.segment_columns import SegmentColumns

Array = npt.NDArray[Any]


class RoutedCounts(NamedTuple):
    """What a microbatch holds of a modality; equal where media are encoded with their text."""

    here: MediaCounts
    """Items that are encoded here."""
    local: MediaCounts
    """Items of the text here."""


def write_media(
    pool: memoryview,
    segments: SegmentColumns,
    encoding: EncodeColumns | None,
    local: Sequence[FoundItems],
    spec: BatchSpec,
    outputs: Mapping[str, Array],
) -> dict[str, RoutedCounts]:
    """Write the fields of all modalities.

    Args:
        pool: The mapped pool.
        segments: Of the microbatch.
        encoding: Which media are encoded here and which where; None in jobs that do not say.
        local: Items of its segments, for each modality.
        spec: Of the microbatch.
        outputs: Arrays by field name.

    Raises:
        ValueError: There is more of something than the slot has room for, the task lacks what the
            spec asks for, or an item is on no group's list.
        ChunkCorruptError: A chunk carries other media than the job, or damaged ones.
    """
    dp_count = spec.encode_dp_count
    if (encoding is None) != (dp_count == 0):
        raise ValueError(f"encoding groups {encoding} for a slot of routes to {dp_count} groups")
    counts: dict[str, RoutedCounts] = {}
    for kind, rule in enumerate(spec.media):
        own = here = local[kind]
        if encoding is None:
            write_items(rule, own, outputs)
        else:
            here = _encoded_items(pool, encoding.encoded[kind], kind, spec)
            write_places(rule.modality, own, outputs)
            write_units(rule, here, outputs)
            firsts = segments.row.astype(np.int64) * spec.row_tokens + segments.column
            segment = np.searchsorted(firsts, own.places, side="right") - 1
            _write_route(rule, own, encoding.encode_dp[kind, segment], here, spec, outputs)
        counts[rule.modality] = RoutedCounts(here.counts, own.counts)
    return counts


def _encoded_items(
    pool: memoryview, segments: SegmentColumns, kind: int, spec: BatchSpec
) -> FoundItems:
    """Return the items of segments of all groups; places count on from group to group."""
    shape = (spec.encode_dp_count * spec.rows, spec.row_tokens)
    numbers = np.zeros(segments.count, np.int32)  # segments of other ranks have no number here
    return find_items(pool, segments, spec.media, shape, numbers)[kind]


def _write_route(
    rule: MediaField,
    local: FoundItems,
    encode_dp: npt.NDArray[np.int32],
    here: FoundItems,
    spec: BatchSpec,
    outputs: Mapping[str, Array],
) -> None:
    name, dp_count = rule.modality, spec.encode_dp_count
    if len(encode_dp) and not 0 <= int(encode_dp.min()) <= int(encode_dp.max()) < dp_count:
        raise ValueError(
            f"{name}: items are encoded by groups {encode_dp.min()} to {encode_dp.max()} of {dp_count}"
        )
    put_bounds(outputs[f"{name}_cu_sends"], here.tokens)
    to_group = here.places // (spec.rows * spec.row_tokens)
    outputs[f"{name}_send_counts"][:] = _sums(to_group, here.tokens, dp_count)
    outputs[f"{name}_recv_counts"][:] = _sums(encode_dp, local.tokens, dp_count)
    arrival = np.argsort(encode_dp, kind="stable")
    places = token_places(local.places[arrival], local.tokens[arrival])
    outputs[f"{name}_recv_places"][: len(places)] = places


def _sums(group: npt.NDArray[Any], tokens: Places, dp_count: int) -> Places:
    sums = np.zeros(dp_count, np.int64)
    np.add.at(sums, group, tokens)
    return sums
