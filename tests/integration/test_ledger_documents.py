"""Documents of any length and sources of any end, against the oracle (H12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from msd_client.contract.errors import SourceExhaustedError
from msd_client.contract.state import DROPPED_COLUMNS
from tests.support.ledger import Account, read_ledger
from tests.support.ledger_case import make_case
from tests.support.node import Node, running_node

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One daemon for every test that does not care which."""
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as running:
        yield running


# ---- H12 and lengths -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "long", "delivered", "dropped"),
    [
        ("best_fit", "split", 11, 0),
        ("best_fit", "truncate", 10, 1),
        ("best_fit", "skip", 6, 5),
        ("concat", "split", 11, 0),
        ("padded", "truncate", 10, 1),
        ("padded", "skip", 6, 5),
    ],
)
def test_documents_of_5_2_3_1_in_rows_of_4(
    node: Node, tmp_path: Path, packing: str, long: str, delivered: int, dropped: int
) -> None:
    case = make_case(
        tmp_path / f"h12-{packing}-{long}",
        {"four": [[5, 2, 3, 1]]},
        {"rows": 5, "row_tokens": 4, "packing": packing, "long": long},
        epochs=1,
    )
    ledger = read_ledger(node, case.corpus, case.job, {"dp": 1}, None)
    ledger.check_equals(case.wanted())
    assert case.settle(ledger) == {("four", 0): Account(11, delivered, dropped, 0)}
    assert int(ledger.delivered().sum()) == delivered
    state = ledger.last_state
    reasons = dict(zip(DROPPED_COLUMNS, state.dropped[:, 0].tolist(), strict=True))
    assert reasons["dropped_tokens"] == dropped
    assert reasons["long_skipped"] == (long == "skip")
    assert reasons["long_truncated"] == (long == "truncate")
    parts = sorted(
        (piece.offset, piece.length) for _, _, piece in ledger.pieces() if piece.document == 0
    )
    if long == "split" and packing != "concat":
        assert parts == [(0, 4), (4, 1)]


def test_a_document_of_a_million_tokens_is_245_fragments_and_goes_on_in_its_middle(
    node: Node, tmp_path: Path
) -> None:
    case = make_case(
        tmp_path / "million",
        {"huge": [[10**6]], "other": [[100] * 2000]},
        {"rows": 8, "row_tokens": 4096},
        mixture={"unit": "tokens", 0: {"huge": 7, "other": 1}},
        epochs=1,
        ends={"huge": "drop", "other": "drop"},
    )
    first = read_ledger(node, case.corpus, case.job, {"dp": 2}, 17)
    saved = first.last_state
    assert 0 < saved.cursor_offset[0] < 10**6
    ledger = first + read_ledger(
        node, case.corpus, case.job, {"dp": 1}, None, state=first.state(17)
    )
    fragments = [
        (step, piece.offset, piece.length)
        for step, _, piece in ledger.pieces()
        if piece.source == "huge"
    ]
    assert len(fragments) == 245
    assert sorted(fragments, key=lambda part: part[1]) == sorted(
        fragments, key=lambda part: (part[0], part[1])
    )
    assert max(part[1:] for part in fragments) == (244 * 4096, 10**6 - 244 * 4096)
    assert case.settle(ledger)["huge", 0] == Account(10**6, 10**6, 0, 0)


@pytest.mark.parametrize("long", ["split", "truncate", "skip"])
@pytest.mark.parametrize("packing", ["best_fit", "best_fit_even", "concat", "padded"])
def test_odd_lengths_over_epochs_that_end_inside_a_step(
    node: Node, tmp_path: Path, packing: str, long: str
) -> None:
    row = 16
    case = make_case(
        tmp_path / f"odd-{packing}-{long}",
        {
            "even": [[0, 1, row, row + 1, 5, 3 * row + 2, 0], [7, 1, 2, 9]],
            "odd": [[row + 1, 0, 3, 1, 1, row, 40, 6]],
        },
        {"rows": 4, "row_tokens": row, "packing": packing, "long": long},
        shuffle={"window_records": 3, "block_records": 4, "window_shards": 1},
        mixture={"unit": "tokens", 0: {"even": 2, "odd": 1}},
        epochs=4,
    )
    wanted = case.wanted()
    whole = read_ledger(node, case.corpus, case.job, {"dp": 2}, None)
    assert whole.steps == list(range(len(wanted)))
    whole.check_equals(wanted)
    accounts = case.settle(whole)
    assert {epoch for _, epoch in accounts} == {0, 1, 2, 3}
    if packing == "padded":
        return
    cut = len(wanted) // 2
    later = read_ledger(node, case.corpus, case.job, {"dp": 1}, None, state=whole.state(cut))
    later.check_equals(wanted)
    assert case.settle(whole.upto(cut) + later) == accounts


# ---- ends of sources -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "ends"),
    [
        ("tokens", {"long": "repeat", "mid": "drop", "short": "drop"}),
        ("samples", {"long": "drop", "mid": "drop", "short": "drop"}),
        ("tokens", {"long": "repeat", "mid": "stop", "short": "repeat"}),
        ("samples", {"long": "repeat", "mid": "stop", "short": "drop"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_sources_end_at_different_times(
    node: Node, tmp_path: Path, unit: str, ends: dict[str, str]
) -> None:
    rng = np.random.default_rng(8)
    case = make_case(
        tmp_path / f"{'-'.join(ends.values())}-{unit}",
        {
            name: [rng.integers(0, 50, count).tolist() for _ in range(2)]
            for name, count in (("long", 90), ("mid", 40), ("short", 12))
        },
        {"rows": 4, "row_tokens": 32},
        ends=ends,
        mixture={"unit": unit, 0: {"long": 1, "mid": 1, "short": 1}},
        steps=70,
    )
    wanted = case.wanted()
    ledger = read_ledger(node, case.corpus, case.job, {"dp": 4}, None)
    assert ledger.steps == list(range(len(wanted)))
    ledger.check_equals(wanted)
    accounts = case.settle(ledger)
    epochs = Counter(name for name, _ in accounts)
    for name, end in ends.items():
        assert epochs[name] == 1 or end == "repeat", (name, epochs)
    if "stop" in ends.values():
        assert ledger.last_state.ending == "source mid is exhausted"
    cut = len(wanted) * 2 // 3
    later = read_ledger(node, case.corpus, case.job, {"dp": 2}, None, state=ledger.state(cut))
    assert later.steps == list(range(cut, len(wanted)))
    later.check_equals(wanted)


def test_a_source_to_be_repeated_and_out_of_epochs_fails_naming_it(
    node: Node, tmp_path: Path
) -> None:
    case = make_case(
        tmp_path / "out", {"few": [[9] * 20], "many": [[9] * 300]}, {"rows": 4, "row_tokens": 16}
    )
    case.job["sources"]["few"]["max_epochs"] = 2
    with pytest.raises(SourceExhaustedError, match=r"few.*2 epochs"):
        read_ledger(node, case.corpus, case.job, {"dp": 2}, None)
