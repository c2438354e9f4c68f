"""Validation streams of sources with media: what was held out, all of it, the same on every mesh."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from msd_client.joined_job import Data
from msd_daemon.config.resolve import resolve_job
from tests.conftest import StartNode
from tests.support.media_corpus import corpus_job
from tests.support.media_ledger import MediaLedger, copy_of, read_media
from tests.support.media_oracle import PayloadOracle, Segment
from tests.support.media_writers import write_corpus

pytestmark = pytest.mark.processes

HELD = ("captions", "hub", "qa", "saved")


def test_a_pass_is_what_training_never_sees(start_node: StartNode, tmp_path: Path) -> None:
    sources, _ = write_corpus(tmp_path / "data", 8)
    job = corpus_job(
        tmp_path / "data", sources, loaders={"val": {"from": list(HELD), "rows": 8}}, epochs=1
    )
    resolved = resolve_job(job, tmp_path, store_dir=tmp_path / "store")
    oracle = PayloadOracle(job, resolved.media, is_validation=True)
    wanted: Counter[Segment] = Counter()
    for source in sources:
        if source.name in HELD:
            wanted += oracle.epoch(source)[0]
    assert {piece.source for piece in wanted} == set(HELD)
    node = start_node("--loader-workers", "2")
    passes: list[tuple[int, Counter[Segment], list[list[bytes]]]] = []
    for dp in (1, 2):
        parts: dict[tuple[int, int], MediaLedger] = {}

        def look(data: Data, step: Any, parts: dict[tuple[int, int], MediaLedger] = parts) -> None:
            if step.number not in (1, 4):
                return
            before = data.train.state_dict()
            ledger = parts.setdefault((step.number, data.rank), MediaLedger(list(HELD)))
            assert data.val.sources == ("captions", "hub", "qa", "saved")
            for own in data.val.once():
                for batch in own:
                    ledger.microbatches.append(copy_of(batch, own.number, data.rank))
                    del batch
                ledger.valid_tokens[own.number] = own.valid_tokens
            assert data.train.state_dict() == before

        trained = read_media(node, job, {"dp": dp}, 6, on_step=look)
        assert not trained.segments() & wanted
        for when in (1, 4):
            whole = parts[when, 0]
            for rank in range(1, dp):
                whole.microbatches += parts[when, rank].microbatches
            rows = whole.rows()
            passes.append((dp, whole.segments(), [rows[step] for step in sorted(rows)]))
    for dp, delivered, rows in passes:
        assert delivered == wanted, dp
        assert rows == passes[0][2], dp
