"""Builds one microbatch: gathers its segments from the pool straight into a ring slot.

The one payload copy of the system (with context parallelism two: rows are gathered into a scratch
and dealt to the ranks' slices from there). Owns views of the slots' fields, made once per slot and
row length; states of slots, tasks and sockets belong to the constructor's main. No asyncio, no
ZeroMQ, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msd_client.contract.batch_spec import MROPE_AXES, MROPE_NAME, BatchSpec
from msd_client.contract.errors import BudgetError, InternalError
from msd_client.contract.media_fields import longest_name
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

if TYPE_CHECKING:
    from msd_daemon.gather.encode_columns import EncodeColumns
    from msd_daemon.gather.media_items import FoundItems
    from msd_daemon.gather.route import RoutedCounts

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
    encoding: EncodeColumns | None = None
    """Where media may be encoded anywhere."""
    groups: npt.NDArray[np.int32] | None = None
    """Group of each segment, from 0, in jobs with groups. Shape (segments,)."""


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
        # Large enough for every row length.
        self._scratch: dict[str, Array] = {
            scratch.name: np.empty(scratch.lines * spec.row_tokens, scratch.dtype)
            for scratch in spec.scratch_fields
        }
        self._shapes: dict[int, _Shape] = {}

    def build(self, task: MicrobatchTask) -> int:
        """Fill and close the task's slot; return its payload bytes.

        Until the slot is closed no reader's check accepts it; after an error it stays open.

        Raises:
            ValueError: A segment or a chunk of the pool is out of bounds; see `gather_rows`. Or an
                item is cut, or there are more than the slot has room for.
            ChunkCorruptError: A chunk's fields or media are not the job's, or damaged.
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
        valid_tokens = found.result.valid_tokens
        if task.valid_tokens not in (-1, valid_tokens):
            self._ring.abort(write)
            raise InternalError(
                f"step {task.step} microbatch {task.microbatch} holds {valid_tokens} trained "
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


class _Filled(NamedTuple):
    """What a slot holds now."""

    result: GatherResult
    media: dict[str, RoutedCounts]
    """By modality, of those that the slot has fields of."""


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
        self._scratch = {
            line.name: scratch[line.name][: line.lines * spec.row_tokens].reshape(
                line.lines, spec.row_tokens
            )
            for line in spec.scratch_fields
        }
        # They come first, so the ragged ones alone differ between microbatches.
        fixed = [f for f in spec.fields if f.extent in ("token", "axis_token")]
        self._fixed_fields = [
            TocField(f.name, f.dtype, f.shape_max, f.offset_bytes, f.nbytes_max) for f in fixed
        ]
        self._other_fields = [
            (f, np.dtype(f.dtype).itemsize * math.prod(f.shape_max[1:]))
            for f in spec.fields[len(fixed) :]
        ]

    def fill(self, pool: memoryview, ring: RingWriter, task: MicrobatchTask) -> _Filled:
        """Write all fields of a microbatch into the task's slot."""
        spec, slot = self._spec, task.slot
        views = self._slots.get(slot)
        if views is None:
            views = self._slots[slot] = _SlotViews(spec, ring.payload(slot), self._scratch)
        shape = (spec.rows, spec.row_tokens)
        found = gather_rows(pool, task.segments, shape, views.outputs, self._rule)
        if spec.has_masks:
            from msd_daemon.gather.masks import apply_masks

            valid = apply_masks(views.outputs, spec.ignore_label, found.valid_tokens)
            found = found._replace(valid_tokens=valid)
        if spec.user_fields:
            self._gather_user_fields(pool, task.segments, views, found)
        if spec.has_groups:
            self._write_groups(task, views, found)
        media = self._gather_media(pool, task, views, found)
        for name, scratch in self._scratch.items():
            self._deal(name, scratch, views, found)
        return _Filled(found, media)

    def describe(self, task: MicrobatchTask, filled: _Filled) -> tuple[bytes, int]:
        """Return the slot's field table, and the payload's end."""
        spec, found = self._spec, filled.result
        counts = {"boundary": found.segments + 1, "segment": found.segments, "row": spec.rows}
        if self._rule.is_constant:
            counts |= {"boundary": spec.segments_max + 1, "segment": spec.segments_max}
        scalars = {
            "rows": spec.rows,
            "row_tokens": spec.row_tokens,
            "max_seqlen": found.max_seqlen,
            "segments": found.segments,
            "valid_tokens": found.valid_tokens,
            "plan_step": task.plan_step,
            **_used(task.segments, spec),
        }
        for modality, own in filled.media.items():
            counts[f"{modality} unit"] = own.here.units
            counts[f"{modality} item"] = own.here.items
            counts[f"{modality} item_bound"] = own.here.items + 1
            counts[f"{modality} place"] = own.local.places
            counts[f"{modality} local_item"] = own.local.items
            counts[f"{modality} local_bound"] = own.local.items + 1
            counts[f"{modality} peer"] = spec.encode_dp_count
            scalars[longest_name(modality)] = own.here.longest
        fields = list(self._fixed_fields)
        for field, entry_bytes in self._other_fields:
            key = f"{field.modality} {field.extent}" if field.modality else field.extent
            shape = (counts[key], *field.shape_max[1:])
            fields.append(
                TocField(field.name, field.dtype, shape, field.offset_bytes, shape[0] * entry_bytes)
            )
        end = fields[-1].offset_bytes + fields[-1].nbytes
        return encode_table(fields, scalars), end

    # Few jobs have user fields or media; the others' constructors do without their modules.

    def _gather_user_fields(
        self, pool: memoryview, segments: SegmentColumns, views: _SlotViews, found: GatherResult
    ) -> None:
        from msd_daemon.gather.user_fields import gather_fields

        spec = self._spec
        gather_fields(
            pool,
            segments,
            spec.user_fields,
            (spec.rows, spec.row_tokens),
            self._segment_numbers(segments, views, found),
            views.user_outputs,
        )

    def _gather_media(
        self, pool: memoryview, task: MicrobatchTask, views: _SlotViews, found: GatherResult
    ) -> dict[str, RoutedCounts]:
        spec, segments = self._spec, task.segments
        has_units = spec.stage in ("all", "first")
        if views.mrope is None and not (has_units and spec.media):
            return {}
        from msd_daemon.gather.media_items import find_items
        from msd_daemon.gather.mrope_ids import write_mrope
        from msd_daemon.gather.route import write_media

        items: list[FoundItems] = []
        if spec.media:
            numbers = self._segment_numbers(segments, views, found)
            shape = (spec.rows, spec.row_tokens)
            items = find_items(pool, segments, spec.media, shape, numbers)
        if views.mrope is not None:
            ids = views.mrope.reshape(MROPE_AXES, -1)
            if views.position_ids is not None:
                ids[0] = views.position_ids.reshape(-1)
            grids = [
                (own, rule.merge)
                for own, rule in zip(items, spec.media, strict=True)
                if rule.has_grids
            ]
            write_mrope(ids, views.bounds(found), grids)
        if not has_units:
            return {}
        return write_media(pool, segments, task.encoding, items, spec, views.fields)

    def _write_groups(self, task: MicrobatchTask, views: _SlotViews, found: GatherResult) -> None:
        if task.groups is None:
            raise ValueError("the task does not say which segments belong together")
        target = views.fields["segment_group"]
        target[:] = -1
        target[self._segment_numbers(task.segments, views, found)] = task.groups

    def _segment_numbers(
        self, segments: SegmentColumns, views: _SlotViews, found: GatherResult
    ) -> npt.NDArray[np.int32]:
        places = segments.row * np.int32(self._spec.row_tokens) + segments.column
        return np.searchsorted(views.bounds(found), places).astype(np.int32)

    def _deal(self, name: str, scratch: Array, views: _SlotViews, found: GatherResult) -> None:
        """Deal a field from the scratch to the ranks; what was just to count in is left there."""
        target = views.fields.get(name)
        if target is None:
            return
        spec, bounds = self._spec, views.bounds(found)
        if name == MROPE_NAME:
            # The axes are dealt as further rows; a rank's part is [3, rows, length].
            target = target.reshape(spec.cp_count, len(scratch), -1)
            places = spec.rows * spec.row_tokens
            steps = [bounds[1:] + axis * places for axis in range(1, MROPE_AXES)]
            bounds = np.concatenate([bounds, *steps])
        deal_ranks(scratch, target, spec.cp_layout, bounds)


class _SlotViews:
    """Arrays over one slot, and where a gather writes: there, or in the scratch first."""

    def __init__(self, spec: BatchSpec, payload: memoryview, scratch: dict[str, Array]) -> None:
        self.fields = {field.name: _view(payload, field) for field in spec.fields}
        targets = self.fields | scratch
        self.mrope: Array | None = None
        """Whole, shape (3, rows, row_tokens)."""
        self.position_ids = targets.get("position_ids")
        """Where they are no part of `mrope`."""
        whole = targets.get(MROPE_NAME)
        if whole is not None:
            self.mrope = whole.reshape(MROPE_AXES, spec.rows, spec.row_tokens)
            targets.setdefault("position_ids", self.mrope[0])
        self.outputs = GatherOutputs(**{name: targets.get(name) for name in GatherOutputs._fields})
        self.user_outputs = {
            user.name: targets[user.name] for user in spec.user_fields if user.name in targets
        }
        self._bounds = self.fields.get("cu_seqlens_padded", self.fields["cu_seqlens"])

    def bounds(self, found: GatherResult) -> Array:
        """Return the boundaries of a filled microbatch in places."""
        return self._bounds[: found.segments + 1]


def _used(segments: SegmentColumns, spec: BatchSpec) -> dict[str, int]:
    """Return where the last segment ends, and how many places the longest takes."""
    if not segments.count:
        return {"used_tokens": 0, "used_max_seqlen": 0}
    multiple = spec.segment_multiple
    last, longest = (
        -(-int(n) // multiple) * multiple for n in (segments.length[-1], segments.length.max())
    )
    start = int(segments.row[-1]) * spec.row_tokens + int(segments.column[-1])
    return {"used_tokens": start + last, "used_max_seqlen": longest}


def _view(payload: memoryview, field: FieldSpec) -> Array:
    count = math.prod(field.shape_max)
    flat: Array = np.frombuffer(payload, field.dtype, count, field.offset_bytes)
    return flat.reshape(field.shape_max)
