"""`msd_daemon.inline`: what it takes, what it tells, what it refuses."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from msd_client.contract.errors import (
    ConfigError,
    JobError,
    MeshMismatchError,
    StateMismatchError,
    UsageError,
)
from msd_daemon.config.resolve import resolve_job
from msd_daemon.inline_reader import InlineStream
from tests.support.sources import ROOT, json_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "web.jsonl").write_bytes(json_lines(["abc", "de", "fghijklmnop", "q"] * 9))
    (tmp_path / "code.jsonl").write_bytes(json_lines(["0123", "45"] * 9))
    (tmp_path / "job.yaml").write_text(json.dumps(job_map()))
    return tmp_path


def job_map(**changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = {
        "schema": 1,
        "name": "small",
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 4, "row_tokens": 8, "microbatch_rows": 2},
        "sources": {"web": "web.jsonl", "code": "code.jsonl"},
    }
    return job | changes


def test_paths_are_those_of_the_job_file_or_of_base_dir(folder: Path) -> None:
    from_file = msd_daemon.inline(folder / "job.yaml")
    from_map = msd_daemon.inline(job_map(), base_dir=folder)
    resolved = msd_daemon.inline(resolve_job(job_map(), folder))
    assert isinstance(resolved, InlineStream)
    first, second, third = (next(iter(s)) for s in (from_file, from_map, resolved))
    for row, again, same in zip(first.rows, second.rows, third.rows, strict=True):
        assert np.array_equal(row.tokens, again.tokens)
        assert np.array_equal(row.tokens, same.tokens)
    with pytest.raises(JobError, match=r"sources\.web"):
        msd_daemon.inline(job_map(), base_dir=folder / "elsewhere")


def test_a_row_tells_where_its_pieces_come_from(folder: Path) -> None:
    texts = {"web": {"abc", "de", "fghijklmnop", "q"}, "code": {"0123", "45"}}
    epochs = set()
    for step in itertools.islice(msd_daemon.inline(folder / "job.yaml"), 30):
        for row in step.rows:
            used = 0
            for segment, end in zip(row.segments, row.cu_seqlens[1:].tolist(), strict=False):
                assert segment.column == used
                used += segment.length
                assert used == end
                piece = row.tokens[segment.column : used]
                assert any(
                    [*text.encode(), 256][segment.offset :][: segment.length] == piece.tolist()
                    for text in texts[segment.source]
                )
                assert 0 <= segment.index < 36
                epochs.add((segment.source, segment.epoch))
                assert row.labels[used - 1] == -100
                labels = row.labels[segment.column : used - 1]
                assert np.array_equal(labels, piece[1:])
            assert (row.tokens[used:] == 0).all()
            assert row.cu_seqlens[-1] == 8
    assert {("web", 0), ("code", 0), ("code", 1)} <= epochs


def test_microbatches_deal_every_row_once(folder: Path) -> None:
    step = next(iter(msd_daemon.inline(folder / "job.yaml", dp=2)))
    batches = [batch for group in range(2) for batch in step.microbatches(group)]
    assert sorted(row.number for batch in batches for row in batch.rows) == [0, 1, 2, 3]
    for batch in batches:
        assert batch.tokens.shape == batch.labels.shape == batch.position_ids.shape == (2, 8)
        assert batch.tokens.dtype == np.int32
        assert batch.labels.dtype == np.int64
        assert batch.cu_seqlens[-1] == 16
        assert 8 in batch.cu_seqlens
        assert len(batch.segment_source) == len(batch.cu_seqlens) - 1
    valid = sum(int((batch.labels != -100).sum()) for batch in batches)
    assert valid == step.valid_tokens
    with pytest.raises(UsageError, match="group 2 of 2"):
        step.microbatches(2)


def test_a_state_goes_back_in_the_same_stream(folder: Path) -> None:
    with msd_daemon.inline(folder / "job.yaml") as stream:
        fresh = stream.state_dict()
        first = [next(iter(stream)).rows for _ in range(3)]
        state = stream.state_dict()
        stream.load_state_dict(fresh)
        again = [next(iter(stream)).rows for _ in range(3)]
        assert stream.state_dict() == state
    for rows, same in zip(first, again, strict=True):
        assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in same]


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    stream = msd_daemon.inline(folder / "job.yaml")
    state = stream.state_dict()
    with pytest.raises(StateMismatchError, match='key "msd"'):
        stream.load_state_dict({})
    with pytest.raises(StateMismatchError, match="belongs to another job"):
        msd_daemon.inline(job_map(seed=5), base_dir=folder, state=state)
    with pytest.raises(MeshMismatchError, match="4"):
        msd_daemon.inline(folder / "job.yaml", dp=3)
    next(iter(stream))
    with pytest.raises(ConfigError, match="too late"):
        stream.set_mixture({"web": 1, "code": 0}, at_step=0)


def test_the_mixture_changes_from_the_next_step_on(folder: Path) -> None:
    stream = msd_daemon.inline(job_map(batch={"rows": 1, "row_tokens": 8, "packing": "concat"}),
                               base_dir=folder)  # fmt: skip
    next(iter(stream))
    assert stream.set_mixture({"web": 0, "code": 1}) == 1
    for step in itertools.islice(stream, 1, 5):
        assert {segment.source for row in step.rows for segment in row.segments} == {"code"}


def test_a_finite_stream_ends(folder: Path) -> None:
    stream = msd_daemon.inline(job_map(epochs=1), base_dir=folder)
    tokens = sum(segment.length for step in stream for row in step.rows for segment in row.segments)
    assert tokens == sum(len(text) + 1 for text in ["abc", "de", "fghijklmnop", "q"] * 9) + 8 * 9
    assert stream.next_step() is None


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, msd_daemon\n"
        "assert 'numpy' not in sys.modules and 'msgpack' not in sys.modules\n"
        "try:\n    msd_daemon.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "'nothing'" in done.stdout
