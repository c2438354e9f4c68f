"""What each pipeline stage and context-parallel rank gets of a microbatch: exact values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msd_client import torch_adapter
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import BatchReleasedError, BudgetError, InternalError, UsageError
from msd_client.contract.ring_layout import TocField
from msd_client.contract.user_fields import UserField
from msd_client.numpy_adapter import slice_of_rank
from tests.support.microbatches import Document, build_batches
from tests.support.rings import small_ring

KINDS = [
    "numpy",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(not torch_adapter.has_torch(), reason="torch is not installed"),
    ),
]
USERS = (
    UserField("advantage", "token", "float32", -1.0),
    UserField("quality", "segment", "float64", -2.0),
    UserField("group", "row", "int64", -3),
)


def document(tokens: list[int], source: int = 0, quality: float = 0.0, group: int = 0) -> Document:
    values = {"advantage": [token / 2 for token in tokens], "quality": quality, "group": group}
    return Document(tokens, source, values)


def rule(**change: Any) -> BatchSpec:
    plain: dict[str, Any] = {"rows": 1, "row_tokens": 12, "row_segments_max": 4}
    return BatchSpec.for_rule(**(plain | change))


H09 = [[document([11, 12, 13, 14, 15]), document([21, 22, 23], 1)]]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_a_dealt_document_get_what_h09_says(kind: str) -> None:
    spec = rule(segment_multiple=4, cp_count=2, cp_layout="zigzag_document", user_fields=USERS)
    first, second = build_batches(spec, H09, as_=kind, valid_tokens=6)
    assert first.cp_places.tolist() == [[0, 1, 6, 7, 8, 11]]
    assert second.cp_places.tolist() == [[2, 3, 4, 5, 9, 10]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert second.position_ids.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert first.tokens.tolist() == [[11, 12, 0, 0, 21, 0]]
    assert second.tokens.tolist() == [[13, 14, 15, 0, 22, 23]]
    assert first.labels.tolist() == [[12, 13, -100, -100, 22, -100]]
    assert second.labels.tolist() == [[14, 15, -100, -100, 23, -100]]
    assert first.advantage.tolist() == [[5.5, 6, -1, -1, 10.5, -1]]
    assert first.segment_ids.tolist() == second.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    for batch in (first, second):
        assert batch.cu_seqlens.tolist() == [0, 5, 8]
        assert batch.cu_seqlens_padded.tolist() == [0, 8, 12]
        assert batch.segment_source.tolist() == [0, 1]
        assert (batch.max_seqlen, batch.valid_tokens, batch.segments) == (8, 6, 2)
        assert (batch.rows, batch.row_tokens) == (1, 12)
        assert str(batch.cp_places.dtype).removeprefix("torch.") == "int32"
    whole = np.zeros(12, np.int64)
    for batch in (first, second):
        whole[np.asarray(batch.cp_places)] = np.asarray(batch.tokens)
    assert whole.tolist() == [11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 23, 0]


ROWS_OF_8 = [[document(list(range(1, 9)))], [document(list(range(11, 16)))]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        ("contiguous", [[[1, 2, 3, 4], [11, 12, 13, 14]], [[5, 6, 7, 8], [15, 0, 0, 0]]]),
        ("zigzag_row", [[[1, 2, 7, 8], [11, 12, 0, 0]], [[3, 4, 5, 6], [13, 14, 15, 0]]]),
    ],
)
def test_ranks_of_dealt_rows(kind: str, layout: str, tokens: list[Any]) -> None:
    spec = rule(rows=2, row_tokens=8, cp_count=2, cp_layout=layout)
    batches = build_batches(spec, ROWS_OF_8, as_=kind)
    assert [batch.tokens.tolist() for batch in batches] == tokens
    places = {token: place for place, token in enumerate([*range(1, 9), *range(11, 16)])}
    for batch in batches:
        pairs = zip(batch.flat.tokens.tolist()[0], batch.flat.cp_places.tolist()[0], strict=True)
        assert all(places[token] == place for token, place in pairs if token)
        assert batch.clone().cp_rank == batch.cp_rank


def test_a_ranks_slice_is_one_contiguous_view_of_the_slot() -> None:
    field = TocField("tokens", "int32", (4, 3, 5), 256, 4 * 3 * 5 * 4)
    assert slice_of_rank(field, 2) == ("tokens", "int32", (3, 5), 256 + 2 * 60, 60)
    ragged = TocField("cu_seqlens", "int32", (7,), 0, 28)
    assert slice_of_rank(ragged, 2) is ragged
    spec = rule(rows=2, row_tokens=8, cp_count=2)
    arrays = {
        "tokens": np.arange(16, dtype=np.int32).reshape(2, 2, 4),
        "cu_seqlens": np.array([0, 8, 16], np.int32),
    }
    with small_ring() as ring:
        batch = Batch.from_lease(ring.lease(**arrays), spec, as_="numpy", cp_rank=1)
        assert batch.tokens.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
        assert batch.tokens.flags.c_contiguous
        assert not batch.tokens.flags.writeable
        assert batch.is_leased
        assert batch.row_tokens == 8
        batch.release()


@pytest.mark.parametrize("cp_rank", [-1, 2])
def test_a_rank_that_the_microbatch_was_not_dealt_to_is_refused(cp_rank: int) -> None:
    with small_ring() as ring:
        lease = ring.lease()
        with pytest.raises(UsageError, match=f"cp rank {cp_rank} of a microbatch for 2 ranks"):
            Batch.from_lease(lease, rule(cp_count=2), as_="numpy", cp_rank=cp_rank)
        with pytest.raises(UsageError, match="for 1 ranks"):
            Batch.from_lease(lease, None, as_="numpy", cp_rank=1)


# ---- rows and documents ----


def plain_row(*lengths: int) -> list[Document]:
    return [Document(list(range(10, 10 + n)), source=k) for k, n in enumerate(lengths)]


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_of_more_than_one_row_are_those_of_h07(kind: str) -> None:
    spec = rule(rows=2, row_tokens=8)
    (batch,) = build_batches(spec, [plain_row(3, 5), plain_row(2, 4, 2)], as_=kind)
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 10, 14, 16]
    assert batch.flash_kwargs()["cu_seqlens_k"].tolist() == [0, 3, 8, 10, 14, 16]
    assert str(batch.cu_seqlens.dtype).removeprefix("torch.") == "int32"
    assert batch.max_seqlen == 5
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [2, 2, 3, 3, 3, 3, 4, 4]]
    (batch,) = build_batches(spec, [plain_row(3), plain_row(2, 4)], as_=kind)
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 10, 14, 16], "padding is a segment of its own"
    assert batch.segment_source.tolist() == [0, -1, 0, 1, -1]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("labels", "eos", "right"),
    [
        ("shifted", [], [12, 13, -100, 22, -100, -100]),
        ("aligned", [], [-100, 12, 13, -100, 22, -100]),
        ("shifted", [9], [12, 13, 9, -100, 22, 9, -100, -100]),
        ("aligned", [9], [-100, 12, 13, 9, -100, 22, 9, -100]),
    ],
)
def test_labels_at_joins_are_those_of_h08_and_their_convention_is_named(
    labels: str, eos: list[int], right: list[int], kind: str
) -> None:
    spec = rule(row_tokens=len(right), labels=labels)
    rows = [[Document([11, 12, 13, *eos]), Document([21, 22, *eos])]]
    (batch,) = build_batches(spec, rows, as_=kind)
    assert batch.labels.tolist() == [right]
    assert batch.conventions["labels"] == labels
    assert batch.valid_tokens == int((batch.labels != -100).sum()) == (5 if eos else 3)


# ---- stages ----

STAGE_ROWS = [
    [document([1, 2, 3], 0, 0.5, 7), document([4, 5], 1, 0.25, 8)],
    [document([6, 7, 8, 9, 10], 1, 0.125, 9)],
]


def stage_spec(stage: str, **change: Any) -> BatchSpec:
    return rule(
        rows=2,
        row_tokens=8,
        segment_multiple=4,
        stage=stage,
        source_weights=(1.0, 0.5),
        user_fields=USERS,
        **change,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_count", [1, 2])
@pytest.mark.parametrize("stage", ["first", "middle", "last"])
def test_what_a_stage_has_is_equal_to_the_whole(stage: str, cp_count: int, kind: str) -> None:
    change = {"cp_count": cp_count, "cp_layout": "zigzag_document"}
    whole = build_batches(stage_spec("all", **change), STAGE_ROWS, as_=kind, valid_tokens=7)
    parts = build_batches(stage_spec(stage, **change), STAGE_ROWS, as_=kind, valid_tokens=7)
    for left, right in zip(whole, parts, strict=True):
        assert set(right) <= set(left)
        for name in [*right, "position_ids", "segment_ids", "cp_places"]:
            want, have = left[name], right[name]
            if hasattr(want, "tolist"):
                assert (want.dtype, want.tolist()) == (have.dtype, have.tolist()), name
            else:
                assert want == have, name
        assert right.conventions["stage"] == stage


LACKING = {
    "first": ["labels", "loss_weights"],
    "middle": ["tokens", "labels", "loss_weights", "advantage"],
    "last": ["tokens"],
}


@pytest.mark.parametrize("stage", LACKING)
def test_what_a_stage_lacks_says_which_stage_has_it(stage: str) -> None:
    (batch,) = build_batches(stage_spec(stage), STAGE_ROWS, as_="numpy")
    for name in LACKING[stage]:
        assert name not in batch
        assert not hasattr(batch, name)
        with pytest.raises(AttributeError, match=f"pipeline stage {stage} has no '{name}': .+"):
            getattr(batch, name)
        with pytest.raises(KeyError, match=f"pipeline stage {stage} has no '{name}'"):
            batch[name]
        with pytest.raises(AttributeError, match=f"pipeline stage {stage}"):
            getattr(batch.flat, name)
    with pytest.raises(AttributeError, match="no field 'nothing'"):
        _ = batch.nothing


def test_the_last_stage_names_the_key_that_gives_it_tokens() -> None:
    (batch,) = build_batches(stage_spec("last"), STAGE_ROWS, as_="numpy")
    with pytest.raises(AttributeError, match=r"batch\.mtp: true"):
        _ = batch.tokens
    (batch,) = build_batches(stage_spec("last", is_mtp=True), STAGE_ROWS, as_="numpy")
    assert batch.tokens[0].tolist() == [1, 2, 3, 0, 4, 5, 0, 0]


def test_a_middle_stages_slot_holds_nothing_of_the_size_of_tokens() -> None:
    spec = stage_spec("middle").at(1 << 20)
    assert spec.payload_bytes_max < 1024


# ---- labels, weights, user fields ----


@pytest.mark.parametrize(
    ("labels", "ids", "weights"),
    [
        ("shifted", [2, 3, 9, 9, 5, 9, 9, 9], [1, 1, 0, 0, 0.5, 0, 0, 0]),
        ("aligned", [9, 2, 3, 9, 9, 5, 9, 9], [0, 1, 1, 0, 0, 0.5, 0, 0]),
    ],
)
def test_a_loss_mask_leaves_ids_everywhere(
    labels: str, ids: list[int], weights: list[float]
) -> None:
    spec = rule(
        row_tokens=8,
        segment_multiple=4,
        pad_id=9,
        labels=labels,
        ignore="loss_mask",
        source_weights=(1.0, 0.5),
    )
    (batch,) = build_batches(spec, STAGE_ROWS[:1], as_="numpy", valid_tokens=3)
    assert batch.labels.tolist() == [ids]
    assert batch.loss_weights.tolist() == [weights]
    assert batch.loss_weights.dtype == np.float32
    assert batch.tokens.tolist() == [[1, 2, 3, 9, 4, 5, 9, 9]]
    assert batch.conventions["ignore_label"] == 9


def test_a_source_that_weighs_nothing_is_not_counted() -> None:
    spec = rule(row_tokens=8, source_weights=(0.0, 2.0))
    (batch,) = build_batches(spec, STAGE_ROWS[:1], as_="numpy", valid_tokens=1)
    assert batch.labels.tolist() == [[2, 3, -100, 5, -100, -100, -100, -100]]
    assert batch.loss_weights.tolist() == [[0, 0, 0, 2, 0, 0, 0, 0]]
    with pytest.raises(InternalError, match="holds 1 trained"):
        build_batches(spec, STAGE_ROWS[:1], valid_tokens=3)


def test_a_job_without_weights_says_where_they_come_from() -> None:
    (batch,) = build_batches(rule(), H09, as_="numpy")
    with pytest.raises(AttributeError, match="ignore: loss_mask"):
        _ = batch.loss_weights


@pytest.mark.parametrize("kind", KINDS)
def test_user_fields_are_keys_and_attributes(kind: str) -> None:
    spec = rule(rows=3, row_tokens=8, segment_multiple=4, user_fields=USERS)
    (batch,) = build_batches(spec, [*STAGE_ROWS, []], as_=kind)
    assert batch["advantage"] is batch.advantage
    assert batch.advantage.tolist() == [
        [0.5, 1, 1.5, -1, 2, 2.5, -1, -1],
        [3, 3.5, 4, 4.5, 5, -1, -1, -1],
        [-1] * 8,
    ]
    assert batch.flat.advantage.shape == (1, 24)
    assert batch.quality.tolist() == [0.5, 0.25, 0.125, -2]
    assert batch.segment_source.tolist() == [0, 1, 1, -1]
    assert batch.group.tolist() == [7, 9, -3]
    assert [str(batch[user.name].dtype).removeprefix("torch.") for user in USERS] == [
        user.dtype for user in USERS
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_inside_a_segment_has_its_number_and_counts_on(kind: str) -> None:
    spec = rule(rows=2, row_tokens=12, segment_multiple=4, stage="middle")
    (batch,) = build_batches(spec, STAGE_ROWS, as_=kind)
    assert batch.segment_ids.tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
        [3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4],
    ]
    assert batch.position_ids.tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
    ]
    assert str(batch.position_ids.dtype).removeprefix("torch.") == "int32"
    assert batch["position_ids"] is batch.position_ids


@pytest.mark.parametrize("kind", KINDS)
def test_constant_boundaries_have_one_shape_in_every_microbatch(kind: str) -> None:
    spec = rule(rows=2, row_tokens=8, boundaries="constant", user_fields=USERS)
    for rows in (STAGE_ROWS, [[], []]):
        (batch,) = build_batches(spec, rows, as_=kind)
        assert tuple(batch.cu_seqlens.shape) == (spec.segments_max + 1,) == (11,)
        assert tuple(batch.segment_source.shape) == tuple(batch.quality.shape) == (10,)
        assert batch.max_seqlen == 8
        assert batch.cu_seqlens_padded is batch.cu_seqlens
    assert batch.cu_seqlens.tolist() == [0, 8, *[16] * 9]
    assert batch.segment_ids.tolist() == [[0] * 8, [1] * 8]
    assert batch.segments == 2
    (batch,) = build_batches(spec, STAGE_ROWS, as_=kind)
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 13, *[16] * 6]
    assert batch.segment_source.tolist() == [0, 1, -1, 1, *[-1] * 6]
    assert batch.quality.tolist() == [0.5, 0.25, -2, 0.125, *[-2] * 6]
    assert batch.position_ids.tolist()[0] == [0, 1, 2, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("cp_count", [1, 2])
def test_rows_of_another_length_are_built_in_the_same_slots(cp_count: int) -> None:
    spec = rule(row_tokens=64, cp_count=cp_count, source_weights=(1.0,))
    rows = [[document([1, 2, 3, 4, 5])]]
    batches = build_batches(spec, rows, as_="numpy", row_tokens=8)
    whole = build_batches(spec.at(8), rows, as_="numpy")
    for have, want in zip(batches, whole, strict=True):
        assert have.row_tokens == 8
        assert have.tokens.shape == (1, 8 // cp_count)
        for name, value in want.items():
            assert np.array_equal(have[name], value), name
        assert np.array_equal(have.segment_ids, want.segment_ids)
    with pytest.raises(
        BudgetError, match="rows of 1048576 tokens in ring 1, whose slots are for 64"
    ):
        build_batches(spec, rows, row_tokens=1 << 20)


def test_made_fields_of_a_released_batch_say_so() -> None:
    (batch,) = build_batches(rule(segment_multiple=4, stage="middle"), H09, as_="numpy")
    batch.release()
    for name in ("segment_ids", "position_ids", "cp_places", "cu_seqlens_padded"):
        with pytest.raises(BatchReleasedError):
            getattr(batch, name)
    with pytest.raises(BatchReleasedError):
        batch.flash_kwargs()
