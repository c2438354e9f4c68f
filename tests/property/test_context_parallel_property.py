"""Context-parallel slices: disjoint, complete, equal, and everything moves with its token (H09)."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.context_parallel import CP_LAYOUTS, CpLayout
from msd_client.contract.user_fields import UserField
from tests.support.microbatches import Document, build_batches

USERS = (
    UserField("advantage", "token", "float64", -1.0),
    UserField("turn", "token", "int32", -1),
    UserField("quality", "segment", "float32", -2.0),
    UserField("group", "row", "int64", -3),
)
TOKEN_FIELDS = ("tokens", "labels", "loss_weights", "position_ids", "advantage", "turn")
WHOLE_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "segment_source", "quality", "group")


@st.composite
def microbatches(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[Document]]]:
    """Return a rule that fits every layout at every degree up to its own, and documents."""
    cp_count = draw(st.sampled_from([1, 2, 4, 8]))
    layout: CpLayout = draw(st.sampled_from(CP_LAYOUTS))
    steps = 2 * cp_count
    multiple = steps * draw(st.sampled_from([1, 1, 2]))
    if layout != "zigzag_document":
        multiple = draw(st.sampled_from([1, multiple]))
    lengths = draw(st.lists(st.lists(st.integers(1, 200), max_size=5), min_size=1, max_size=3))
    used = max(sum(-(-n // multiple) * multiple for n in row) for row in lengths)
    row_tokens = -(-max(used, 1) // steps // multiple) * steps * multiple
    number, rows = 1, []
    for row in lengths:
        rows.append([])
        for n in row:
            tokens = list(range(number, number + n))
            values = {
                "advantage": [t / 4 for t in tokens],
                "turn": tokens,
                "quality": float(number),
                "group": number,
            }
            rows[-1].append(Document(tokens, number % 3, values))
            number += n
    rule = {
        "rows": len(rows),
        "row_tokens": row_tokens,
        "row_segments_max": 6,
        "segment_multiple": multiple,
        "labels": draw(st.sampled_from(["shifted", "aligned"])),
        "documents": draw(st.sampled_from(["separate", "joined"])),
        "boundaries": draw(st.sampled_from(["exact", "constant"])),
        "source_weights": (1.0, 0.25, 0.0),
        "user_fields": USERS,
        "cp_count": cp_count,
        "cp_layout": layout,
    }
    return rule, rows


def owner_of(place: int, bounds: list[int], rule: dict[str, Any]) -> int:
    """Say which rank a place belongs to, by the definition of the layout."""
    cp_count, row_tokens = rule["cp_count"], rule["row_tokens"]
    if rule["cp_layout"] == "zigzag_document":
        end = next(bound for bound in bounds if bound > place)
        start = bounds[bounds.index(end) - 1]
    else:
        start = place // row_tokens * row_tokens
        end = start + row_tokens
    if rule["cp_layout"] == "contiguous":
        return (place - start) // ((end - start) // cp_count)
    chunk = (place - start) // ((end - start) // (2 * cp_count))
    return min(chunk, 2 * cp_count - 1 - chunk)


@settings(max_examples=120, deadline=None)
@given(microbatches())
def test_everything_moves_with_its_token(
    drawn: tuple[dict[str, Any], list[list[Document]]],
) -> None:
    rule, rows = drawn
    batches = build_batches(BatchSpec.for_rule(**rule), rows, as_="numpy")
    (whole,) = build_batches(BatchSpec.for_rule(**(rule | {"cp_count": 1})), rows, as_="numpy")
    shape = (rule["rows"], rule["row_tokens"] // rule["cp_count"])
    places = np.stack([batch.cp_places for batch in batches])
    assert sorted(places.reshape(-1).tolist()) == list(range(whole.tokens.size))
    bounds = whole.cu_seqlens_padded.tolist()
    for batch in batches:
        assert batch.cp_places.shape == shape
        assert (np.diff(batch.cp_places, axis=1) > 0).all(), "a rank's places keep their order"
        rows_of = batch.cp_places // rule["row_tokens"]
        assert (rows_of == np.arange(shape[0])[:, None]).all(), "and their rows"
        for name in TOKEN_FIELDS:
            assert batch[name].shape == shape
            assert batch[name].dtype == whole[name].dtype
            assert np.array_equal(batch[name], whole[name].reshape(-1)[batch.cp_places]), name
        assert np.array_equal(batch.segment_ids, whole.segment_ids.reshape(-1)[batch.cp_places])
        for name in WHOLE_FIELDS:
            assert np.array_equal(batch[name], whole[name]), name
        for name in ("valid_tokens", "max_seqlen", "segments", "row_tokens"):
            assert batch[name] == whole[name]
        for place in batch.cp_places.reshape(-1)[:: max(1, shape[1] // 8)].tolist():
            assert owner_of(place, bounds, rule) == batch.cp_rank
    assert whole.valid_tokens == sum(int((b.loss_weights > 0).sum()) for b in batches)


@settings(max_examples=60, deadline=None)
@given(microbatches())
def test_a_middle_stage_makes_the_same_places_and_positions(
    drawn: tuple[dict[str, Any], list[list[Document]]],
) -> None:
    rule, rows = drawn
    batches = build_batches(BatchSpec.for_rule(**rule), rows, as_="numpy")
    middle = build_batches(BatchSpec.for_rule(**(rule | {"stage": "middle"})), rows, as_="numpy")
    for want, have in zip(batches, middle, strict=True):
        for name in ("position_ids", "segment_ids", "cp_places"):
            assert np.array_equal(want[name], have[name]), name
            assert want[name].dtype == have[name].dtype == np.int32
        assert have.valid_tokens == want.valid_tokens
