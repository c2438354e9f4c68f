"""msdctl find for every record of a run, against the ledger of what its ranks were given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from msd_client.contract.errors import ConfigError, NotFoundError
from tests.support.ledger import Corpus, Given, read_ledger
from tests.support.node import Node, run_ranks, running_node, text_job
from tests.support.told import run_msdctl

pytestmark = pytest.mark.processes

KINDS = {"plain": "", "zst": "zst"}
DOCUMENTS = 13
FIRST_STEPS = 9
REWOUND_TO = 6
LAST_STEP = 15


@dataclass
class Run:
    """Two generations over more than a pass: the second begins before the first one ended."""

    corpus: Corpus
    state_dir: Path
    first: list[Given]
    second: list[Given]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n")) as running:
        yield running


@pytest.fixture(scope="module")
def run(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(6)
    lengths = {
        name: [[0, 150, *rng.integers(1, 90, DOCUMENTS - 2).tolist()] for _ in range(2)]
        for name in KINDS
    }
    corpus = Corpus(lengths)
    job = {
        "name": "found",
        "seed": 4,
        "tokenizer": {"file": str(folder / "data" / "tokenizer.json")},
        "sources": corpus.write_texts(folder / "data", KINDS),
        "batch": {"rows": 4, "row_tokens": 64, "microbatch_rows": 2},
    }
    first = read_ledger(node, corpus, job, {"dp": 2}, FIRST_STEPS)
    steps = LAST_STEP - REWOUND_TO
    second = read_ledger(node, corpus, job, {"dp": 1}, steps, state=first.state(REWOUND_TO))
    return Run(corpus, node.folder / "state", first.given, second.given)


def deliveries(run: Run, source: int, number: int) -> Counter[tuple[int, ...]]:
    """Return what ranks were given of a document: (generation, step, rank, microbatch, offset, length)."""
    found: Counter[tuple[int, ...]] = Counter()
    for generation, given in ((1, run.first), (2, run.second)):
        for one in given:
            for _, start, end in one.segments():
                piece = run.corpus.piece_of(one.tokens.reshape(-1)[start:end])
                if piece[:1] + piece[2:3] == (run.corpus.names[source], number):
                    place = (generation, one.step, one.rank, one.microbatch)
                    found[*place, piece.offset, piece.length] += 1
    return found


def told_deliveries(found: Any) -> Counter[tuple[int, ...]]:
    """Return what `find` says of the steps that ranks have read."""
    last = {1: FIRST_STEPS, 2: LAST_STEP}
    return Counter(
        (row.generation, row.step, rank, row.microbatch, row.offset, row.length)
        for one in found.occurrences
        for row in one.deliveries
        for rank in row.ranks
        if row.step < last[row.generation]
    )


@pytest.mark.parametrize("source", [0, 1])
def test_every_record_is_found_where_ranks_were_given_it(run: Run, source: int) -> None:
    oracle = run.corpus.oracle_sources(KINDS)[source]
    epochs = set()
    for number, document in enumerate(document for shard in oracle.shards for document in shard):
        at = number // DOCUMENTS
        kind = KINDS[oracle.name]
        shard = f"{oracle.name}-{at:03d}.jsonl{'.' if kind else ''}{kind}"
        name = f"{shard}:{document.begin_bytes}"
        found = msd_daemon.find("found", oracle.name, name, state_dir=run.state_dir)
        assert told_deliveries(found) == deliveries(run, source, number), name
        for one in found.occurrences:
            epochs.add(one.epoch)
            assert (one.tokens, one.name.place) == (len(document.tokens), document.begin_bytes)
            if not document.tokens and one.fate != "ahead":
                assert (one.fate, one.reason) in (("dropped", "empty"), ("before", ""))
            if one.reason == "the rest in steps before the kept ones":
                assert one.generation == 2
            elif one.fate == "delivered":
                assert sum(row.length for row in one.deliveries) == one.tokens
            for step in one.superseded:
                assert (one.generation, step >= REWOUND_TO) == (1, True)
    assert {0, 1} <= epochs


def test_what_is_not_there_is_refused(run: Run, capsys: Any) -> None:
    with pytest.raises(ConfigError, match="no source 'other': name one of plain, zst"):
        msd_daemon.find("found", "other", "a", state_dir=run.state_dir)
    for name in ("nobody", "plain-000.jsonl:1", "plain-777.jsonl:0"):
        with pytest.raises(NotFoundError, match=f"source plain has no record '{name}'"):
            msd_daemon.find("found", "plain", name, state_dir=run.state_dir)
    with pytest.raises(NotFoundError, match="keeps no generation 9"):
        msd_daemon.find("found", "plain", "a", generation=9, state_dir=run.state_dir)
    code, _, err = run_msdctl(
        capsys, "find", "found", "plain", "nobody", "--state-dir", run.state_dir
    )
    assert (code, "shard:place" in err) == (4, True)


def test_records_are_found_by_their_keys_in_any_format(
    node: Node, tmp_path: Path, capsys: Any
) -> None:
    job = text_job(tmp_path, texts={"documents": 60})
    job["name"] = "keyed"
    job["sources"] = {name: {"paths": path, "key": "id"} for name, path in job["sources"].items()}
    run_ranks(node, job, {"dp": 2}, 3)
    wanted = {}
    for step in range(3):
        code, told, _ = run_msdctl(
            capsys, "lineage", "keyed", "--step", step, "--socket", node.socket
        )
        assert code == 0
        for row in told["rows"]:
            wanted.setdefault(row["source"], []).append(row)
    assert sorted(wanted) == sorted(job["sources"])
    for source, rows in wanted.items():
        for row in rows[:: max(1, len(rows) // 4)]:
            assert row["key"].startswith(f"{source[1:]}-")
            code, found, _ = run_msdctl(
                capsys, "find", "keyed", source, row["key"], "--socket", node.socket
            )
            assert code == 0
            assert found["schema"] == "msd.find/1"
            told = [delivered for one in found["occurrences"] for delivered in one["deliveries"]]
            assert row in told
            names = {(one["name"]["shard"], one["name"]["place"]) for one in found["occurrences"]}
            assert names == {(row["shard"], row["place"])}


def test_long_records_are_found_with_what_was_cut_of_them(node: Node, tmp_path: Path) -> None:
    corpus = Corpus({"long": [[30, 200, 40, 50, 130, 20]]})
    for policy, fates in (
        ("skip", {"dropped": "long_skipped"}), ("truncate", {"delivered": "long_truncated"}),
    ):  # fmt: skip
        folder = tmp_path / policy
        job = {
            "name": policy,
            "tokenizer": {"file": str(folder / "tokenizer.json")},
            "sources": corpus.write_texts(folder, {"long": ""}),
            "batch": {"rows": 2, "row_tokens": 64, "microbatch_rows": 1, "long": policy},
            "defaults": {"shuffle": False},
        }
        run_ranks(node, job, {"dp": 1}, 6)
        document = corpus.oracle_sources({"long": ""})[0].shards[0][1]
        found = msd_daemon.find(
            policy, "long", f"long-000.jsonl:{document.begin_bytes}",
            state_dir=node.folder / "state",
        )  # fmt: skip
        one = found.occurrences[0]
        assert {one.fate: one.reason} == fates
        assert one.tokens == 200
        assert sum(row.length for row in one.deliveries) == (64 if policy == "truncate" else 0)
        assert found.occurrences[-1].fate in ("ahead", *fates)
