"""Tokens that are not trained: exact labels, weights and counts."""

from __future__ import annotations

import numpy as np
import pytest

from msd_daemon.gather import GatherOutputs, GatherRule, gather_rows
from msd_daemon.gather.masks import PLACES_AT_ONCE, apply_masks
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT
from tests.support.microbatches import columns_of, make_pool

BIT = UNTRAINED_BIT
RECORDS = [[11, 12 | BIT, 13, 14], [21 | BIT, 22, 23 | BIT]]
SEGMENTS = [(0, 0, 0, 4, 0, 0, 0), (0, 1, 0, 3, 0, 4, 1)]


def gathered(rule: GatherRule, kernel: str) -> tuple[GatherOutputs, int]:
    pool = make_pool([RECORDS], token_bytes=4)
    outputs = GatherOutputs(
        tokens=np.zeros((1, 8), np.int32),
        labels=np.zeros((1, 8), np.int64),
        loss_weights=None if rule.source_weights is None else np.zeros((1, 8), np.float32),
    )
    found = gather_rows(pool.data, columns_of(SEGMENTS), (1, 8), outputs, rule, kernel=kernel)
    return outputs, apply_masks(outputs, rule.ignore_label, found.valid_tokens)


@pytest.mark.parametrize("kernel", ["numpy", "c"])
@pytest.mark.parametrize(
    ("labels", "is_joined", "want"),
    [
        ("shifted", False, [-100, 13, 14, -100, 22, -100, -100, -100]),
        ("aligned", False, [-100, -100, 13, 14, -100, 22, -100, -100]),
        ("shifted", True, [-100, 13, 14, -100, 22, -100, -100, -100]),
        ("aligned", True, [-100, -100, 13, 14, -100, 22, -100, -100]),
    ],
)
def test_a_target_that_is_not_trained_is_ignored(
    kernel: str, labels: str, is_joined: bool, want: list[int]
) -> None:
    if kernel == "c":
        pytest.importorskip("msd_daemon.gather._kernel")
    rule = GatherRule(7, -100, labels=labels, is_joined=is_joined)
    outputs, valid = gathered(rule, kernel)
    assert outputs.labels.tolist() == [want]
    assert outputs.tokens.tolist() == [[11, 12, 13, 14, 21, 22, 23, 7]]
    assert valid == 3


def test_a_trained_first_token_of_a_joined_segment_is_a_target() -> None:
    pool = make_pool([[[11, 12], [21, 22 | BIT]]], token_bytes=4)
    outputs = GatherOutputs(labels=np.zeros((1, 4), np.int32))
    rule = GatherRule(7, -100, is_joined=True)
    segments = columns_of([(0, 0, 0, 2, 0, 0, 0), (0, 1, 0, 2, 0, 2, 0)])
    found = gather_rows(pool.data, segments, (1, 4), outputs, rule)
    assert apply_masks(outputs, -100, found.valid_tokens) == 2
    assert outputs.labels.tolist() == [[12, 21, -100, -100]]


@pytest.mark.parametrize(("weights", "valid"), [((1.0, 0.5), 3), ((0.0, 0.5), 1), ((0.0, 0.0), 0)])
def test_what_is_not_trained_weighs_nothing(weights: tuple[float, float], valid: int) -> None:
    rule = GatherRule(7, 7, source_weights=np.array(weights, np.float32))
    outputs, found = gathered(rule, "numpy")
    first, second = weights
    assert outputs.loss_weights.tolist() == [[0, first, first, 0, second, 0, 0, 0]]
    assert outputs.labels.tolist() == [[7, 13, 14, 7, 22, 7, 7, 7]]
    assert found == valid


def test_a_large_microbatch_is_masked_to_its_end() -> None:
    count = 2 * PLACES_AT_ONCE + 5
    labels = np.full(count, 3 | BIT, np.int64)
    labels[:2] = 3
    outputs = GatherOutputs(tokens=labels.astype(np.int32), labels=labels)
    assert apply_masks(outputs, -100, count) == 2
    assert (outputs.labels[2:] == -100).all()
    assert (outputs.tokens == 3).all()


def test_masks_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="need the labels"):
        apply_masks(GatherOutputs(), -100, 0)
