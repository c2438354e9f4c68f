"""Any kept step of any run on any mesh: what lineage tells is what the planner planned there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.journal_reader import JournalReader
from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from msd_client.contract.errors import NotFoundError
from msd_client.contract.position import unpack_block_key
from msd_daemon.config.resolve import resolve_job
from msd_daemon.history.lineage_rows import LineageReader
from msd_daemon.history.runs import find_run
from msd_daemon.history.verify_steps import StepVerifier
from tests.support.journalled_run import planned_run
from tests.support.ledger import Corpus

MESHES: list[dict[str, int]] = [
    {},
    {"dp": 2, "tp": 2},
    {"dp": 8},
    {"pp": 2, "dp": 2, "cp": 2},
    {"pp": 3, "dp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
]
STEPS_MAX = 12
KINDS = {"plain": "", "zst": "zst"}


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    lengths = {name: [rng.integers(0, 120, 25).tolist() for _ in range(2)] for name in KINDS}
    folder, corpus = tmp_path_factory.mktemp("corpus"), Corpus(lengths)
    corpus.write_texts(folder, KINDS)
    return folder


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_lineage_tells_what_was_planned(corpus_dir: Path, data: Any) -> None:
    folder = corpus_dir
    draw = data.draw
    packing = draw(st.sampled_from(["best_fit", "concat", "padded"]))
    job = resolve_job(
        {
            "name": "any",
            "seed": draw(st.integers(0, 5)),
            "tokenizer": {"file": "tokenizer.json"},
            "sources": {name: f"{name}-*.jsonl*" for name in KINDS},
            "model": {
                "backbone": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
            },
            "batch": {
                "rows": 8,
                "row_tokens": 64,
                "microbatch_rows": 1,
                "packing": packing,
                "long": draw(st.sampled_from(["split", "truncate", "skip"]))
                if packing != "concat"
                else "split",
            },
            "epochs": 3,
        },
        folder,
    )
    mesh = draw(st.sampled_from(MESHES))
    tree = ClientPlaceTree.from_mesh(mesh)
    with tempfile.TemporaryDirectory() as state_dir:
        plans = planned_run(Path(state_dir), job, mesh, draw(st.integers(1, STEPS_MAX)), draw)
        run = find_run("any", Path(state_dir))
        first = draw(st.integers(0, len(plans) - 1), label="first")
        end = draw(st.integers(first + 1, len(plans)), label="end")
        rank = draw(st.sampled_from([None, *range(tree.rank_count)]), label="rank")
        with JournalReader(run.journal) as reader:
            kept = reader.holding(first)
            assert (kept.first, kept.end) == (0, len(plans))
            with LineageReader(run, reader, kept, first) as opened:
                told = list(opened.steps(end, rank))
            assert [step.step for step in told] == list(range(first, end))
            for step in told:
                check_step(step, plans[step.step], tree, rank, job)
            found = StepVerifier(run, reader).verify(first, end)
            assert (found.is_equal, found.verified) == (True, end - first)
            with pytest.raises(NotFoundError):
                reader.holding(len(plans))


def check_step(
    step: Any, plan: StepPlan, tree: ClientPlaceTree, rank: int | None, job: ResolvedJob
) -> None:
    places: dict[tuple[str, int, int], tuple[int, int, int]] = {}
    wanted = set()
    names = {}
    for number, row in enumerate(plan.row.tolist()):
        group = int(plan.row_dp[row])
        if rank is not None and tree.dp_group(rank) != group:
            continue
        wanted.add(
            (
                job.sources[int(plan.source[number])].name,
                unpack_block_key(int(plan.block_key[number])).epoch,
                int(plan.offset[number]), int(plan.length[number]),
                group, int(plan.row_microbatch[row]), int(plan.row_slot[row]),
                int(plan.column[number]), row,
            )
        )  # fmt: skip
        place = (group, int(plan.row_microbatch[row]), int(plan.row_slot[row]))
        names[*place, int(plan.column[number])] = (
            int(plan.source[number]), int(plan.block_key[number]), int(plan.index[number]),
        )  # fmt: skip
    assert wanted == {
        (
            row.source, row.epoch, row.offset, row.length, row.dp_group, row.microbatch, row.row,
            row.column, row.canonical_row,
        )
        for row in step.rows
    }  # fmt: skip
    assert len(wanted) == len(step.rows)
    for row in step.rows:
        stages = {tree.stage(one) for one in row.ranks}
        assert set(row.ranks) <= set(tree.ranks_of_dp_group(row.dp_group))
        assert "middle" not in stages
        own = names[row.dp_group, row.microbatch, row.row, row.column]
        # Within a pass a record has one name, and a name one record.
        assert places.setdefault((row.shard, row.place, row.epoch), own) == own
