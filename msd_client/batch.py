"""A microbatch as the trainer sees it: views of a slot, with the step's numbers beside them.

The arrays are READ-ONLY views of shared memory. An in-place write to a torch view kills the process
with SIGSEGV; a numpy view raises ValueError. `clone()` gives private, writable memory, and so does
`copy=True` when the loader is opened. A slot goes back to the daemon when its batch was released or
collected and no tensor, slice, numpy array or autograd node uses it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, SupportsIndex

import numpy as np

from msd_client import numpy_adapter, token_places, torch_adapter
from msd_client.attention import AttentionHelpers
from msd_client.contract.batch_spec import MROPE_AXES, MROPE_NAME, BatchSpec
from msd_client.contract.errors import BatchReleasedError, UsageError
from msd_client.contract.media_fields import HOST_NAMES
from msd_client.media import MediaHelpers, modality_of
from msd_client.numpy_adapter import copy_array, slice_of_rank, to_numpy
from msd_client.ring_reader import SlotLease
from msd_client.token_places import Deal
from msd_client.trimming import trimmed_fields

ArrayKind = Literal["torch", "numpy"]


class FlatView:
    """The token fields of a batch as one row, [1, rows * length], over the same bytes."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        """Return the token field of that name; shape (1, rows * length), with axes (3, 1, ...).

        Raises:
            AttributeError: The batch has no such field, or it is none of tokens.
        """
        value = getattr(self._batch, name)
        dimensions = len(getattr(value, "shape", ()))
        if name == MROPE_NAME and dimensions == MROPE_AXES:
            return value.reshape(MROPE_AXES, 1, -1)
        if dimensions != 2 or modality_of(name) is not None:
            raise AttributeError(f"{name!r} is no token field")
        return value.reshape(1, -1)


class Batch(dict[str, Any], AttentionHelpers, MediaHelpers):
    """One microbatch; a mutable dict of the fields in docs/fields.md, and of the job's own.

    Replacing or adding keys is fine (it changes the dict, never the slot); attributes follow the
    keys where no method has the name. In-place writes into a view are not: see the module's first
    lines.

    Args:
        fields: Arrays and numbers.
        lease: The slot behind the arrays, None where they are private.
        spec: Conventions of the batch.
        cp_rank: Context-parallel rank whose slice the token fields are.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        lease: SlotLease | None = None,
        spec: BatchSpec | None = None,
        cp_rank: int = 0,
    ) -> None:
        super().__init__(fields)
        self._lease = lease
        self._is_released = False
        self.spec = spec
        self.cp_rank = cp_rank

    @classmethod
    def from_lease(
        cls,
        lease: SlotLease,
        spec: BatchSpec | None = None,
        *,
        as_: Literal["auto", "torch", "numpy"] = "auto",
        copy: bool = False,
        cp_rank: int = 0,
    ) -> Batch:
        """Return a leased slot as a batch.

        Args:
            lease: From `RingReader.open`.
            spec: Conventions, named in `conventions`.
            as_: Array kind; auto takes torch where it is installed.
            copy: True copies every field out and releases the slot at once.
            cp_rank: This rank's place in its context-parallel group: token fields are its slice.

        Raises:
            UsageError: The microbatch was dealt to fewer ranks.
        """
        kind: ArrayKind = "numpy" if as_ == "numpy" else "torch"
        if as_ == "auto" and not torch_adapter.has_torch():
            kind = "numpy"
        view = torch_adapter.view_field if kind == "torch" else numpy_adapter.view_field
        memory, table = lease.memory, lease.table.fields
        cp_count = 1 if spec is None else spec.cp_count
        if not 0 <= cp_rank < cp_count:
            raise UsageError(f"cp rank {cp_rank} of a microbatch for {cp_count} ranks")
        if cp_count > 1:
            table = tuple(slice_of_rank(field, cp_rank) for field in table)
        fields: dict[str, Any] = {field.name: view(memory, field) for field in table}
        fields.update(lease.table.scalars)
        fields["step"] = lease.header.step
        fields["microbatch"] = lease.header.microbatch
        batch = cls(fields, lease, spec, cp_rank)
        if copy:
            copied = batch.clone()
            batch.release()
            return copied
        return batch

    # ---- fields ----

    @property
    def tokens(self) -> Any:
        """Token ids. Shape (rows, length)."""
        return self._field("tokens")

    @property
    def labels(self) -> Any:
        """Labels by the job's convention. Shape (rows, length)."""
        return self._field("labels")

    @property
    def loss_weights(self) -> Any:
        """What each label weighs in the loss, 0 where nothing is trained. (rows, length), float32."""
        return self._field("loss_weights")

    @property
    def position_ids(self) -> Any:
        """Position inside the segment. Shape (rows, length), int32."""
        return self._field("position_ids")

    @property
    def mrope_position_ids(self) -> Any:
        """Positions of time, height and width. Shape (3, rows, length), int32."""
        return self._field(MROPE_NAME)

    @property
    def cu_seqlens(self) -> Any:
        """Cumulative true lengths of the segments. Shape (segments + 1,), int32."""
        return self._field("cu_seqlens")

    @property
    def cu_seqlens_padded(self) -> Any:
        """Segment boundaries in places of the flattened rows. Shape (segments + 1,), int32."""
        return self._field("cu_seqlens_padded")

    @property
    def segment_source(self) -> Any:
        """Source index of each segment, -1 for padding. Shape (segments,), int32."""
        return self._field("segment_source")

    @property
    def segment_group(self) -> Any:
        """Group of each segment, -1 for padding; jobs with groups. Shape (segments,), int32."""
        return self._field("segment_group")

    @property
    def segment_ids(self) -> Any:
        """Segment number of each token. Shape (rows, length), int32; made on first use."""
        return self._field("segment_ids")

    @property
    def cp_places(self) -> Any:
        """Flat place of each token in the whole microbatch. (rows, length), int32; made on first use.

        `whole.reshape(-1)[batch.cp_places] = mine` puts this context-parallel rank's results back.
        """
        return self._field("cp_places")

    @property
    def flat(self) -> FlatView:
        """The token fields as [1, rows * length], over the same bytes."""
        return FlatView(self)

    @property
    def max_seqlen(self) -> int:
        """Places of the longest segment, padding included."""
        return int(self["max_seqlen"])

    @property
    def segments(self) -> int:
        """Segments of this microbatch, those of padding included."""
        return int(self["segments"])

    @property
    def valid_tokens(self) -> int:
        """Trained labels of this microbatch, on all its context-parallel ranks together."""
        return int(self["valid_tokens"])

    @property
    def rows(self) -> int:
        """Rows of this microbatch."""
        return int(self["rows"])

    @property
    def row_tokens(self) -> int:
        """Places of a whole row, all context-parallel ranks together."""
        return int(self["row_tokens"])

    @property
    def used_tokens(self) -> int:
        """Places up to the end of the last segment, on all context-parallel ranks together."""
        return int(self["used_tokens"])

    @property
    def step(self) -> int:
        """The trainer's step number."""
        return int(self["step"])

    @property
    def plan_step(self) -> int:
        """The planner's step number."""
        return int(self["plan_step"])

    @property
    def microbatch(self) -> int:
        """Number of this microbatch in the rank's step."""
        return int(self["microbatch"])

    @property
    def conventions(self) -> dict[str, str | int]:
        """How labels and places are to be read; empty where no spec is known."""
        spec = self.spec
        if spec is None:
            return {}
        return {
            "labels": spec.labels,
            "documents": spec.documents,
            "ignore": spec.ignore,
            "ignore_label": spec.ignore_label,
            "pad_id": spec.pad_id,
            "segment_multiple": spec.segment_multiple,
            "boundaries": spec.boundaries,
            "cp_layout": spec.cp_layout,
            "stage": spec.stage,
        }

    # ---- lifetime ----

    @property
    def is_leased(self) -> bool:
        """True while the arrays are views of a slot that this batch holds."""
        return self._lease is not None and not self._lease.is_released

    def release(self) -> None:
        """Drop all fields and the batch's hold on its slot. Idempotent.

        Marks only: views that live elsewhere keep the slot until they die.
        """
        self._is_released = True
        self.clear()
        if self._lease is not None:
            self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __copy__(self) -> Batch:
        return Batch(self._checked(), self._lease, self.spec, self.cp_rank)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Refuse to pickle or deepcopy views.

        Raises:
            UsageError: The batch holds a slot; its clone pickles.
            BatchReleasedError: The batch was released.
        """
        self._checked()
        if self._lease is not None:
            raise UsageError(
                "a batch of views of shared memory can't be pickled or deepcopied: clone() it first"
            )
        return super().__reduce_ex__(protocol)

    def clone(self) -> Batch:
        """Return a batch with private, writable arrays; it holds no slot."""
        copied = {name: copy_array(value) for name, value in self._checked().items()}
        return Batch(copied, None, self.spec, self.cp_rank)

    def trimmed(self) -> Batch:
        """Return the batch up to the end of its last segment: views, without the padding behind it.

        For packing varlen, or one row a microbatch. Token fields are [1, used_tokens], or a
        context-parallel rank's part of them; boundaries, segments and `max_seqlen` are those of the
        documents alone. A microbatch without any keeps one segment of padding, of segment_multiple
        places, so that ranks that wait for each other can all run it. Shapes differ between
        microbatches, with `boundaries: constant` too.

        Raises:
            UsageError: The batch has several rows, or is a slice of another cp_layout than
                zigzag_document.
            BatchReleasedError: The batch was released.
        """
        self._checked()
        fields = trimmed_fields(self, self.deal, self.spec)
        return Batch(fields, self._lease, self.spec, self.cp_rank)

    def numpy(self) -> Batch:
        """Return a batch with numpy arrays, views of the same bytes where those lie in host memory.

        Views of a slot are read-only and hold it as tensors do.
        """
        arrays = {name: to_numpy(value) for name, value in self._checked().items()}
        if self.is_leased:
            for value in arrays.values():
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False
        return Batch(arrays, self._lease, self.spec, self.cp_rank)

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """Return a batch with its tensors on `device`; the slot is held until the copies completed.

        Host memory of a slot must not change under a copy in flight, and torch does not track
        memory that it does not own: an event behind the copies does. On the same device nothing is
        copied and the batch itself is returned. Counts of embeddings to exchange stay on the host.

        Raises:
            UsageError: The batch holds numpy arrays.
            BatchReleasedError: The batch was released.
        """
        kept = {name: value for name, value in self._checked().items() if name in HOST_NAMES}
        fields = {name: value for name, value in self.items() if name not in kept}
        tensors = [value for value in fields.values() if torch_adapter.is_tensor(value)]
        if not tensors:
            raise UsageError("a batch of numpy arrays has no device; open the loader with torch")
        if all(torch_adapter.is_same_device(tensor, device) for tensor in tensors):
            return self
        moved, event = torch_adapter.copy_to_device(fields, device, non_blocking=non_blocking)
        if event is not None and self._lease is not None:
            self._lease.hold_until(event, tensors)
        moved |= {name: copy_array(value) for name, value in kept.items()}
        return Batch(moved, None, self.spec, self.cp_rank)

    # ---- dict ----

    def __missing__(self, key: str) -> Any:
        if self._is_released:
            raise BatchReleasedError(
                f"field {key!r} of a released batch was asked for; clone() before release()"
            )
        make = _MADE.get(key)
        if make is None or "cu_seqlens" not in self:
            raise KeyError(self._why_absent(key))
        return make(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._field(name)

    def _field(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def _why_absent(self, name: str) -> str:
        spec = self.spec
        if spec is not None and spec.stage != "all":
            if name == "tokens" and spec.stage == "last":
                return "pipeline stage last has no 'tokens': set batch.mtp: true to have them there"
            readers = {"tokens": "the first stage", "labels": "the last stage"} | {
                user.name: "the first and the last stage"
                for user in spec.user_fields
                if user.per == "token"
            }
            if spec.source_weights:
                readers["loss_weights"] = "the last stage"
            modality = modality_of(name)
            if modality in [media.modality for media in spec.media]:
                readers[name] = "the first stage"
            if name in readers:
                return (
                    f"pipeline stage {spec.stage} has no {name!r}: it is for {readers[name]}, use "
                    "it there"
                )
        if modality_of(name) is not None:
            return f"a batch of this job has no {name!r}: none of its sources has such media"
        if name == "loss_weights":
            return (
                "a batch has no 'loss_weights' where every label weighs 1: set ignore: loss_mask, "
                "or a source's loss_weight"
            )
        return f"a batch has no field {name!r}; it has {sorted(self)}"

    @property
    def deal(self) -> Deal:
        """How the microbatch was dealt to context-parallel ranks, and whose slice this is."""
        spec = self.spec
        return Deal() if spec is None else Deal(spec.cp_layout, spec.cp_count, self.cp_rank)

    def __repr__(self) -> str:
        if self._is_released:
            return "Batch(released)"
        names = ", ".join(
            f"{name}={tuple(value.shape) if hasattr(value, 'shape') else value}"
            for name, value in self.items()
        )
        return f"Batch({names})"

    def _checked(self) -> dict[str, Any]:
        if self._is_released:
            raise BatchReleasedError("a released batch was used; clone() before release()")
        return self


def _make_row_tokens(batch: Batch) -> int:
    return int(batch.cu_seqlens_padded[-1]) // batch.rows


def _make_cp_places(batch: Batch) -> Any:
    shape = (batch.rows, batch.row_tokens)
    made = batch["cp_places"] = token_places.local_places(
        batch.cu_seqlens_padded, shape, batch.deal
    )
    return made


def _make_segment_ids(batch: Batch) -> Any:
    numbers = token_places.segment_numbers(batch.cu_seqlens_padded, batch.rows * batch.row_tokens)
    is_whole = batch.deal.cp_count == 1
    made = numbers.reshape(batch.rows, -1) if is_whole else numbers[batch.cp_places]
    batch["segment_ids"] = made
    return made


def _make_position_ids(batch: Batch) -> Any:
    made = batch["position_ids"] = token_places.position_ids(
        batch.cu_seqlens_padded, batch.cp_places, batch.segment_ids
    )
    return made


_MADE: dict[str, Callable[[Batch], Any]] = {
    "row_tokens": _make_row_tokens,
    # Not kept in the dict: with segments in single places it is `cu_seqlens` itself.
    "cu_seqlens_padded": lambda batch: batch["cu_seqlens"],
    "cp_places": _make_cp_places,
    "segment_ids": _make_segment_ids,
    "position_ids": _make_position_ids,
}
"""Fields that are made from the boundaries on first use, and kept."""
