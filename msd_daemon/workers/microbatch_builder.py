"""Builds one microbatch: gathers its segments from the pool straight into a ring slot.

The one payload copy of the system. Owns views of the slots' fields, made once per slot; states of
slots, tasks and sockets belong to the constructor's main. No asyncio, no ZeroMQ, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.batch_spec import BatchSpec, FieldSpec
from msd_client.contract.errors import BudgetError, InternalError
from msd_client.contract.ring_layout import TocField, encode_table
from msd_daemon.gather import GatherResult, SegmentColumns, gather_rows
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


class MicrobatchBuilder:
    """Fills slots of one ring.

    Args:
        pool: The chunk pool, mapped read-only; stays the caller's.
        ring: The ring, mapped for writing, with its layout.
        spec: Fields of a microbatch; must fit the ring's slots.

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
        self._outputs: dict[int, dict[str, Array]] = {}
        # The spec puts token fields first; only the ragged ones behind differ between microbatches.
        self._token_fields = [
            TocField(f.name, f.dtype, f.shape_max, f.offset_bytes, f.nbytes_max)
            for f in spec.fields
            if f.extent == "token"
        ]
        self._ragged_fields = [
            (f, np.dtype(f.dtype).itemsize) for f in spec.fields if f.extent != "token"
        ]

    def build(self, task: MicrobatchTask) -> int:
        """Fill and close the task's slot; return its payload bytes.

        Until the slot is closed no reader's check accepts it; after an error it stays open.

        Raises:
            ValueError: A segment or a chunk of the pool is out of bounds; see `gather_rows`.
            InternalError: The trained labels differ from what the plan announced.
            SegmentCorruptError: The ring has no such slot.
        """
        spec = self.spec
        write = self._ring.begin(
            task.slot, task.sequence, step=task.step, microbatch=task.microbatch
        )
        try:
            found = self._gather(task)
            toc, payload_bytes = self._describe(task, found)
        except BaseException:
            self._ring.abort(write)
            raise
        if task.valid_tokens not in (-1, found.valid_tokens):
            self._ring.abort(write)
            raise InternalError(
                f"step {task.step} microbatch {task.microbatch} holds {found.valid_tokens} trained "
                f"labels ({spec.labels}, {spec.documents}), the plan announced {task.valid_tokens}",
                step=task.step,
                microbatch=task.microbatch,
            )
        return self._ring.commit(write, toc, payload_bytes)

    def close(self) -> None:
        """Let go of the slots' views, so that the ring can be unmapped."""
        self._outputs.clear()
        self._pool = memoryview(b"")
        self._ring.close()

    def _gather(self, task: MicrobatchTask) -> GatherResult:
        spec = self.spec
        outputs = self._outputs.get(task.slot)
        if outputs is None:
            outputs = self._outputs[task.slot] = self._slot_views(task.slot)
        return gather_rows(
            self._pool,
            task.segments,
            (spec.rows, spec.row_tokens),
            outputs["tokens"],
            outputs["labels"],
            outputs["position_ids"],
            pad_id=spec.pad_id,
            ignore_label=spec.ignore_label,
            labels=spec.labels,
            is_joined=spec.documents == "joined",
            cu_seqlens_out=outputs["cu_seqlens"],
            segment_source_out=outputs["segment_source"],
        )

    def _slot_views(self, slot: int) -> dict[str, Array]:
        payload = self._ring.payload(slot)
        return {field.name: _view(payload, field) for field in self.spec.fields}

    def _describe(self, task: MicrobatchTask, found: GatherResult) -> tuple[bytes, int]:
        counts = {"boundary": found.segments + 1, "segment": found.segments}
        fields = list(self._token_fields)
        for field, item_bytes in self._ragged_fields:
            count = counts[field.extent]
            fields.append(
                TocField(field.name, field.dtype, (count,), field.offset_bytes, count * item_bytes)
            )
        end = fields[-1].offset_bytes + fields[-1].nbytes
        scalars = {
            "rows": self.spec.rows,
            "max_seqlen": found.max_seqlen,
            "valid_tokens": found.valid_tokens,
            "plan_step": task.plan_step,
        }
        return encode_table(fields, scalars), end


def _view(payload: memoryview, field: FieldSpec) -> Array:
    count = int(np.prod(field.shape_max))
    flat: Array = np.frombuffer(payload, field.dtype, count, field.offset_bytes)
    return flat.reshape(field.shape_max)
