"""Tails of finite streams on a real node: every rank ends with the step that the oracle ends with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ledger import Corpus, read_ledger, rows_of
from tests.support.node import Node, running_node
from tests.support.oracle import Oracle

pytestmark = pytest.mark.processes

ENDS: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 2},
    "tokens": {"tokens": 5_000},
    "stop": {"at_exhaustion": "stop"},
    "drop": {"at_exhaustion": "drop"},
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One daemon for every end."""
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as running:
        yield running


@pytest.mark.parametrize("end", ["pad", "drop", "wrap"])
@pytest.mark.parametrize("name", ENDS)
def test_all_ranks_end_as_the_oracle_says_and_a_resume_ends_at_once(
    node: Node, tmp_path: Path, name: str, end: str
) -> None:
    rng = np.random.default_rng(7)
    corpus = Corpus({key: [rng.integers(1, 150, 60).tolist()] for key in ("few", "many")})
    options = dict(ENDS[name])
    at_exhaustion = options.pop("at_exhaustion", "repeat")
    job: dict[str, Any] = {
        "schema": 1,
        "name": f"{name}-{end}",
        "seed": 3,
        "tokenizer": {"vocabulary": corpus.vocabulary},
        "batch": {"rows": 8, "row_tokens": 64, "microbatch_rows": 2},
        "sources": corpus.write_tokens(tmp_path / "c"),
        "defaults": {"at_exhaustion": at_exhaustion},
        "end": end,
    } | options
    sources = corpus.oracle_sources(at_exhaustion=at_exhaustion)
    steps = list(Oracle(job, sources).steps())
    wanted = {step.number: rows_of(step.rows) for step in steps}
    ledger = read_ledger(node, corpus, job, {"dp": 2}, None)
    assert ledger.rows() == wanted
    assert len(wanted) > 5
    if end != "pad":
        assert all(any(row.tokens) for step in steps for row in step.rows)
    last = ledger.state(max(wanted) + 1)
    with node.connect(job, {"dp": 1}, 0) as data:
        data.train.load_state_dict(last)
        assert list(data.train) == []
