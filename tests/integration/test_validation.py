"""Validation streams of one job beside training (E13)."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import (
    BudgetError,
    JobError,
    MeshMismatchError,
    NotFoundError,
    UsageError,
)
from tests.support.node import run_ranks, text_job, wait_until

pytestmark = pytest.mark.processes

BATCH = {"rows": 8, "row_tokens": 128, "microbatch_rows": 2}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return text_job(
        tmp_path_factory.mktemp("data"),
        batch=BATCH,
        defaults={"hold_out": 0.2, "key": "id"},
        loaders={
            "train": {},
            "val": {"from": ["s0", "s1"], "rows": 16},
            "few": {"from": "s2", "part": "all", "steps": 2, "rows": 8},
        },
        mixture={0: {"s0": 1, "s1": 1, "s2": 1}},
        epochs=1,
    )


def one_pass(loader: Any) -> dict[int, list[tuple[bytes, int]]]:
    """Return by step: the rows of this rank and the valid tokens of their microbatch."""
    seen: dict[int, list[tuple[bytes, int]]] = {}
    for step in loader.once():
        for batch in step:
            rows = [row.tobytes() for row in batch.tokens]
            seen.setdefault(step.number, []).extend((row, batch.valid_tokens) for row in rows)
            del batch
    return seen


def documents_in(rows: Any) -> set[str]:
    text = b"\n".join(
        np.frombuffer(row, "<i4").clip(0, 255).astype(np.uint8).tobytes() for row in rows
    )
    import re

    return {match.decode() for match in re.findall(rb"<\d+:\d+>", text)}


def test_a_pass_gives_the_same_rows_on_every_call_and_mesh_and_leaves_training_alone(
    start_node, job
):
    node = start_node()
    passes: dict[tuple[str, int], list[dict[int, list[tuple[bytes, int]]]]] = {}
    states: list[dict[str, bytes]] = []

    def act(mesh_name):
        def on_step(data, step, record):
            if step.number in (2, 5):
                before = data.train.state_dict()
                found = passes.setdefault((mesh_name, data.rank), [])
                found.append(one_pass(data.val))
                assert data.train.state_dict() == before
                states.append(before)

        return on_step

    plain = run_ranks(node, job, {"dp": 1}, 8, keep_states=True)[0]
    one = run_ranks(node, job, {"dp": 1}, 8, keep_states=True, on_step=act("one"))[0]
    assert one.rows == plain.rows
    assert one.states == plain.states
    run_ranks(node, job, {"dp": 2, "tp": 2}, 8, on_step=act("four"))
    first, second = passes["one", 0]
    assert first == second
    whole = {step: sorted(row for row, _ in rows) for step, rows in first.items()}
    for number in (0, 1):
        assert passes["four", 0][number] == passes["four", 1][number]  # tp peers
        merged = {
            step: sorted(row for rank in (0, 2) for row, _ in passes["four", rank][number][step])
            for step in whole
        }
        assert merged == whole
    last = max(first)
    assert {len(rows) for rows in first.values()} == {16}
    assert any(valid == 0 for _, valid in first[last])  # the padded tail
    wait_until(lambda: not node.request("jobs")["jobs"], "the sessions to end")


def test_held_out_records_and_training_are_disjoint_and_together_everything(start_node, job):
    node = start_node()
    held: set[str] = set()
    trained: set[str] = set()

    def at_end(data):
        rows = [row for rows in one_pass(data.val).values() for row, _ in rows]
        held.update(documents_in(rows))

    record = run_ranks(node, job, {"dp": 1}, None, at_end=at_end)[0]
    trained = documents_in(row for rows in record.rows.values() for row in rows)
    in_val = {name for name in trained | held if name[1] in "01"}
    assert not trained & held
    assert len(in_val) == 600
    assert 60 < len(held) < 180  # 20 % of two sources of 300


def test_a_pass_of_all_records_may_be_cut_to_steps_and_left_early(start_node, job):
    node = start_node()
    with node.connect(job, {"dp": 1}, 0) as data:
        assert set(data.loaders) == {"train", "val", "few"}
        assert set(one_pass(data.few)) == {0, 1}  # before training began, too
        for step in itertools.islice(data.val.once(), 1):
            for _ in step:
                pass
        (first,) = (step.number for step in itertools.islice(data.train, 1))
        assert first == 0
        with pytest.raises(AttributeError, match="no loader 'test'; it has train, few, val"):
            _ = data.test
    with pytest.raises(NotFoundError, match="is over"):
        next(iter(data.val.once()))


def test_one_pass_of_a_stream_is_open_at_a_time(start_node, job):
    refusal = r"a pass of 'val' is still open here: finish it, or close\(\) the iterator"
    with start_node().connect(job, {"dp": 1}, 0) as data:
        whole = one_pass(data.val)
        early, late = data.val.once(), data.val.once()
        next(early)
        with pytest.raises(UsageError, match=refusal):
            data.val.once()
        with pytest.raises(UsageError, match=refusal):
            next(late)
        assert set(one_pass(data.few)) == {0, 1}
        early.close()
        assert one_pass(data.val) == whole
        dropped = data.val.once()
        next(dropped)
        del dropped
        gc.collect()
        assert one_pass(data.val) == whole


def test_what_passes_leave_is_told_once_a_stream(start_node, job, caplog):
    with start_node().connect(job, {"dp": 1}, 0) as data:
        for _ in range(2):
            for _ in data.few.once():
                pass
        assert data.few.skipped_microbatches == 4 * 4
        assert data.train.skipped_microbatches == data.val.skipped_microbatches == 0
    assert len([r for r in caplog.records if "were not taken" in r.getMessage()]) == 1


def test_what_is_trained_on_is_validated_whole_only_where_that_is_written(start_node, job):
    node = start_node()
    plain = {**job, "defaults": {}, "loaders": {"v": {"from": "s0"}}}
    with pytest.raises(JobError, match="s0 is trained on and holds nothing out"):
        node.connect(plain, {"dp": 1}, 0)
    plain["loaders"] = {"v": {"from": "s0", "part": "all", "steps": 1}}
    with node.connect(plain, {"dp": 1}, 0) as data:
        assert set(one_pass(data.v)) == {0}


def test_streams_share_one_budget_that_is_checked_at_connect(start_node, tmp_path, job):
    config = tmp_path / "daemon.toml"
    config.write_text('[memory]\nmemory_bytes = "40Mi"\n')
    node = start_node("--config", str(config))
    large = {**job, "loaders": {"val": {"from": "s0", "rows": 4096}}}
    big = {**large, "batch": {**BATCH, "row_tokens": 4096}}
    with pytest.raises(BudgetError, match=r"pool \d+, rings \d+, validation \d+"):
        node.connect(big, {"dp": 1}, 0)


def test_rows_of_a_stream_that_do_not_fit_the_mesh_are_refused_at_connect(start_node, job):
    node = start_node()
    odd = {**job, "loaders": {"val": {"from": "s0", "rows": 6}}}
    with pytest.raises(MeshMismatchError, match="rows 6"):
        node.connect(odd, {"dp": 2}, 0)
    with pytest.raises(JobError, match="holds nothing out"):
        node.connect({**odd, "defaults": {}, "loaders": {"v": {"from": "s0", "part": "held_out"}}},
                     {"dp": 1}, 0)  # fmt: skip
