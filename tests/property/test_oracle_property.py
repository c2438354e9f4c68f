"""The reference reader against an oracle that was written from the documents alone.

Random small jobs: rows, labels, positions and counts must be the same, every token is accounted
for, and a state continues the stream wherever it was taken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import msd_daemon
from federation.planning.sampling import WRAPPED
from msd_client.contract.errors import DataError, SourceExhaustedError
from msd_client.contract.state import DROPPED_COLUMNS, StreamState
from msd_daemon.inline_reader import InlineStream
from tests.support.ledger import Corpus, row_bytes, settle
from tests.support.oracle import Exhausted, NothingToTrainError, Oracle, Source

STEPS = 14


def rows_of(step: Any) -> list[bytes]:
    return [row_bytes(row.tokens, row.labels, row.position_ids) for row in step.rows]


def compare(
    corpus: Corpus,
    job: Mapping[str, Any],
    sources: list[Source],
    cut: int = -1,
    changes: Mapping[int, Mapping[str, float]] | None = None,
    steps: int = STEPS,
) -> int:
    """Read both streams; return the steps that they have."""
    oracle = Oracle(job, sources, changes)
    delivered = np.zeros(corpus.vocabulary, np.int64)
    stream = msd_daemon.inline(job)
    state = stream.state_dict()
    count = 0
    expected = oracle.steps(steps)
    while count < steps:
        if count == cut:
            stream.close()
            stream = msd_daemon.inline(job, state=state)
        if changes and count in changes:
            stream.set_mixture(changes[count])
        try:
            wanted = next(expected, None)
        except (Exhausted, NothingToTrainError) as error:
            event(type(error).__name__)
            with pytest.raises(DataError) as caught:
                stream.next_step()
            assert isinstance(caught.value, SourceExhaustedError) == isinstance(error, Exhausted)
            break
        step = stream.next_step()
        if wanted is None:
            event(f"ended, {job.get('end', 'pad')}")
            assert step is None
            check_end(stream, oracle)
            break
        assert step is not None
        assert step.number == wanted.number
        assert rows_of(step) == rows_of(wanted), f"step {count}"
        assert step.valid_tokens == wanted.valid_tokens
        for row, wanted_row in zip(step.rows, wanted.rows, strict=True):
            assert row.cu_seqlens.tolist() == wanted_row.cu_seqlens
            assert row.cu_seqlens_padded.tolist() == wanted_row.cu_seqlens_padded
            if row.loss_weights is not None:
                assert row.loss_weights.tolist() == wanted_row.loss_weights
        wanted_rows = [
            [(p.source, p.epoch, p.offset, p.length) for p in row.pieces] for row in wanted.rows
        ]
        assert wanted_rows == [
            [(s.source, s.epoch, s.offset, s.length) for s in row.segments] for row in step.rows
        ]
        for row in step.rows:
            delivered += np.bincount(row.tokens, minlength=len(delivered))
        state = stream.state_dict()
        count += 1
    stream.close()
    delivered[0] = 0
    decoded = StreamState.decode(state["msd"])
    names = decoded.source_names
    if isinstance(job["batch"]["row_tokens"], int) and not decoded.ending.endswith(WRAPPED):
        settle(corpus, job, sources, delivered, decoded)
    if cut != count:
        carried = [(piece.source, piece.offset, piece.length) for piece in oracle.carried()]
        names = decoded.source_names
        if count == STEPS:
            assert carried == [(names[c[0]], c[3], c[4]) for c in decoded.carried.T.tolist()]
    return count


def check_end(stream: InlineStream, oracle: Oracle) -> None:
    """What a finished stream's state says: it is over for good, and what is held or dropped."""
    state = stream.state_dict()
    decoded = StreamState.decode(state["msd"])
    carried = [(piece.source, piece.offset, piece.length) for piece in oracle.carried()]
    names = decoded.source_names
    if stream.job.end != "drop":  # a step that was not served is undrawn in the state
        assert carried == [(names[c[0]], c[3], c[4]) for c in decoded.carried.T.tolist()]
    dropped = decoded.dropped[DROPPED_COLUMNS.index("no_label")]
    for name, count in zip(names, dropped.tolist(), strict=True):
        assert count == sum(piece.source == name for piece in oracle.unlabelled)
    again = msd_daemon.inline(stream.job, state=state)
    assert again.next_step() is None
    assert again.state_dict() == state
    again.close()


def token_job(
    corpus: Corpus, folder: Path, batch: Mapping[str, Any], **changes: Any
) -> dict[str, Any]:
    job = {
        "schema": 1,
        "name": "ledger",
        "seed": 23,
        "tokenizer": {"vocabulary": corpus.vocabulary},
        "batch": dict(batch),
        "sources": corpus.write_tokens(folder),
    }
    return job | changes


@st.composite
def corpora(draw: st.DrawFn) -> dict[str, list[list[int]]]:
    row = 12
    length = st.one_of(
        st.integers(0, 2), st.integers(1, row), st.sampled_from([row, row + 1]),
        st.integers(row, 4 * row),
    )  # fmt: skip
    shard = st.lists(length, min_size=1, max_size=14)
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
    found = {name: draw(st.lists(shard, min_size=1, max_size=3)) for name in names}
    for shards in found.values():
        shards[0].append(draw(st.integers(2, row)))  # an epoch without a sample is another test's
    return found


@st.composite
def ramps(draw: st.DrawFn, first: list[int], later: list[int]) -> Any:
    """Return a value, or a schedule of values by step or by tokens."""
    value = draw(st.sampled_from(first))
    if draw(st.integers(0, 2)):
        return value
    found: dict[Any, int] = {0: value}
    is_tokens = draw(st.booleans())
    for step in draw(st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)):
        found[f"{step * 29 / 1e6:.6f}M" if is_tokens else step] = draw(st.sampled_from(later))
    return found


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_rows_of_random_jobs_are_the_oracles(data: st.DataObject) -> None:
    lengths = data.draw(corpora())
    corpus = Corpus(lengths)
    names = corpus.names
    batch: dict[str, Any] = {
        "rows": data.draw(ramps([1, 2, 3, 4], [1, 2, 4, 6])),
        "row_tokens": data.draw(ramps([12], [6, 12, 18, 24])),
        "packing": data.draw(st.sampled_from(["best_fit", "best_fit_even", "concat", "padded"])),
        "long": data.draw(st.sampled_from(["split", "truncate", "skip"])),
        "pad_id": 0,
    }
    if batch["packing"] != "concat":
        batch["segment_multiple"] = data.draw(st.sampled_from([1, 1, 2, 3]))
    if batch["packing"].startswith("best_fit") and data.draw(st.booleans()):
        batch["row_segments_max"] = data.draw(st.integers(1, 6))
    shuffle = {
        "is_shuffled": data.draw(st.booleans()),
        "window_shards": data.draw(st.integers(1, 3)),
        "window_records": data.draw(st.integers(1, 8)),
        "window_bytes": data.draw(st.sampled_from([16, 100, 4096])),
        "block_records": data.draw(st.integers(1, 9)),
        "block_bytes": data.draw(st.sampled_from([64, 300, 4096])),
    }
    ends = {name: data.draw(st.sampled_from(["repeat"] * 4 + ["stop", "drop"])) for name in names}
    epochs_max = {name: data.draw(st.sampled_from([None] * 5 + [1, 2])) for name in names}
    weights = st.lists(
        st.sampled_from([1.0, 0.0, 0.25, 1.0, 3.0, 17.5]),
        min_size=len(names),
        max_size=len(names),
    ).map(lambda found: dict(zip(names, found if any(found) else [1.0] * len(names), strict=True)))
    mixture = {"unit": data.draw(st.sampled_from(["tokens", "samples"])), 0: data.draw(weights)}
    if data.draw(st.booleans()):
        mixture[data.draw(st.integers(1, 6))] = data.draw(weights)
    changes = {}
    if data.draw(st.booleans()):
        changes = {data.draw(st.integers(0, 8)): data.draw(weights)}
    ends_of_stream = [{}, {}, {"epochs": 2}, {"epochs": 3}, {"tokens": 177}, {"steps": 5}]
    end = data.draw(st.sampled_from(ends_of_stream)) | {
        "end": data.draw(st.sampled_from(["pad", "drop", "wrap"])),
        "ignore": data.draw(st.sampled_from([-100, -100, "loss_mask"])),
    }
    loss_weights = {name: data.draw(st.sampled_from([1.0, 1.0, 0.5])) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        job = token_job(
            corpus,
            Path(folder) / "c",
            batch,
            mixture=mixture,
            documents=data.draw(st.sampled_from(["separate", "joined"])),
            labels=data.draw(st.sampled_from(["shifted", "aligned"])),
            **end,
        )
        for name, section in job["sources"].items():
            section |= {"shuffle": shuffle, "at_exhaustion": ends[name]}
            section["loss_weight"] = loss_weights[name]
            if epochs_max[name]:
                section["max_epochs"] = epochs_max[name]
        sources = [
            replace(
                source,
                at_exhaustion=ends[source.name],
                max_epochs=epochs_max[source.name],
                loss_weight=loss_weights[source.name],
            )
            for source in corpus.oracle_sources(**shuffle)
        ]
        cut = data.draw(st.integers(-1, 9))
        event(f"steps {compare(corpus, job, sources, cut, changes) // 5}")


KINDS = {"a": "", "b": "zst", "c": "gz"}


@pytest.mark.parametrize("packing", ["best_fit", "best_fit_even", "concat"])
def test_jsonl_and_streams_of_many_blocks_are_in_the_oracles_order(
    tmp_path: Path, packing: str
) -> None:
    rng = np.random.default_rng(9)
    corpus = Corpus(
        {
            name: [rng.integers(0, 40, rng.integers(20, 90)).tolist() for _ in range(shards)]
            for name, shards in (("a", 5), ("b", 7), ("c", 2))
        }
    )
    shuffle: dict[str, Any] = {
        "window_shards": 2,
        "window_records": 16,
        "block_bytes": 4096,
        "stream_block_records": 13,
        "interleave": 3,
    }
    job: dict[str, Any] = {
        "schema": 1,
        "name": "texts",
        "seed": 4,
        "tokenizer": {"file": str(tmp_path / "c" / "tokenizer.json")},
        "batch": {"rows": 8, "row_tokens": 64, "packing": packing},
        "sources": corpus.write_texts(tmp_path / "c", KINDS),
        "mixture": {"unit": "tokens", 0: {"a": 2, "b": 3, "c": 2}},
        "defaults": {"shuffle": shuffle},
    }
    assert compare(corpus, job, corpus.oracle_sources(KINDS, **shuffle), 5) == STEPS


@pytest.mark.parametrize(
    ("seed", "longest", "segments_max"), [(1, 300, None), (2, 90, 3), (3, 20, 2), (4, 66, 8)]
)
def test_packing_of_many_carried_and_many_long_fragments_is_the_oracles(
    tmp_path: Path, seed: int, longest: int, segments_max: int | None
) -> None:
    rng = np.random.default_rng(seed)
    corpus = Corpus(
        {
            name: [(longest * rng.random(400) ** power).astype(int).tolist()]
            for name, power in (("flat", 1), ("steep", 4))
        }
    )
    batch: dict[str, Any] = {"rows": 9, "row_tokens": 64}
    if segments_max is not None:
        batch["row_segments_max"] = segments_max
    job = token_job(corpus, tmp_path / "c", batch)
    assert compare(corpus, job, corpus.oracle_sources(), 20, steps=40) == 40


def test_the_end_of_a_document_waits_for_its_beginning_as_the_oracle_says(tmp_path: Path) -> None:
    # Carried pieces of more than half a row leave full pieces no row, and their short rests one.
    corpus = Corpus({"only": [[7] * 11 + [15, 27, 14, 15] * 3 + [7] * 9 + [13] * 9]})
    job = token_job(corpus, tmp_path / "c", {"rows": 4, "row_tokens": 12})
    job["defaults"] = {"shuffle": False}
    sources = corpus.oracle_sources(is_shuffled=False)
    assert compare(corpus, job, sources, 5, steps=12) == 12
