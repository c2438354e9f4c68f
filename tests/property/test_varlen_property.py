"""Varlen steps of random jobs against the oracle: the same segments on any mesh, from any state (E9)."""

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
from msd_client.contract.errors import DataError
from msd_client.contract.state import StreamState
from msd_daemon.inline_reader import InlineStep
from tests.support.ledger import Corpus, row_bytes, settle
from tests.support.oracle import Exhausted, NothingToTrainError, Oracle, OracleStep, Source

STEPS = 12


def held(step: InlineStep) -> list[tuple[Any, ...]]:
    """Return what a step holds segment by segment, in no order."""
    found = []
    for row in step.rows:
        bounds = row.cu_seqlens_padded.tolist()
        for segment, start, end in zip(row.segments, bounds, bounds[1:], strict=False):
            parts = (row.tokens, row.labels, row.position_ids)
            content = row_bytes(*(part[start:end] for part in parts))
            weights = None if row.loss_weights is None else row.loss_weights[start:end].tolist()
            piece = (segment.source, segment.epoch, segment.offset, segment.length)
            found.append((piece, content, weights))
    return sorted(found)


def held_by(step: OracleStep, *, has_weights: bool) -> list[tuple[Any, ...]]:
    found = []
    for row in step.rows:
        (piece,) = row.pieces
        content = row_bytes(row.tokens, row.labels, row.position_ids)
        key = (piece.source, piece.epoch, piece.offset, piece.length)
        found.append((key, content, row.loss_weights if has_weights else None))
    return sorted(found)


def check_places(step: InlineStep, batch: Mapping[str, Any], dp: int) -> None:
    """Check that each group has the step's microbatches, none above its caps."""
    count = step.plan.microbatch_count
    assert len(step.rows) == dp * count
    for row in step.rows:
        assert len(row.tokens) == step.plan.row_tokens
        assert len(row.segments) <= batch.get("row_segments_max", len(row.tokens))
    for group in range(dp):
        assert len(step.microbatches(group)) == count


def compare(
    corpus: Corpus,
    job: Mapping[str, Any],
    sources: list[Source],
    dps: tuple[int, int],
    cut: int,
    changes: Mapping[int, Mapping[str, float]],
) -> int:
    """Read both streams, on another mesh from a cut on; return the steps that they have."""
    expected = Oracle(job, sources, changes).steps(STEPS)
    delivered = np.zeros(corpus.vocabulary, np.int64)
    stream = msd_daemon.inline(job, dp=dps[0])
    state, count, dp = stream.state_dict(), 0, dps[0]
    while count < STEPS:
        if count == cut:
            stream.close()
            dp = dps[1]
            stream = msd_daemon.inline(job, state=state, dp=dp)
        if count in changes:
            stream.set_mixture(changes[count])
        try:
            wanted = next(expected, None)
        except (Exhausted, NothingToTrainError) as error:
            event(type(error).__name__)
            with pytest.raises(DataError):
                stream.next_step()
            break
        step = stream.next_step()
        if wanted is None:
            event(f"ended, {job['end']}")
            assert step is None
            break
        assert step is not None
        has_weights = step.rows[0].loss_weights is not None
        assert held(step) == held_by(wanted, has_weights=has_weights), f"step {count}"
        assert step.valid_tokens == wanted.valid_tokens
        check_places(step, job["batch"], dp)
        for row in step.rows:
            delivered += np.bincount(row.tokens, minlength=len(delivered))
        state = stream.state_dict()
        count += 1
    stream.close()
    delivered[0] = 0
    decoded = StreamState.decode(state["msd"])
    assert decoded.carried.shape[1] == 0
    is_plain = isinstance(job["batch"]["microbatch_tokens"], int)
    if is_plain and not decoded.ending.endswith(WRAPPED):
        settle(corpus, job, sources, delivered, decoded)
    return count


def schedules(first: list[int], later: list[int]) -> st.SearchStrategy[Any]:
    """Return a value, or a schedule of values by step or by tokens."""
    by_step = st.dictionaries(st.integers(1, 9), st.sampled_from(later), min_size=1, max_size=2)
    ramp = st.tuples(st.sampled_from(first), by_step, st.booleans()).map(
        lambda found: (
            {0: found[0]}
            | {(f"{s * 29 / 1e6:.6f}M" if found[2] else s): v for s, v in found[1].items()}
        )
    )
    return st.sampled_from(first) | ramp


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_varlen_steps_of_random_jobs_are_the_oracles_on_any_mesh(data: st.DataObject) -> None:
    draw = data.draw
    length = st.one_of(
        st.integers(2, 9), st.sampled_from([0, 1, 11, 12, 13, 24, 25]), st.integers(1, 40)
    )
    names = sorted(draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)))
    corpus = Corpus(
        {
            name: [[*draw(st.lists(length, min_size=1, max_size=12)), draw(st.integers(2, 12))]]
            for name in names
        }
    )
    batch = {
        "packing": "varlen",
        "step_tokens": draw(schedules([12, 30, 50], [20, 70])),
        "microbatch_tokens": draw(schedules([12, 12, 24], [6, 12, 24])),
        "long": draw(st.sampled_from(["split", "truncate", "skip"])),
        "segment_multiple": draw(st.sampled_from([1, 2, 3])),
    }
    if draw(st.booleans()):
        batch["row_segments_max"] = draw(st.integers(1, 6))
    weights = st.lists(st.sampled_from([1.0, 0.25, 3.0]), min_size=len(names), max_size=len(names))
    named = weights.map(lambda found: dict(zip(names, found, strict=True)))
    ending = {name: draw(st.sampled_from(["repeat", "repeat", "stop", "drop"])) for name in names}
    loss_weights = {name: draw(st.sampled_from([1.0, 0.5])) for name in names}
    ends = [{}, {"epochs": 2}, {"tokens": 177}, {"steps": 5}]
    with tempfile.TemporaryDirectory() as folder:
        job: dict[str, Any] = {
            "schema": 1,
            "name": "varlen",
            "seed": 23,
            "tokenizer": {"vocabulary": corpus.vocabulary},
            "batch": batch,
            "sources": corpus.write_tokens(Path(folder) / "c"),
            "mixture": {"unit": draw(st.sampled_from(["tokens", "samples"])), 0: draw(named)},
            "end": draw(st.sampled_from(["pad", "drop", "wrap"])),
            **draw(st.sampled_from(ends)),
        }
        for name, section in job["sources"].items():
            section |= {"at_exhaustion": ending[name], "loss_weight": loss_weights[name]}
        sources = [
            replace(
                source,
                at_exhaustion=ending[source.name],
                loss_weight=loss_weights[source.name],
            )
            for source in corpus.oracle_sources()
        ]
        changes = {draw(st.integers(0, 8)): draw(named)} if draw(st.booleans()) else {}
        dps = (draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([1, 3, 64])))
        count = compare(corpus, job, sources, dps, draw(st.integers(0, 9)), changes)
        event(f"steps {count // 4}")
