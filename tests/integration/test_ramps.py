"""Rows and row lengths that grow while training (E1), and one that another job brings."""

from __future__ import annotations

import numpy as np
import pytest

import msd_daemon
from msd_client.contract.errors import MeshMismatchError
from tests.support.node import RankRecord, global_rows, read_steps, run_ranks, text_job

pytestmark = pytest.mark.processes

RAMPS = {
    "rows": {"rows": {"0": 8, "4": 16, "9": 12}, "row_tokens": 128, "microbatch_rows": 2},
    "row_tokens": {
        "rows": 8,
        "row_tokens": {"0": 64, "5": 256, "10": 96},
        "microbatch_rows": 2,
        "row_segments_max": 32,
    },
    "both": {
        "rows": {"0": 16, "6": 8},
        "row_tokens": {"0": 64, "0.006M": 128, "0.012M": 256},
        "microbatch_rows": 2,
        "packing": "concat",
    },
}
STEPS = 16


def expected_rows(job, state=None, steps=STEPS):
    """Return by step the sorted rows, and the states before each step, of the inline stream."""
    rows, states = {}, {}
    with msd_daemon.inline(job, state=state) as stream:
        for step in stream:
            rows[step.number] = sorted(row.tokens.tobytes() for row in step.rows)
            states[step.number + 1] = stream.state_dict()
            if len(rows) == steps:
                return rows, states
    return rows, states


@pytest.mark.parametrize("name", RAMPS)
def test_a_ramp_is_the_same_stream_on_any_mesh_and_from_any_state(start_node, tmp_path, name):
    node = start_node()
    job = text_job(tmp_path, batch=RAMPS[name])
    rows, states = expected_rows(job)
    sizes = {step: (len(found), len(found[0]) // 4) for step, found in rows.items()}
    assert len(set(sizes.values())) >= 3, sizes
    record = run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)[0]
    assert {step: sorted(found) for step, found in record.rows.items()} == rows
    assert record.states == states
    two = run_ranks(node, job, {"dp": 2}, STEPS, keep_states=True)
    assert global_rows(two, [0, 1]) == rows
    for step in (5, 6, 10):
        again = run_ranks(node, job, {"dp": 2}, STEPS - step, state=states[step])
        assert global_rows(again, [0, 1]) == {s: rows[s] for s in range(step, STEPS)}


def test_a_step_tells_its_microbatches_and_a_mesh_must_fit_every_value(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path, batch=RAMPS["rows"])
    counts = []
    with node.connect(job, {"dp": 1}, 0) as data:
        read_steps(
            data, RankRecord(), 11, keep_states=False,
            on_step=lambda data, step, record: counts.append(step.microbatches),
        )  # fmt: skip
    assert counts == [4] * 4 + [8] * 5 + [6] * 2
    with pytest.raises(MeshMismatchError, match=r"rows 12 .* dp 4"):
        node.connect(job, {"dp": 4}, 0)


@pytest.mark.parametrize("row_tokens", [64, 256])
def test_another_shape_at_a_resume_keeps_the_sample_stream(start_node, tmp_path, row_tokens):
    node = start_node()
    job = text_job(tmp_path, texts={"sources": 1}, epochs=2,
                   batch={"rows": 8, "row_tokens": 128, "microbatch_rows": 2})  # fmt: skip
    first = run_ranks(node, job, {"dp": 1}, 7, keep_states=True)[0]
    shape = {"rows": 4, "row_tokens": row_tokens, "microbatch_rows": 1}
    other = {**job, "batch": {**shape, "microbatch_rows": 2}}
    rest = run_ranks(node, other, {"dp": 2}, None, state=first.states[7], keep_states=True)
    assert rest[0].steps[0] == 7
    plain = run_ranks(node, job, {"dp": 1}, None)[0]

    def tokens_of(rows):
        joined = np.concatenate([np.frombuffer(row, "<i4") for row in rows])
        return np.bincount(joined, minlength=257)

    whole = tokens_of(row for rows in plain.rows.values() for row in rows)
    parts = tokens_of(
        [row for rows in first.rows.values() for row in rows]
        + [row for record in rest for rows in record.rows.values() for row in rows]
    )
    # Every token of both epochs once, whatever the shape; 0 is padding here.
    assert np.array_equal(parts[1:], whole[1:])
