"""Slow records come in short runs, whatever a chunk could hold; the records are the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from federation.model.job import TokenizerSpec
from msd_daemon.sources import block_cursor
from msd_daemon.sources.block_cursor import ENCODE_NS_MAX, FIRST_RECORDS, RUN_NS_MAX, Pace
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.transforms.tokenizer import BytesTokenizer
from tests.support.sources import make_spec

MS = 1_000_000


class SlowTokenizer(BytesTokenizer):
    """Takes so long for a text, on a clock of its own."""

    def __init__(self, text_ns: int) -> None:
        super().__init__(TokenizerSpec("bytes"))
        self.text_ns = text_ns
        self.now_ns = 0
        self.batches: list[int] = []

    def encode_batch(self, texts):
        found = list(texts)
        self.now_ns += self.text_ns * len(found)
        self.batches.append(len(found))
        return super().encode_batch(found)


def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_ns: int):
    """Return the lengths of the runs, all tokens, and the sizes of the batches."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{number:03d}"}}\n' for number in range(200)))
    tokenizer = SlowTokenizer(text_ns)
    clock = SimpleNamespace(monotonic_ns=lambda: tokenizer.now_ns)
    monkeypatch.setattr(block_cursor, "time", clock)
    loader = SourceLoader(make_spec([path], max_epochs=1), 0, tokenizer, 1, 0, 1, None)
    runs, tokens = [], []
    while (draft := loader.next_chunk(1 << 20)) is not None:
        runs.append(len(draft.meta.lengths))
        tokens += [part for part in draft.payload if len(part)]
    return runs, np.concatenate(tokens).tolist(), tokenizer.batches


def test_slow_records_come_in_short_runs_and_are_the_same(tmp_path, monkeypatch):
    fast = read(tmp_path, monkeypatch, 1)
    slow = read(tmp_path, monkeypatch, 20 * MS)
    assert fast[1] == slow[1]
    assert max(fast[0]) == 200
    assert max(slow[2]) * 20 * MS <= ENCODE_NS_MAX
    assert max(slow[0]) * 20 * MS <= RUN_NS_MAX + ENCODE_NS_MAX
    assert slow[2][0] == FIRST_RECORDS


def test_a_record_that_takes_for_ever_is_alone(tmp_path, monkeypatch):
    runs, _, batches = read(tmp_path, monkeypatch, 10 * ENCODE_NS_MAX)
    assert batches[1:] == [1] * (200 - FIRST_RECORDS)
    assert runs == batches


def test_what_took_no_time_at_all_has_a_pace_too():
    pace = Pace()
    pace.took(0, 5)
    assert pace.records == FIRST_RECORDS
    pace.took(3, 0)
    assert pace.records == ENCODE_NS_MAX
