"""Lineage of eight formats and modalities: each word that ranks were given tells its record."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from tests.support.media_corpus import (
    FIRST_WORD,
    Item,
    MadeSource,
    Record,
    Turn,
    corpus_job,
)
from tests.support.media_ledger import MediaLedger, Microbatch, read_media
from tests.support.media_writers import write_corpus
from tests.support.node import running_node
from tests.support.told import run_msdctl

pytestmark = pytest.mark.processes

SEED = int(os.environ.get("MSD_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
STEPS = 16


@dataclass
class Run:
    sources: list[MadeSource]
    ledger: MediaLedger
    state_dir: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    print(f"MSD_TEST_SEED={SEED}")
    folder = tmp_path_factory.mktemp("formats")
    sources, _ = write_corpus(folder, SEED)
    job = corpus_job(folder, sources) | {"name": "formats"}
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as node:
        ledger = read_media(node, job, {"dp": 2}, STEPS)
        yield Run(sources, ledger, node.folder / "state")


def words_of(record: Record) -> Iterator[int]:
    for part in record.parts:
        inner = part.parts if isinstance(part, Turn) else (part,)
        for words in inner:
            if not isinstance(words, Item):
                yield from words


def test_rows_name_the_records_whose_words_were_given(run: Run) -> None:
    records = {
        word: (source.name, shard, record)
        for source in run.sources
        for shard, own in enumerate(source.shards)
        for record in own
        for word in words_of(record)
    }
    given = {(one.step, one.rank, one.number): one for one in run.ledger.microbatches}
    keyed, formats, items = set(), set(), 0
    names: dict[tuple[str, str, Any, int], Record] = {}
    for step in range(STEPS):
        told = msd_daemon.lineage("formats", step, state_dir=run.state_dir)
        cells = 0
        for row in told.rows:
            (rank,) = row.ranks
            batch = given[step, rank, row.microbatch]
            tokens = batch.fields["tokens"][row.row, row.column : row.column + row.length]
            words = [word for word in tokens.tolist() if word >= FIRST_WORD]
            cells += row.length
            formats.add(row.source)
            assert len(row.media) == len(items_in(batch, row)), SEED
            items += len(row.media)
            for word in words:
                source, _, record = records[word]
                assert row.source == source, SEED
                # One place of one shard is one record.
                name = (row.shard, row.source, row.shard_block, row.place)
                assert names.setdefault(name, record) is record, SEED
                if row.key:
                    assert row.key == record.key, SEED
                    keyed.add(source)
        assert cells == sum(
            int(
                (
                    np.repeat(one.fields["segment_source"], np.diff(one.fields["cu_seqlens"])) >= 0
                ).sum()
            )
            for one in run.ledger.microbatches
            if one.step == step
        )
    assert formats == {source.name for source in run.sources}
    assert len(keyed) >= 2
    assert items > 20
    assert len({id(record) for record in names.values()}) == len(names)


def items_in(batch: Microbatch, row: Any) -> list[int]:
    """Return the items of a segment of a microbatch."""
    begin = row.row * batch.fields["tokens"].shape[1] + row.column
    return [
        number
        for number, (_, item) in enumerate(batch.items())
        if begin <= item.place < begin + row.length
    ]


def test_what_formats_hold_is_verified_with_its_content(run: Run, capsys: Any) -> None:
    code, found, _ = run_msdctl(
        capsys, "verify", "formats", "--steps", f"0:{STEPS}", "--content", "--state-dir",
        run.state_dir,
    )  # fmt: skip
    assert (code, found["verified"], len(found["content"])) == (0, STEPS, STEPS), SEED


def test_records_of_every_format_are_found_again(run: Run) -> None:
    told = msd_daemon.lineage("formats", STEPS // 2, state_dir=run.state_dir)
    seen = set()
    for row in told.rows:
        if row.source in seen:
            continue
        seen.add(row.source)
        name = f"{Path(row.shard).name}:{row.place}"
        found = msd_daemon.find("formats", row.source, name, state_dir=run.state_dir)
        assert row in [one for each in found.occurrences for one in each.deliveries], (name, SEED)
    assert len(seen) >= 4
