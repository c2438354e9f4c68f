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
    SourceExhaustedError,
    StateMismatchError,
    UsageError,
)
from msd_client.contract.state import StreamState
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


def one_source(folder: Path, texts: list[str], batch: dict[str, Any], **changes: Any) -> Any:
    """Return the stream of one source in file order, its ids the texts' bytes."""
    (folder / "only.jsonl").write_bytes(json_lines(texts))
    section = {"paths": "only.jsonl", "shuffle": False, "loss_weight": changes.pop("weight", 1)}
    job = job_map(tokenizer={"bytes": True}, sources={"only": section}, batch=batch, **changes)
    return msd_daemon.inline(job, base_dir=folder)


def test_segments_in_multiples_own_their_padding(tmp_path: Path) -> None:
    batch = {"rows": 2, "row_tokens": 16, "segment_multiple": 4, "microbatch_rows": 2}
    step = one_source(tmp_path, ["abcde", "xyz", "qr"], batch, epochs=1).next_step()
    row, other = step.rows
    assert row.cu_seqlens.tolist() == [0, 5, 8, 10]
    assert row.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    assert row.tokens.tolist() == [*b"abcde", 0, 0, 0, *b"xyz", 0, *b"qr", 0, 0]
    assert row.position_ids.tolist() == [*range(8), *range(4), *range(4)]
    ignored = [-100]
    assert row.labels.tolist() == [
        *b"bcde", *ignored * 4, *b"yz", *ignored * 2, *b"r", *ignored * 3,
    ]  # fmt: skip
    assert other.cu_seqlens.tolist() == other.cu_seqlens_padded.tolist() == [0, 16]
    (both,) = step.microbatches()
    assert both.cu_seqlens.tolist() == [0, 5, 8, 10, 26]
    assert both.cu_seqlens_padded.tolist() == [0, 8, 12, 16, 32]
    assert both.segment_source.tolist() == [0, 0, 0, -1]
    assert step.valid_tokens == 4 + 2 + 1


def test_boundaries_of_documents_of_5_and_3_in_multiples_of_4(tmp_path: Path) -> None:
    batch = {"rows": 1, "row_tokens": 12, "segment_multiple": 4}
    (row,) = one_source(tmp_path, ["abcde", "xyz"], batch, epochs=1).next_step().rows
    assert row.cu_seqlens.tolist() == [0, 5, 8]
    assert row.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("labels", ["shifted", "aligned"])
def test_joined_documents_meet_where_no_padding_lies_between(tmp_path: Path, labels: str) -> None:
    batch = {"rows": 1, "row_tokens": 16, "segment_multiple": 4}
    stream = one_source(
        tmp_path, ["abcd", "efgh", "xyz"], batch, epochs=1, documents="joined", labels=labels
    )
    step = stream.next_step()
    row = step.rows[0]
    assert row.tokens.tolist() == [*b"abcdefghxyz", 0, 0, 0, 0, 0]
    wanted = [*b"bcdefghxyz", *[-100] * 6]
    assert row.labels.tolist() == (wanted if labels == "shifted" else [-100, *wanted[:-1]])
    assert step.valid_tokens == 10


def test_a_loss_mask_leaves_ids_everywhere(tmp_path: Path) -> None:
    batch = {"rows": 1, "row_tokens": 8, "pad_id": 7}
    stream = one_source(tmp_path, ["abc", "xy"], batch, epochs=1, ignore="loss_mask", weight=0.5)
    step = stream.next_step()
    (row,) = step.rows
    assert row.labels.tolist() == [*b"bc", 7, *b"y", 7, 7, 7, 7]
    assert row.loss_weights is not None
    assert row.loss_weights.dtype == np.float32
    assert row.loss_weights.tolist() == [0.5, 0.5, 0, 0.5, 0, 0, 0, 0]
    (batch_of_row,) = step.microbatches()
    assert batch_of_row.loss_weights.tolist() == [row.loss_weights.tolist()]
    assert step.valid_tokens == 3
    plain = one_source(tmp_path, ["abc", "xy"], batch, epochs=1).next_step()
    assert plain.rows[0].loss_weights is None
    assert plain.microbatches()[0].loss_weights is None


def test_rows_grow_and_no_token_is_lost(tmp_path: Path) -> None:
    text = "".join(chr(33 + place) for place in range(90))
    batch = {
        "rows": {0: 1, 1: 2},
        "row_tokens": {0: 8, "0.000020M": 16},
        "packing": "concat",
        "microbatch_rows": 1,
    }
    stream = one_source(tmp_path, [text], batch, epochs=1)
    steps = list(stream)
    shapes = [(len(step.rows), len(step.rows[0].tokens)) for step in steps]
    assert shapes == [(1, 8), (2, 8), (2, 16), (2, 16), (2, 16)]
    tokens = [token for step in steps for row in step.rows for token in row.tokens.tolist()]
    assert tokens == [*text.encode(), *[0] * 30]


def test_a_state_goes_on_in_rows_of_another_shape(tmp_path: Path) -> None:
    texts = ["a" * 5, "b" * 21, "c" * 3, "d" * 9]
    batch = {"rows": 2, "row_tokens": 8, "packing": "concat"}
    first = one_source(tmp_path, texts, batch, epochs=1)
    tokens = [row.tokens.tolist() for row in first.next_step().rows]
    state = first.state_dict()
    other = one_source(tmp_path, texts, batch | {"rows": 1, "row_tokens": 12}, epochs=1)
    other.load_state_dict(state)
    assert StreamState.decode(other.state_dict()["msd"]).job_digest == other.job.digest()
    tokens += [row.tokens.tolist() for step in other for row in step.rows]
    assert bytes(token for row in tokens for token in row if token).decode() == "".join(texts)


@pytest.mark.parametrize(
    ("end", "wanted"),
    [("pad", b"abcdefghij\0\0"), ("drop", b"abcdefgh"), ("wrap", b"abcdefghijab")],
)
def test_tails_of_sources_that_may_be_read_once(tmp_path: Path, end: str, wanted: bytes) -> None:
    batch = {"rows": 1, "row_tokens": 4, "packing": "concat"}
    (tmp_path / "only.jsonl").write_bytes(json_lines(["abcdefghij"]))
    section = {"paths": "only.jsonl", "max_epochs": 1, "at_exhaustion": "stop"}
    job = job_map(tokenizer={"bytes": True}, sources={"only": section}, batch=batch, end=end)
    stream = msd_daemon.inline(job, base_dir=tmp_path)
    tokens = [token for step in stream for row in step.rows for token in row.tokens.tolist()]
    assert bytes(tokens) == wanted
    state = stream.state_dict()
    stream.close()
    with msd_daemon.inline(job, base_dir=tmp_path, state=state) as again:
        assert again.next_step() is None
        assert again.state_dict() == state


def test_an_epoch_without_a_sample_says_what_was_wrong(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"{broken\n[]\n")
    section = {"paths": "bad.jsonl", "on_error": {"policy": "skip", "budget_ratio": 1.0}}
    stream = msd_daemon.inline(job_map(sources={"bad": section}), base_dir=tmp_path)
    with pytest.raises(SourceExhaustedError, match=r"holds no sample; .*bad\.jsonl") as caught:
        stream.next_step()
    assert "remove the source" in caught.value.message


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


def test_a_job_file_that_cannot_be_read_is_told_as_a_trainer_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"job file /nope\.yaml can't be read: No such file"):
        msd_daemon.inline("/nope.yaml")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        msd_daemon.inline(folder)
    (folder / "bad.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="can't be read"):
        msd_daemon.inline(folder / "bad.yaml")


@pytest.mark.parametrize("job", [None, 5, b"job.yaml"])
def test_what_is_no_job_is_refused(job: Any) -> None:
    with pytest.raises(UsageError, match="pass the path of a job file"):
        msd_daemon.inline(job)


def test_a_stream_shows_where_it_is(folder: Path) -> None:
    stream = msd_daemon.inline(folder / "job.yaml", dp=2)
    next(iter(stream))
    assert repr(stream) == "InlineStream('small', 2 DP groups, next step 1)"
