"""Fill-in-the-middle: orders, rates, the exact inverse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.recipe import FimRule
from msd_daemon.transforms.fim import fim, undo_fim

RULE = FimRule(rate=1.0, prefix_id=1001, suffix_id=1002, middle_id=1003, spm_rate=0.0)


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def test_psm_and_spm_are_the_published_orders() -> None:
    ids = np.arange(10, dtype=np.int32)
    psm = fim(ids, RULE, rng(5)).tolist()
    spm = fim(ids, dataclasses.replace(RULE, spm_rate=1.0), rng(5)).tolist()
    at_suffix, at_middle = psm.index(1002), psm.index(1003)
    prefix, suffix, middle = psm[1:at_suffix], psm[at_suffix + 1 : at_middle], psm[at_middle + 1 :]
    assert psm[0] == 1001
    assert prefix + middle + suffix == list(range(10))
    assert spm == [1001, 1002, *suffix, 1003, *prefix, *middle]
    assert psm == [1001, 0, 1, 1002, 4, 5, 6, 7, 8, 9, 1003, 2, 3]  # of this seed, for good


@given(
    st.lists(st.integers(0, 1000), max_size=40),
    st.integers(0, 1 << 60),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([np.uint16, np.int32, np.int64]),
)
def test_the_inverse_is_exact(values: list[int], seed: int, spm_rate: float, dtype: type) -> None:
    ids = np.array(values, dtype=dtype)
    rule = dataclasses.replace(RULE, spm_rate=spm_rate)
    cut = fim(ids, rule, rng(seed))
    assert cut.dtype == ids.dtype
    assert len(cut) == len(ids) + (3 if values else 0)
    assert undo_fim(cut, rule).tolist() == values
    assert cut.tolist() == fim(ids, rule, rng(seed)).tolist()


def test_rates_and_cuts_are_what_the_rule_says() -> None:
    rule = dataclasses.replace(RULE, rate=0.4, spm_rate=0.25)
    ids = np.arange(4, dtype=np.uint16)
    generator = rng(7)
    got = [fim(ids, rule, generator) for _ in range(20_000)]
    cut = [one.tolist() for one in got if len(one) == 7]
    assert abs(len(cut) / 20_000 - 0.4) < 0.01
    # An SPM document looks like a PSM one without prefix where its own prefix is empty.
    is_spm = [one[1] == 1002 and one[one.index(1003) + 1 :][:1] == [0] for one in cut]
    empty_prefix = 1 - (4 / 5) ** 2
    expected = 0.25 + 0.75 * (empty_prefix - (1 / 5) ** 2)
    # Both cuts at 0 leave the middle empty: no 0 follows, in either order.
    expected -= 0.25 * (1 / 5) ** 2
    assert abs(sum(is_spm) / len(cut) - expected) < 0.02
    lengths = np.bincount(
        [len(one) - 1 - one.index(1003) for one in cut if one[1] == 0], minlength=4
    )
    assert lengths.min() > 0


def test_a_document_that_has_the_ids_and_an_empty_one_stay_as_they_are() -> None:
    for values in ([5, 1003, 7], [1001], []):
        ids = np.array(values, dtype=np.int32)
        assert fim(ids, RULE, rng(3)) is ids
    zero = dataclasses.replace(RULE, rate=0.0)
    ids = np.arange(5)
    assert fim(ids, zero, rng(3)) is ids
    assert undo_fim(ids, RULE) is ids


@pytest.mark.parametrize("values", [[1], [1001, 2], list(range(50))])
def test_every_document_makes_the_same_draws(values: list[int]) -> None:
    generator = rng(11)
    fim(np.array(values), RULE, generator)
    assert generator.random() == rng(11).random(5)[4]
