"""A trainer comes back with a job file that was edited (E15): real daemons, every token's ledger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import StateMismatchError, UsageError
from msd_client.contract.state import StreamState
from tests.support.ledger import Corpus, read_ledger, settle
from tests.support.ledger_case import Case, make_case
from tests.support.node import DEADLINES, Node, running_node

pytestmark = pytest.mark.processes

HALF = 100
WEIGHTS = {"a": 3.0, "b": 1.0, "new": 2.0}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as running:
        yield running


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    rng = np.random.default_rng(5)
    lengths = {name: [rng.integers(0, 120, 300).tolist() for _ in range(4)] for name in WEIGHTS}
    return make_case(
        tmp_path_factory.mktemp("edited"),
        lengths,
        {"rows": 8, "row_tokens": 128, "microbatch_rows": 2},
        shuffle={"window_shards": 2, "window_records": 16, "block_records": 64},
        mixture={"unit": "tokens", 0: WEIGHTS},
    )


def without(job: dict[str, Any], name: str) -> dict[str, Any]:
    changed = deepcopy(job)
    del changed["sources"][name], changed["mixture"][0][name]
    return changed


def test_a_source_added_at_step_100_of_200_leaves_the_others_order(
    node: Node, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    first = read_ledger(node, case.corpus, without(case.job, "new"), {"dp": 2}, HALF)
    with caplog.at_level(logging.WARNING, logger="msd_client.loader"):
        second = read_ledger(node, case.corpus, case.job, {"dp": 4}, HALF, state=first.state(HALF))
    assert second.steps == list(range(HALF, 2 * HALF))
    whole = first + second
    # By the oracle's order of each source: every token up to its cursor once, the rest held.
    settle(case.corpus, case.job, case.sources, whole.delivered(), whole.last_state)
    taken = np.bincount([given.step >= HALF for given in whole.given])
    assert (taken > 0).all()
    assert 2 in {source for given in second.given for source, *_ in given.segments()}
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "journalled: sources.new: added" in text]
    assert len(told) == 2, "told by rank 0 alone: the mixture and the source"
    again = second.state(2 * HALF)
    third = read_ledger(node, case.corpus, case.job, {"dp": 1}, 1, state=again)
    assert third.steps == [2 * HALF]


def test_a_removed_source_is_gone_and_the_others_go_on(node: Node, case: Case) -> None:
    first = read_ledger(node, case.corpus, case.job, {"dp": 2}, 20)
    after = without(case.job, "new")
    second = read_ledger(node, case.corpus, after, {"dp": 2}, 20, state=first.state(20))
    delivered = (first + second).delivered()
    new_ids = case.corpus.firsts[np.array(case.corpus.source_of) == 2]
    delivered[int(new_ids.min()) :] = 0
    settle(case.corpus, after, case.sources[:2], delivered, second.last_state)


def test_another_seed_is_refused_with_both_values_until_it_is_accepted(
    node: Node,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = read_ledger(node, case.corpus, case.job, {"dp": 1}, 5)
    other = case.job | {"seed": 13}
    with node.connect(other, {"dp": 1}, 0) as data:
        before = data.train.state_dict()
        with pytest.raises(StateMismatchError, match=r"refused: seed: 12 -> 13(.*\n)+.*accept=\['seed'\]"):  # fmt: skip
            data.train.load_state_dict(first.state(5))
        assert data.train.state_dict() == before
    caplog.clear()
    second = read_ledger(node, case.corpus, other, {"dp": 1}, 5, state=first.state(5), accept=["seed"])  # fmt: skip
    (told,) = [it.getMessage() for it in caplog.records if "was changed" in it.getMessage()]
    assert "was changed, accepted: seed: 12 -> 13; each source goes on with its next pass" in told
    assert second.steps == list(range(5, 10))
    monkeypatch.setenv("MSD_ACCEPT", "batch, seed")
    by_environ = read_ledger(node, case.corpus, other, {"dp": 1}, 5, state=first.state(5))
    assert by_environ.rows() == second.rows()


def test_a_file_that_changed_is_refused_by_its_sources_name(node: Node, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    lengths = {name: [rng.integers(1, 60, 200).tolist()] for name in "ab"}
    case = make_case(tmp_path / "c", lengths, {"rows": 4, "row_tokens": 64})
    first = read_ledger(node, case.corpus, case.job, {"dp": 1}, 5)
    path = next((tmp_path / "c").glob("b-*.bin"))
    data = bytearray(path.read_bytes())
    data[:4] = data[4:8]
    path.write_bytes(data)
    with (
        node.connect(case.job, {"dp": 1}, 0) as joined,
        pytest.raises(StateMismatchError, match=r"refused: sources.b: its files"),
    ):
        joined.train.load_state_dict(first.state(5))


def test_a_moved_source_is_neutral_and_told(
    node: Node, case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = read_ledger(node, case.corpus, case.job, {"dp": 1}, 5)
    moved = deepcopy(case.job)
    folder = Path(case.job["sources"]["a"]["paths"]).parent
    for path in folder.glob("a-*"):
        (tmp_path / path.name).symlink_to(path)
    moved["sources"]["a"]["paths"] = str(tmp_path / "a-*.bin")
    moved["steps"] = 10
    with caplog.at_level(logging.WARNING, logger="msd_client.loader"):
        second = read_ledger(node, case.corpus, moved, {"dp": 1}, 5, state=first.state(5))
    second.check_equals(case.wanted(10))
    told = [record.getMessage() for record in caplog.records]
    assert any("neutral: sources.a: 4 shards moved" in text for text in told), told
    assert any("neutral: steps: None -> 10" in text for text in told), told


def test_keys_to_accept_are_a_list(node: Node, case: Case) -> None:
    with pytest.raises(UsageError, match="write a list of keys"):
        node.connect(case.job, {"dp": 1}, 0, deadlines=DEADLINES, accept="seed")


# ---- shards appended -----------------------------------------------------------------------------

GROWN = {"bin": "seekable", "zst": "streaming"}


@dataclass
class Grown:
    """A source of 6 shards of which 4 were there when the stream began."""

    corpus: Corpus
    before: dict[str, Any]
    after: dict[str, Any]
    is_later: np.ndarray
    """Of each document: its shard was appended."""


def grown_case(folder: Path, kind: str, late: tuple[int, ...]) -> Grown:
    rng = np.random.default_rng(8)
    lengths = {"a": [rng.integers(1, 40, 60).tolist() for _ in range(6)]}
    corpus = Corpus(lengths)
    shuffle = {
        "window_shards": 2,
        "window_records": 8,
        "block_records": 16,
        "stream_block_records": 7,
    }
    if kind == "bin":
        corpus.write_tokens(folder)
        tokenizer: dict[str, Any] = {"vocabulary": corpus.vocabulary}
    else:
        corpus.write_texts(folder, {"a": kind})
        tokenizer = {"file": str(folder / "tokenizer.json")}
    paths = sorted(folder.glob("a-*.bin" if kind == "bin" else "a-*.zst"))
    job = {
        "schema": 1, "name": f"grown-{kind}", "seed": 2, "tokenizer": tokenizer, "epochs": 3,
        "batch": {"rows": 4, "row_tokens": 64},
        "defaults": {"shuffle": shuffle},
    }  # fmt: skip
    first = [str(path) for number, path in enumerate(paths) if number not in late]
    shard_of = np.repeat(np.arange(6), 60)
    return Grown(
        corpus,
        job | {"sources": {"a": {"paths": first}}},
        job | {"sources": {"a": {"paths": [str(path) for path in paths]}}},
        np.isin(shard_of, late),
    )


@pytest.mark.parametrize("kind", GROWN)
@pytest.mark.parametrize("place", ["behind", "between", "elsewhere"])
def test_appended_shards_take_part_from_the_next_pass_on(
    start_node: Any, node: Node, tmp_path: Path, kind: str, place: str
) -> None:
    late = (1, 5) if place == "between" else (4, 5)
    case = grown_case(tmp_path / "c", kind, late)
    first = read_ledger(node, case.corpus, case.before, {"dp": 1}, 11)
    there = start_node() if place == "elsewhere" else node  # with nothing but the state
    second = read_ledger(there, case.corpus, case.after, {"dp": 2}, 9, state=first.state(11))
    third = read_ledger(there, case.corpus, case.after, {"dp": 1}, None, state=second.state(20))
    delivered = (first + second + third).delivered()
    for document, (start, size) in enumerate(
        zip(case.corpus.firsts, case.corpus.sizes, strict=True)
    ):
        times = 2 if case.is_later[document] else 3
        assert (delivered[start : start + size] == times).all(), (document, times)
    # In its first pass nothing but the order is as if they had never come.
    alone = read_ledger(node, case.corpus, case.before, {"dp": 1}, 20)
    epochs = [StreamState.decode(first.states[step]).epoch[0] for step in (1, 11)]
    assert epochs == [0, 0]
    both = (first + second).rows()
    same = [step for step in range(20) if both[step] == alone.rows()[step]]
    assert len(same) >= 12, same


def test_a_stream_that_runs_does_not_take_a_state_with_more_shards(
    node: Node, tmp_path: Path
) -> None:
    case = grown_case(tmp_path / "c", "bin", (4, 5))
    first = read_ledger(node, case.corpus, case.before, {"dp": 1}, 5)
    with node.connect(case.after, {"dp": 1}, 0) as data:
        next(iter(next(iter(data.train))))
        with pytest.raises(UsageError, match="connect again"):
            data.train.load_state_dict(first.state(5))


def test_a_name_that_the_state_was_written_under_is_no_change(
    node: Node, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """Jobs of one digest ran under two names; which of them wrote a state, it does not say."""
    mine, other = case.job | {"name": "zz-mine"}, case.job | {"name": "aa-other"}
    first = read_ledger(node, case.corpus, mine, {"dp": 1}, 5)
    read_ledger(node, case.corpus, other, {"dp": 1}, 2, state=first.state(5))
    caplog.clear()
    edited = mine | {"seed": 99}
    read_ledger(node, case.corpus, edited, {"dp": 1}, 2, state=first.state(5), accept=["seed"])
    told = [it.getMessage() for it in caplog.records if "was changed" in it.getMessage()]
    assert any("seed: 12 -> 99" in line for line in told)
    assert not any(": name: " in line for line in told)
