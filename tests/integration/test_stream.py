"""What ranks of a mesh are given: shapes, equal states, epochs. That it is the same stream whatever
serves it stands in test_digest.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.node import global_rows, run_ranks, text_job

STEPS = 12


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return text_job(tmp_path_factory.mktemp("data"), texts={"sources": 4})


@pytest.fixture(scope="module")
def oracle(job, tmp_path_factory):
    from tests.support.node import running_node

    with running_node(tmp_path_factory.mktemp("o"), "--loader-workers", "1") as node:
        records = run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)
    return records[0]


def test_four_ranks_get_batches_of_the_announced_shape(start_node, job):
    records = run_ranks(start_node(), job, {"dp": 2, "tp": 2}, 3)
    for record in records:
        assert record.steps == [0, 1, 2]
        assert all(len(rows) == 8 for rows in record.rows.values())
        assert all(len(row) == 256 * 4 for rows in record.rows.values() for row in rows)
    global_rows(records, [0, 0, 1, 1])
    assert records[0].rows != records[2].rows


def test_the_state_is_equal_on_all_ranks_and_small(start_node, job, oracle):
    records = run_ranks(start_node(), job, {"dp": 2, "tp": 2}, 5, keep_states=True)
    for record in records:
        assert record.states == {step: oracle.states[step] for step in range(1, 6)}
    assert len(oracle.states[5]["msd"]) < 64 * 1024


def test_two_epochs_of_a_small_source_repeat_its_documents_in_another_order(start_node, tmp_path):
    job = text_job(
        tmp_path, texts={"sources": 1, "documents": 60}, batch={"rows": 4, "row_tokens": 128}
    )
    records = run_ranks(start_node(), job, {"dp": 1}, 60)
    text = b"".join(
        np.frombuffer(row, "<i4").astype(np.uint8).tobytes()
        for rows in records[0].rows.values()
        for row in rows
    )
    assert text.count(b"<0:7>") >= 2
