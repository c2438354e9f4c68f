"""The pool has room for what shadows have ready, known before anything starts."""

import pytest

from federation.model.job import BatchRule
from msd_client.contract.errors import BudgetError
from msd_daemon.core.budget import SHADOW_CHUNKS, PoolSums, pool_sums
from tests.support.metadata import make_job, make_spec

RULE = BatchRule(rows=64, row_tokens=1024)


def sums(*critical: bool, pool_bytes: int | None = None, **options: int) -> PoolSums:
    specs = [make_spec(f"s{n}", is_critical=is_one) for n, is_one in enumerate(critical)]
    return pool_sums(make_job(specs, RULE), 8, len(specs), pool_bytes, **options)


def test_a_job_without_critical_sources_needs_what_it_needed():
    plain = sums(False, False, loader_workers=4, shadow_bytes=1 << 30)
    assert plain == sums(False, False)
    assert plain.shadows_bytes == plain.source_shadow_bytes == 0
    assert "shadows" not in plain.lines()


@pytest.mark.parametrize("workers", [1, 4])
def test_each_critical_source_adds_its_own(workers):
    plain = sums(False, False)
    one = sums(True, False, loader_workers=workers)
    both = sums(True, True, loader_workers=workers)
    assert one.source_shadow_bytes == SHADOW_CHUNKS * workers * one.chunk_bytes
    assert both.shadows_bytes == 2 * one.shadows_bytes
    assert one.needed_bytes == plain.needed_bytes + one.shadows_bytes
    assert one.pool_bytes >= plain.pool_bytes + one.shadows_bytes
    assert "shadows of critical sources" in one.lines()


def test_a_given_size_holds_and_has_room_for_a_chunk_of_every_loader():
    given = sums(True, loader_workers=2, shadow_bytes=32 << 20)
    assert given.source_shadow_bytes == 32 << 20
    least = sums(True, loader_workers=2, shadow_bytes=1)
    assert least.source_shadow_bytes == 2 * least.chunk_bytes


def test_a_pool_that_holds_the_job_alone_is_refused_with_the_sums():
    plain = sums(False)
    with pytest.raises(BudgetError, match="shadows of critical sources: "):
        sums(True, pool_bytes=plain.needed_bytes, shadow_bytes=64 << 20)
