"""Rings by DP group and stage, and the memory they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from federation.model.job import (
    BatchRule,
    FieldRule,
    MixturePoint,
    MixtureSchedule,
    RampPoint,
    ResolvedJob,
    Shard,
    SourceSpec,
    TokenizerSpec,
)
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.errors import BudgetError, MeshMismatchError
from msd_daemon.core.budget import check_total, step_bytes_max
from msd_daemon.core.ring_plan import SLOTS_DEFAULT, SLOTS_RETAINED, plan_rings, rings_bytes


def make_job(**changes):
    source = SourceSpec("a", "jsonl", "none", "seekable", (Shard("a", 1, "f"),), "m")
    job = ResolvedJob(
        "job",
        1,
        (source,),
        TokenizerSpec("bytes"),
        BatchRule(16, 64, 2),
        MixtureSchedule("tokens", (MixturePoint(0, {"a": 1.0}),)),
    )
    return replace(job, **changes)


def test_each_dp_group_has_a_ring_for_each_kind_of_stage():
    tree = ClientPlaceTree.from_mesh({"pp": 4, "dp": 2, "tp": 2})
    plans = plan_rings(make_job(), tree, None)
    assert [(p.place.group, p.place.stage) for p in plans] == [
        (group, stage) for group in (0, 1) for stage in ("first", "middle", "last")
    ]
    assert plans[0].place.ranks == (0, 1)
    assert plans[4].place.ranks == (6, 7, 10, 11)
    assert [p.slots for p in plans[:3]] == [SLOTS_DEFAULT, SLOTS_RETAINED, SLOTS_DEFAULT]
    assert [p.is_retaining for p in plans[:3]] == [False, True, False]
    # Metadata alone: no field of a middle stage grows with the tokens of a row.
    short, long = (
        plan_rings(make_job(batch=BatchRule(16, tokens, 2)), tree, None)[1].spec.payload_bytes_max
        for tokens in (128, 64 << 10)
    )
    assert short == long < 2048


def test_a_pipeline_of_two_has_no_middle_and_one_stage_has_all_fields():
    stages = [p.place.stage for p in plan_rings(make_job(), _tree({"pp": 2}), None)]
    assert stages == ["first", "last"]
    (plan,) = plan_rings(make_job(), _tree({"pp": 1, "cp": 2, "tp": 2}), 7)
    assert (plan.place.stage, plan.place.ranks, plan.slots) == ("all", (0, 1, 2, 3), 7)
    assert plan.spec.cp_count == 2


def _tree(mesh):
    return ClientPlaceTree.from_mesh(mesh)


def test_a_slot_holds_the_longest_row_of_a_ramp():
    ramp = (RampPoint(5, 256), RampPoint(9, 128))
    job = make_job(batch=BatchRule(16, 64, 2, row_tokens_ramp=ramp, rows_ramp=(RampPoint(3, 32),)))
    (plan,) = plan_rings(job, _tree({"dp": 1}), None)
    assert plan.spec.row_tokens == 256
    assert step_bytes_max(job) == 32 * 256 * 4


def test_user_fields_of_tokens_count_in_the_pool():
    fields = (FieldRule("adv", "adv", "token", "float64"), FieldRule("r", "r", "row"))
    assert step_bytes_max(make_job(fields=fields)) == 16 * 64 * (4 + 8)


def test_a_mesh_is_refused_where_any_value_of_a_ramp_or_the_cp_layout_does_not_fit():
    batch = BatchRule(16, 64, 2, rows_ramp=(RampPoint(10, 20),))
    with pytest.raises(MeshMismatchError, match="rows 20"):
        _tree({"dp": 4}).check_batch(batch)
    with pytest.raises(MeshMismatchError, match="row_tokens 64"):
        _tree({"cp": 3}).check_batch(BatchRule(16, 64, 2))
    with pytest.raises(MeshMismatchError, match="segment_multiple 4"):
        _tree({"cp": 4}).check_batch(
            BatchRule(16, 64, 2, segment_multiple=4, cp_layout="zigzag_document")
        )
    _tree({"cp": 4, "dp": 8}).check_batch(BatchRule(16, 64, 2))
    with pytest.raises(MeshMismatchError, match=r"aligned .* cp 2"):
        _tree({"cp": 2}).check_batch(BatchRule(16, 64, 2, labels="aligned"))


def test_a_total_names_what_it_is_for_and_what_others_use():
    needed = {"pool": 60, "rings": 30, "validation": 0}
    check_total(needed, 10, 100, 1000)
    with pytest.raises(BudgetError, match=r"90 bytes.*pool 60, rings 30.*other jobs use 11") as e:
        check_total(needed, 11, 100, 1000)
    assert e.value.attributes == {"needed_bytes": 90, "available_bytes": 89}
    with pytest.raises(BudgetError, match="80 % of the available"):
        check_total(needed, 0, 100, 100)


def test_rings_bytes_is_the_sum():
    plans = plan_rings(make_job(), _tree({"dp": 2}), None)
    assert rings_bytes(plans) == 2 * plans[0].layout(1).ring_bytes
    (plan,) = plan_rings(make_job(), _tree({"cp": 2}), None)
    assert rings_bytes((plan,)) == plan.layout(1).ring_bytes + 2 * 64 * (4 + 8 + 4)
