"""What a job's validation streams are counted with before it starts."""

from __future__ import annotations

from dataclasses import replace

from federation.model.job import BatchRule, LoaderRule
from federation.model.place_tree import ClientPlaceTree
from federation.model.validation import validation_job
from msd_daemon.config.daemon_file import load_daemon_config
from msd_daemon.core.ring_plan import plan_rings, rings_bytes
from msd_daemon.services.job_memory import job_pool_sums, validation_bytes, validation_config
from tests.support.metadata import make_job, make_spec


def test_each_kind_of_pipeline_stage_has_a_pool_of_its_own_while_it_goes_through_a_pass():
    job = replace(
        make_job([make_spec("a")], BatchRule(8, 64, 2)), loaders=(LoaderRule("val", ("a",)),)
    )
    config = load_daemon_config(environ={})
    derived = validation_job(job, "val")
    pool = job_pool_sums(derived, validation_config(config)).pool_bytes
    for mesh, passes in (([("dp", 1)], 1), ([("pp", 2)], 2), ([("pp", 4), ("tp", 2)], 3)):
        tree = ClientPlaceTree.from_mesh(dict(mesh))
        rings = rings_bytes(plan_rings(derived, tree, config.ring_slots))
        assert validation_bytes(job, mesh, config) == passes * pool + rings
    assert validation_bytes(replace(job, loaders=()), [("pp", 2)], config) == 0
