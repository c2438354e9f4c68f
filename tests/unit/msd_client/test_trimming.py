"""A batch without the padding behind its last segment: fields, boundaries and masks alike."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from msd_client import torch_adapter
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import BatchReleasedError, UsageError
from msd_client.contract.user_fields import UserField
from tests.support.microbatches import Document, build_batches

KINDS = [
    "numpy",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(not torch_adapter.has_torch(), reason="torch is not installed"),
    ),
]
USERS = (UserField("reward", "segment", "float32", -1.0), UserField("adv", "token", "float32", 0.0))


def documents(*lengths: int) -> list[Document]:
    numbers = itertools.count(1)
    return [
        Document(
            [next(numbers) for _ in range(length)],
            place % 2,
            {"reward": float(place), "adv": [float(n) for n in range(length)]},
        )
        for place, length in enumerate(lengths)
    ]


def batches(*lengths: int, as_: Any = "numpy", **rule: Any) -> list[Batch]:
    plain: dict[str, Any] = {"rows": 1, "row_tokens": 32, "row_segments_max": 8}
    spec = BatchSpec.for_rule(**(plain | {"user_fields": USERS} | rule))
    return build_batches(spec, [documents(*lengths)], as_=as_)


def plain_of(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("boundaries", ["exact", "constant"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_trimmed_batch_is_that_of_a_row_that_its_documents_fill(
    kind: str, boundaries: str, multiple: int
) -> None:
    lengths = (5, 3, 7)
    size = sum(-(-n // multiple) * multiple for n in lengths)
    rule = {"segment_multiple": multiple, "as_": kind, "source_weights": (1.0, 0.5)}
    (whole,) = batches(*lengths, boundaries=boundaries, **rule)
    (wanted,) = batches(*lengths, row_tokens=size, **rule)
    made = whole.trimmed()
    assert whole.used_tokens == made.used_tokens == size
    for name in (*wanted, "cu_seqlens_padded", "segment_ids", "cp_places", "row_tokens"):
        assert plain_of(made[name]) == plain_of(wanted[name]), name
    assert set(made) == set(whole) | {"segment_ids", "cp_places"}
    assert plain_of(made.flat.tokens) == plain_of(wanted.flat.tokens)
    flash, expected = made.flash_kwargs(), wanted.flash_kwargs()
    assert {k: plain_of(v) for k, v in flash.items()} == {
        k: plain_of(v) for k, v in expected.items()
    }
    assert plain_of(made.packed_seq_params().cu_seqlens_q) == plain_of(wanted.cu_seqlens)
    if kind == "torch":
        assert plain_of(made.sdpa_mask()) == plain_of(wanted.sdpa_mask())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_and_nothing_changes_for_a_full_row(kind: str) -> None:
    (whole,) = batches(20, 12, as_=kind)
    made = whole.trimmed()
    assert made.used_tokens == 32
    assert {name: plain_of(value) for name, value in made.items()} == {
        name: plain_of(value) for name, value in whole.items()
    }
    (whole,) = batches(20, as_=kind)
    made = whole.trimmed()
    for name in ("tokens", "labels", "position_ids", "adv", "cu_seqlens", "segment_source"):
        assert np.shares_memory(np.asarray(made[name]), np.asarray(whole[name])), name
    assert made.max_seqlen == 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_microbatch_without_documents_keeps_the_least_a_kernel_takes(kind: str) -> None:
    (whole,) = batches(as_=kind, segment_multiple=4)
    made = whole.trimmed()
    assert whole.used_tokens == 0
    assert plain_of(made.tokens) == [[0] * 4]
    assert plain_of(made.labels) == [[-100] * 4]
    assert plain_of(made.cu_seqlens) == plain_of(made.cu_seqlens_padded) == [0, 4]
    assert plain_of(made.segment_source) == [-1]
    assert plain_of(made.segment_ids) == [[0] * 4]
    assert plain_of(made.reward) == [-1.0]
    assert (made.segments, made.max_seqlen, made.row_tokens, made.valid_tokens) == (1, 4, 4, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_documents_are_trimmed_alike(kind: str) -> None:
    rule = {"cp_count": 2, "cp_layout": "zigzag_document", "segment_multiple": 4, "as_": kind}
    whole = batches(5, 11, **rule)
    wanted = batches(5, 11, row_tokens=20, **rule)
    for mine, expected in zip(whole, wanted, strict=True):
        made = mine.trimmed()
        assert made.tokens.shape == (1, 10)
        for name in (*expected, "segment_ids", "cp_places"):
            assert plain_of(made[name]) == plain_of(expected[name]), name


@pytest.mark.parametrize("layout", ["zigzag_row", "contiguous"])
def test_slices_of_rows_are_refused(layout: str) -> None:
    mine, _ = batches(5, cp_count=2, cp_layout=layout)
    with pytest.raises(UsageError, match=f"cp_layout {layout}.*zigzag_document"):
        mine.trimmed()


def test_several_rows_are_refused() -> None:
    spec = BatchSpec.for_rule(rows=2, row_tokens=8, row_segments_max=4)
    (batch,) = build_batches(spec, [documents(3), documents(4)], as_="numpy")
    assert batch.used_tokens == 12
    with pytest.raises(UsageError, match="batch of 2 rows"):
        batch.trimmed()


def test_a_released_batch_has_nothing_to_trim() -> None:
    (batch,) = batches(3)
    batch.release()
    with pytest.raises(BatchReleasedError):
        batch.trimmed()
