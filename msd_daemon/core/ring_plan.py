"""Which rings a job needs on this node, and how large they are, before anything is allocated. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree, RingPlace
from msd_client.contract.batch_spec import BatchSpec, Stage
from msd_client.contract.media_fields import MediaField
from msd_client.contract.ring_layout import SLOTS_MAX, RingLayout
from msd_client.contract.user_fields import UserField

SLOTS_DEFAULT = 4
"""One being read, one kept by the loop variable, two ready ahead."""
SLOTS_RETAINED = SLOTS_MAX
"""Slots of a middle stage: boundaries alone, and its ranks may come late."""


@dataclass(frozen=True)
class RingPlan:
    """One ring: who reads it and what a slot holds."""

    place: RingPlace
    spec: BatchSpec
    slots: int

    @property
    def is_retaining(self) -> bool:
        """True where ranks read if and when they like; they hold nobody up."""
        return self.place.stage == "middle"

    def of_ranks(self, ranks: tuple[int, ...]) -> RingPlan:
        """Return the same ring for some of its ranks: those of one node."""
        return replace(self, place=self.place._replace(ranks=ranks))

    def layout(self, generation: int) -> RingLayout:
        """Return the ring's layout in a generation."""
        return RingLayout.for_payload(
            self.spec.payload_bytes_max,
            self.slots,
            ring_id=self.place.ring,
            generation=generation,
        )


def plan_rings(
    job: ResolvedJob, tree: ClientPlaceTree, slots: int | None, stage: Stage | None = None
) -> tuple[RingPlan, ...]:
    """Return the rings of a job on a mesh.

    Args:
        job: The resolved job.
        tree: The mesh.
        slots: Slots of a ring with payload, None for the default.
        stage: The only stage that reads, None for all.

    Raises:
        ConfigError: A slot is too large.
        BudgetError: Too many slots.
    """
    specs: dict[Stage, BatchSpec] = {}
    plans = []
    for place in tree.rings():
        if stage not in (None, place.stage):
            continue
        if place.stage not in specs:
            specs[place.stage] = stage_spec(job, tree.cp_count, place.stage, tree.dp_count)
        count = SLOTS_RETAINED if place.stage == "middle" else slots or SLOTS_DEFAULT
        plans.append(RingPlan(place, specs[place.stage], count))
    return tuple(plans)


def stage_spec(job: ResolvedJob, cp_count: int, stage: Stage, dp_count: int = 1) -> BatchSpec:
    """Return what a microbatch of one pipeline stage holds, at the longest rows of the run.

    Raises:
        ConfigError: A slot would be too large.
    """
    batch = job.batch
    weights = tuple(source.loss_weight for source in job.sources) if job.has_loss_weights else ()
    return BatchSpec.for_rule(
        rows=batch.microbatch_rows,
        row_tokens=max(batch.row_tokens_values),
        row_segments_max=batch.row_segments_max,
        token_dtype=batch.token_dtype,
        label_dtype=batch.label_dtype,
        labels=batch.labels,
        documents=batch.documents,
        ignore=batch.ignore,
        ignore_label=batch.ignore_label,
        pad_id=batch.pad_id,
        segment_multiple=batch.segment_multiple,
        boundaries=batch.boundaries,
        cp_count=cp_count,
        cp_layout=batch.cp_layout,
        stage=stage,
        is_mtp=batch.is_mtp,
        source_weights=weights,
        user_fields=tuple(
            UserField(field.name, field.per, field.dtype, field.fill) for field in job.fields
        ),
        has_masks=job.has_masks,
        media=tuple(
            MediaField(
                rule.modality, rule.unit_values, rule.unit_dtype, rule.row_units_max, rule.merge
            )
            for rule in job.media
        ),
        positions=batch.positions,
        encode_dp_count=dp_count if batch.encode == "any" and job.media else 0,
        has_groups=job.has_groups,
    )


def rings_bytes(plans: tuple[RingPlan, ...]) -> int:
    """Return the bytes of all rings of one generation, and of what is dealt to ranks from."""
    return sum(plan.layout(1).ring_bytes + plan.spec.scratch_bytes for plan in plans)
