"""The handed corpora as one job, through a real daemon: every token, the mixture, the packing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.state import PROGRESS_COLUMNS, StreamState
from tests.support.node import running_node
from tests.support.segments import Delivered, expected_texts, pieces_of, read_delivered
from tests.support.sources import DATA, needs_data

pytestmark = [needs_data, pytest.mark.processes]

ROW_TOKENS = 4096
CHECKED = ("bible_kjv", "enwiki_sample", "gcide", "gsm8k", "manpages_i18n", "tinyshakespeare")
"""Sources whose every delivered piece is compared: all formats but .gz and .xz, and a folder."""


def source_name(corpus: str) -> str:
    return corpus.split("/")[0].split(".")[0]


def corpora() -> dict[str, list[str]]:
    """Return the corpora of each source; the ten languages of a hive folder are one source."""
    found: dict[str, list[str]] = {}
    for corpus in sorted(expected_texts()):
        found.setdefault(source_name(corpus), []).append(corpus)
    return found


def source_section(corpus: str) -> dict[str, Any]:
    text = DATA / "text"
    if corpus.startswith("gsm8k"):
        return {"paths": str(text / "gsm8k"), "text": "question+answer"}
    if "/" in corpus:
        return {"paths": str(text / corpus.split("/")[0]), "text": "text"}
    section: dict[str, Any] = {"paths": str(text / corpus)}
    return (
        section
        if corpus.endswith(".txt")
        else section | {"text": expected_texts()[corpus]["text_field"]}
    )


def tokens_of(source: str) -> int:
    return sum(expected_texts()[corpus]["tokens"]["o200k_base"] for corpus in corpora()[source])


def corpora_job(sources: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    chosen = sources or list(corpora())
    weights = changes.pop("weights", None) or {source: tokens_of(source) for source in chosen}
    batch = {"rows": 64, "row_tokens": ROW_TOKENS, "microbatch_rows": 8} | changes.pop("batch", {})
    return {
        "schema": 1,
        "name": "corpora",
        "seed": 11,
        "tokenizer": {"tiktoken": str(DATA / "tokenizers" / "o200k_base.tiktoken"), "eos": "none"},
        "batch": batch,
        "sources": {source: source_section(corpora()[source][0]) for source in chosen},
        "mixture": {"unit": "tokens", 0: weights},
    } | changes


@pytest.fixture(scope="module")
def epoch(tmp_path_factory: pytest.TempPathFactory) -> Delivered:
    """One pass over all corpora, read to its end by two ranks."""
    job = corpora_job(epochs=1, defaults={"at_exhaustion": "drop"})
    with running_node(tmp_path_factory.mktemp("n")) as node:
        keep = [sorted(corpora()).index(source) for source in CHECKED]
        return read_delivered(node, job, {"dp": 2}, keep=keep)


def by_source(counts: Counter[int], state: StreamState) -> dict[str, int]:
    return {name: counts[index] for index, name in enumerate(state.source_names)}


def test_every_token_of_every_corpus_is_delivered_once(epoch: Delivered) -> None:
    assert epoch.state is not None
    wanted = {source: tokens_of(source) for source in corpora()}
    assert by_source(epoch.tokens, epoch.state) == wanted
    assert sum(wanted.values()) == 36_696_893


def test_the_state_counts_what_was_delivered(epoch: Delivered) -> None:
    state = epoch.state
    assert state is not None
    progress = {name: state.progress[place] for place, name in enumerate(PROGRESS_COLUMNS)}
    wanted = [tokens_of(source) for source in state.source_names]
    rows = [sum(expected_texts()[c]["rows"] for c in corpora()[s]) for s in state.source_names]
    assert state.ending == "every source of the mixture is exhausted"
    assert progress["drawn_tokens"].tolist() == wanted
    assert progress["delivered_tokens"].tolist() == wanted
    assert progress["delivered_samples"].tolist() == rows
    assert progress["is_exhausted"].all()
    assert state.carried.shape[1] == 0
    assert not state.dropped.any()


def test_every_delivered_piece_is_a_piece_of_a_document(epoch: Delivered) -> None:
    for source in CHECKED:
        delivered = epoch.pieces[sorted(corpora()).index(source)]
        wanted = pieces_of(corpora()[source], ROW_TOKENS)
        assert delivered == wanted, source


def test_best_fit_fills_more_than_99_percent(epoch: Delivered) -> None:
    assert epoch.fill >= 0.99  # the padded last step included
    step_cells = epoch.cells / epoch.steps
    assert 1 - (epoch.padding - epoch.last_step_padding) / (epoch.cells - step_cells) >= 0.99


def test_concat_fills_every_cell(tmp_path: Path) -> None:
    sources = ["bible_kjv", "gcide", "kernel_docs", "manpages_en", "tinyshakespeare"]
    job = corpora_job(
        sources, batch={"packing": "concat"}, epochs=1, defaults={"at_exhaustion": "drop"}
    )
    with running_node(tmp_path / "n") as node:
        delivered = read_delivered(node, job, {"dp": 2})
    assert delivered.padding == delivered.last_step_padding < delivered.cells / delivered.steps
    assert delivered.state is not None
    assert by_source(delivered.tokens, delivered.state) == {s: tokens_of(s) for s in sources}
