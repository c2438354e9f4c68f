"""Builds one microbatch: gathers its segments from the pool straight into a ring slot.

The one payload copy of the system (with context parallelism two: rows are gathered into a scratch
and dealt to the ranks' slices from there). Owns views of the slots' fields, made once per slot and
row length; states of slots, tasks and sockets belong to the constructor's main. No asyncio, no
ZeroMQ, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import BudgetError, InternalError
from msd_client.contract.ring_layout import TocField, encode_table
from msd_client.contract.slot_fields import FieldSpec
from msd_daemon.gather import (
    GatherOutputs,
    GatherResult,
    GatherRule,
    SegmentColumns,
    deal_ranks,
    gather_rows,
)
from msd_daemon.shm.mapping import Mapping
from msd_daemon.shm.ring_writer import RingWriter

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class MicrobatchTask:
    """Which segments go into which slot, and what the slot says of them."""

    slot: int
    sequence: int
    step: int
    plan_step: int
    microbatch: int
    segments: SegmentColumns
    valid_tokens: int = -1
    """Trained labels that the plan announced; -1 where it did not. A difference is an error."""
    row_tokens: int = 0
    """Places of a row, where that is a ramp; 0 = the spec's."""


class MicrobatchBuilder:
    """Fills slots of one ring.

    Args:
        pool: The chunk pool, mapped read-only; stays the caller's.
        ring: The ring, mapped for writing, with its layout.
        spec: Fields of a microbatch at its longest rows; must fit the ring's slots.

    Raises:
        BudgetError: The payload of the spec exceeds a slot.
    """

    def __init__(self, pool: Mapping, ring: RingWriter, spec: BatchSpec) -> None:
        if spec.payload_bytes_max > ring.layout.payload_bytes_max:
            raise BudgetError(
                f"a microbatch needs {spec.payload_bytes_max} bytes, a slot of ring "
                f"{ring.layout.ring_id} has {ring.layout.payload_bytes_max}",
                needed_bytes=spec.payload_bytes_max,
                available_bytes=ring.layout.payload_bytes_max,
            )
        self.spec = spec
        self._pool = pool.view
        self._ring = ring
        self._scratch: dict[str, Array] = {}
        if spec.cp_count > 1:  # large enough for every row length, see `scratch_bytes`
            self._scratch = {
                field.name: np.empty(spec.rows * spec.row_tokens, field.dtype)
                for field in spec.fields
                if field.extent == "token"
            }
        self._shapes: dict[int, _Shape] = {}

    def build(self, task: MicrobatchTask) -> int:
        """Fill and close the task's slot; return its payload bytes.

        Until the slot is closed no reader's check accepts it; after an error it stays open.

        Raises:
            ValueError: A segment or a chunk of the pool is out of bounds; see `gather_rows`.
            InternalError: The trained labels differ from what the plan announced.
            SegmentCorruptError: The ring has no such slot.
            BudgetError: The task's rows are longer than the spec's.
            ConfigError: Segments or ranks cannot cut rows of the task's length.
        """
        shape = self._shape(task.row_tokens or self.spec.row_tokens)
        write = self._ring.begin(
            task.slot, task.sequence, step=task.step, microbatch=task.microbatch
        )
        try:
            found = shape.fill(self._pool, self._ring, task)
            toc, payload_bytes = shape.describe(task, found)
        except BaseException:
            self._ring.abort(write)
            raise
        if task.valid_tokens not in (-1, found.valid_tokens):
            self._ring.abort(write)
            raise InternalError(
                f"step {task.step} microbatch {task.microbatch} holds {found.valid_tokens} trained "
                f"labels ({self.spec.labels}, {self.spec.documents}), the plan announced "
                f"{task.valid_tokens}",
                step=task.step,
                microbatch=task.microbatch,
            )
        return self._ring.commit(write, toc, payload_bytes)

    def close(self) -> None:
        """Let go of the slots' views, so that the ring can be unmapped."""
        self._shapes.clear()
        self._scratch.clear()
        self._pool = memoryview(b"")
        self._ring.close()

    def _shape(self, row_tokens: int) -> _Shape:
        shape = self._shapes.get(row_tokens)
        if shape is None:
            if row_tokens > self.spec.row_tokens:
                raise BudgetError(
                    f"rows of {row_tokens} tokens in ring {self._ring.layout.ring_id}, whose slots "
                    f"are for {self.spec.row_tokens}",
                    row_tokens=row_tokens,
                    row_tokens_max=self.spec.row_tokens,
                )
            shape = self._shapes[row_tokens] = _Shape(self.spec.at(row_tokens), self._scratch)
        return shape


class _Shape:
    """Microbatches of one row length: views of slots, scratch, fixed lines of field tables."""

    def __init__(self, spec: BatchSpec, scratch: dict[str, Array]) -> None:
        self._spec = spec
        self._rule = GatherRule(
            pad_id=spec.pad_id,
            ignore_label=spec.ignore_label,
            labels=spec.labels,
            is_joined=spec.documents == "joined",
            segment_multiple=spec.segment_multiple,
            is_constant=spec.boundaries == "constant",
            source_weights=np.array(spec.source_weights, "<f4") if spec.source_weights else None,
        )
        self._slots: dict[int, _SlotViews] = {}
        places = spec.rows * spec.row_tokens
        self._scratch = {
            name: array[:places].reshape(spec.rows, spec.row_tokens)
            for name, array in scratch.items()
        }
        # Token fields come first, so the ragged ones alone differ between microbatches.
        fixed = [f for f in spec.fields if f.extent == "token"]
        self._fixed_fields = [
            TocField(f.name, f.dtype, f.shape_max, f.offset_bytes, f.nbytes_max) for f in fixed
        ]
        self._other_fields = [
            (f, np.dtype(f.dtype).itemsize) for f in spec.fields if f.extent != "token"
        ]

    def fill(self, pool: memoryview, ring: RingWriter, task: MicrobatchTask) -> GatherResult:
        """Write all fields of a microbatch into the task's slot."""
        spec, slot = self._spec, task.slot
        views = self._slots.get(slot)
        if views is None:
            views = self._slots[slot] = _SlotViews(spec, ring.payload(slot), self._scratch)
        shape = (spec.rows, spec.row_tokens)
        found = gather_rows(pool, task.segments, shape, views.outputs, self._rule)
        if spec.user_fields:
            self._gather_user_fields(pool, task.segments, views, found)
        for name, scratch in self._scratch.items():
            deal_ranks(scratch, views.fields[name], spec.cp_layout, views.bounds(found))
        return found

    def describe(self, task: MicrobatchTask, found: GatherResult) -> tuple[bytes, int]:
        """Return the slot's field table, and the payload's end."""
        spec = self._spec
        counts = {"boundary": found.segments + 1, "segment": found.segments, "row": spec.rows}
        if self._rule.is_constant:
            counts |= {"boundary": spec.segments_max + 1, "segment": spec.segments_max}
        fields = list(self._fixed_fields)
        for field, item_bytes in self._other_fields:
            count = counts[field.extent]
            fields.append(
                TocField(field.name, field.dtype, (count,), field.offset_bytes, count * item_bytes)
            )
        end = fields[-1].offset_bytes + fields[-1].nbytes
        scalars = {
            "rows": spec.rows,
            "row_tokens": spec.row_tokens,
            "max_seqlen": found.max_seqlen,
            "segments": found.segments,
            "valid_tokens": found.valid_tokens,
            "plan_step": task.plan_step,
        }
        return encode_table(fields, scalars), end

    def _gather_user_fields(
        self, pool: memoryview, segments: SegmentColumns, views: _SlotViews, found: GatherResult
    ) -> None:
        # Few jobs have user fields; the others' constructors do without these modules.
        from msd_daemon.gather.user_fields import gather_fields

        spec = self._spec
        places = segments.row * np.int32(spec.row_tokens) + segments.column
        numbers = np.searchsorted(views.bounds(found), places).astype(np.int32)
        gather_fields(
            pool,
            segments,
            spec.user_fields,
            (spec.rows, spec.row_tokens),
            numbers,
            views.user_outputs,
        )


class _SlotViews:
    """Arrays over one slot, and where a gather writes: there, or in the scratch first."""

    def __init__(self, spec: BatchSpec, payload: memoryview, scratch: dict[str, Array]) -> None:
        self.fields = {field.name: _view(payload, field) for field in spec.fields}
        targets = self.fields | scratch
        self.outputs = GatherOutputs(**{name: targets.get(name) for name in GatherOutputs._fields})
        self.user_outputs = {
            user.name: targets[user.name] for user in spec.user_fields if user.name in targets
        }
        self._bounds = self.fields.get("cu_seqlens_padded", self.fields["cu_seqlens"])

    def bounds(self, found: GatherResult) -> Array:
        """Return the boundaries of a filled microbatch in places."""
        return self._bounds[: found.segments + 1]


def _view(payload: memoryview, field: FieldSpec) -> Array:
    count = math.prod(field.shape_max)
    flat: Array = np.frombuffer(payload, field.dtype, count, field.offset_bytes)
    return flat.reshape(field.shape_max)
