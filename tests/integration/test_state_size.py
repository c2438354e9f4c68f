"""A state of 300 sources is small, also where many short documents wait for a row."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

import msd_daemon
from msd_client.contract.state import StreamState
from tests.support.ledger import Corpus

STATE_BYTES_MAX = 512 << 10
SOURCES = 300


def test_300_sources_with_as_much_carried_as_can_be(tmp_path: Path) -> None:
    """Rows fill by segments, not tokens, so that what was drawn for their tokens waits."""
    rng = np.random.default_rng(0)
    corpus = Corpus({f"s{n:03}": [rng.integers(1, 20, 400).tolist()] for n in range(SOURCES)})
    job = {
        "schema": 1,
        "tokenizer": {"vocabulary": corpus.vocabulary},
        "batch": {"rows": 256, "row_tokens": 4096},
        "sources": corpus.write_tokens(tmp_path),
        "mixture": {
            "unit": "tokens",
            0: {name: 1 + n % 5 for n, name in enumerate(corpus.names)},
        },
    }
    sizes, carried = [], []
    with msd_daemon.inline(job) as stream:
        for _ in itertools.islice(stream, 2):
            state = stream.state_dict()["msd"]
            sizes.append(len(state))
            carried.append(StreamState.decode(state).carried.shape[1])
            assert StreamState.decode(state).encode() == state
    print(f"{SOURCES} sources, {max(carried)} carried fragments: {max(sizes)} bytes of state")
    assert max(carried) > 20_000
    assert max(sizes) <= STATE_BYTES_MAX
