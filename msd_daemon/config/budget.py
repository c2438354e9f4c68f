"""Checks that pool and rings of a job fit the node's memory budget; the sums stand in the message.

Pure. The daemon calls it when a mesh is known, `msdctl check --mesh` before.
"""

from __future__ import annotations

from dataclasses import dataclass

from msd_client.contract.errors import BudgetError
from msd_daemon.config.units import format_bytes


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of shared memory of one job on one node."""

    pool_bytes: int
    ring_bytes: int
    """Of one ring."""
    rings_count: int
    """DP groups that this node serves."""

    @property
    def total_bytes(self) -> int:
        """Return pool and rings together."""
        return self.pool_bytes + self.ring_bytes * self.rings_count


def check_memory(need: MemoryNeed, memory_bytes: int, job_name: str) -> None:
    """Check that a job fits the budget.

    Raises:
        BudgetError: It does not; needed and allowed bytes and both parts are named.
    """
    if need.total_bytes <= memory_bytes:
        return
    raise BudgetError(
        f"job {job_name!r} needs {format_bytes(need.total_bytes)} of shared memory "
        f"(pool {format_bytes(need.pool_bytes)} + {need.rings_count} rings x "
        f"{format_bytes(need.ring_bytes)}), the budget memory.memory_bytes is "
        f"{format_bytes(memory_bytes)}: raise it, or lower batch.microbatch_rows, "
        "batch.row_tokens or memory.ring_slots",
        needed_bytes=need.total_bytes,
        budget_bytes=memory_bytes,
        pool_bytes=need.pool_bytes,
        ring_bytes=need.ring_bytes,
        rings_count=need.rings_count,
    )
