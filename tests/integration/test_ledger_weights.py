"""Weights and what is drawn by them, against the oracle: extremes and units (H05, H06)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from msd_client.contract.errors import JobError
from msd_client.contract.state import StreamState
from tests.support.ledger import Ledger, note, read_ledger
from tests.support.ledger_case import Case, make_case
from tests.support.node import Node, running_node

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One daemon for every test that does not care which."""
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as running:
        yield running


# ---- H05: extreme weights ------------------------------------------------------------------------


def two_of_ten(folder: Path, weights: Mapping[str, Any], steps: int) -> Case:
    return make_case(
        folder,
        {"a": [[3, 4, 5, 6, 7] * 2], "b": [[2, 3, 4, 5, 6] * 2]},
        {"rows": 8, "row_tokens": 8, "packing": "padded"},
        mixture={"unit": "samples", 0: dict(weights)},
        steps=steps,
    )


def test_weights_near_0_and_1_draw_what_they_say_pass_after_pass(
    node: Node, tmp_path: Path
) -> None:
    case = two_of_ten(tmp_path / "extreme", {"a": 0.001, "b": 0.999}, 250)
    ledger = read_ledger(node, case.corpus, case.job, {"dp": 1}, None)
    ledger.check_equals(case.wanted())
    pieces = [piece for _, _, piece in ledger.pieces()]
    assert len(pieces) == 2000
    of_a = sum(piece.source == "a" for piece in pieces)
    assert abs(of_a - 2) <= 1
    of_b = Counter(piece.document for piece in pieces if piece.source == "b")
    assert all(abs(count - 199.5) <= 1.5 for count in of_b.values())
    # Each pass is a full pass, and shuffled anew: drawn in order, since padded rows hold one each.
    state = ledger.last_state
    drawn = [
        document.number
        for epoch in range(int(state.epoch[1]))
        for document in _order(case, 1).epoch(epoch)
    ]
    passes = [tuple(drawn[first : first + 10]) for first in range(0, len(drawn), 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len(set(passes)) > 150
    case.settle(ledger)


def _order(case: Case, source: int) -> Any:
    from tests.support.oracle import Order

    return Order(case.sources[source], case.job["seed"])


def test_a_weight_of_0_is_never_drawn_nor_opened(node: Node, tmp_path: Path) -> None:
    import os

    case = two_of_ten(tmp_path / "zero", {"a": 0, "b": 1}, 100)
    files = {name: tmp_path / "zero" / f"{name}-000.bin" for name in "ab"}
    ledger = Ledger(case.corpus)
    with node.connect(case.job, {"dp": 1}, 0) as data:
        for path in files.values():
            os.utime(path, (1, os.stat(path).st_mtime))  # a read sets the access time anew
        for step in data.train:
            note(ledger, data, step)
    ledger.check()
    assert {piece.source for _, _, piece in ledger.pieces()} == {"b"}
    if files["b"].stat().st_atime == 1:
        pytest.skip("this file system keeps no access times")
    assert files["a"].stat().st_atime == 1


def test_weights_are_normalised(node: Node, tmp_path: Path) -> None:
    case = two_of_ten(tmp_path / "sums", {"a": 2, "b": 6}, 50)
    ledger = read_ledger(node, case.corpus, case.job, {"dp": 1}, None)
    assert Counter(piece.source for _, _, piece in ledger.pieces()) == {"a": 100, "b": 300}
    tiny = two_of_ten(tmp_path / "sums", {"a": 0.25, "b": 0.75 + 1e-12}, 50)
    ledger.check_equals(tiny.wanted())


@pytest.mark.parametrize(
    "weights",
    [
        {"a": float("nan"), "b": 1},
        {"a": float("inf"), "b": 1},
        {"a": -0.5, "b": 1},
        {"a": 0, "b": 0},
        {"a": 1, "b": 1, "c": 1},
        {"a": "many", "b": 1},
    ],
    ids=["nan", "inf", "negative", "zeros", "count", "string"],
)
def test_weights_that_are_none_are_refused_naming_the_source(
    node: Node, tmp_path: Path, weights: dict[str, Any]
) -> None:
    job = two_of_ten(tmp_path / "wrong", {"a": 1, "b": 1}, 5).job
    job["mixture"][0] = weights
    with pytest.raises(JobError) as caught:
        node.connect(job, {"dp": 1}, 0)
    assert ("c" if "c" in weights else "a") in str(caught.value).split("mixture", 1)[1]


# ---- H06: the unit of weights --------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_weights_mean_what_their_unit_says(tmp_path: Path, unit: str) -> None:
    case = make_case(
        tmp_path / unit,
        {"a": [[50] * 400], "b": [[500] * 60]},
        {"rows": 10, "row_tokens": 512},
        mixture={"unit": unit, 0: {"a": 1, "b": 1}, 50: {"a": 3, "b": 1}},
    )
    shares = []
    with msd_daemon.inline(case.job) as stream:
        former = np.zeros(2)
        for step in itertools.islice(stream, 100):
            if (step.number + 1) % 10 == 0:
                state = StreamState.decode(stream.state_dict()["msd"])
                drawn = state.progress[6].astype(float)
                shares.append((drawn - former)[0] / (drawn - former).sum())
                former = drawn
    for window, share in enumerate(shares):
        weight = 1 if window < 5 else 3
        wanted = weight / (weight + 1) if unit == "tokens" else 50 * weight / (50 * weight + 500)
        # Within two of the largest fragment of what was asked, in every window of 100 rows.
        assert abs(share - wanted) <= 2 * 500 / (100 * 512), (window, share, wanted)
