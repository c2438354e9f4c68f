"""A microbatch as the trainer sees it: views of a slot, with the step's numbers beside them.

The arrays are READ-ONLY views of shared memory. An in-place write to a torch view kills the process
with SIGSEGV; a numpy view raises ValueError. `clone()` gives private, writable memory, and so does
`copy=True` when the loader is opened. A slot goes back to the daemon when its batch was released or
collected and no tensor, slice, numpy array or autograd node uses it any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from msd_client import torch_adapter
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import BatchReleasedError, UsageError
from msd_client.contract.ring_layout import PAYLOAD_OFFSET, TocField
from msd_client.ring_reader import SlotLease

ArrayKind = Literal["torch", "numpy"]

SEGMENT_IDS = "segment_ids"


class FlatView(NamedTuple):
    """The token fields as one row, [1, rows * length], over the same bytes."""

    tokens: Any
    labels: Any
    position_ids: Any


class Batch(dict[str, Any]):
    """One microbatch; a mutable dict of the fields in `contract.batch_spec.FIELD_TABLE`.

    Replacing or adding keys is fine (it changes the dict, never the slot); attributes follow the
    keys. In-place writes into a view are not: see the module's first lines.

    Args:
        fields: Arrays and numbers.
        lease: The slot behind the arrays, None where they are private.
        spec: Conventions of the batch.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        lease: SlotLease | None = None,
        spec: BatchSpec | None = None,
    ) -> None:
        super().__init__(fields)
        self._lease = lease
        self._is_released = False
        self.spec = spec

    @classmethod
    def from_lease(
        cls,
        lease: SlotLease,
        spec: BatchSpec | None = None,
        *,
        as_: Literal["auto", "torch", "numpy"] = "auto",
        copy: bool = False,
    ) -> Batch:
        """Return a leased slot as a batch.

        Args:
            lease: From `RingReader.open`.
            spec: Conventions, named in `conventions`.
            as_: Array kind; auto takes torch where it is installed.
            copy: True copies every field out and releases the slot at once.
        """
        kind: ArrayKind = "numpy" if as_ == "numpy" else "torch"
        if as_ == "auto" and not torch_adapter.has_torch():
            kind = "numpy"
        view = torch_adapter.view_field if kind == "torch" else view_field_numpy
        memory = lease.memory
        fields: dict[str, Any] = {field.name: view(memory, field) for field in lease.table.fields}
        fields.update(lease.table.scalars)
        fields["step"] = lease.header.step
        fields["microbatch"] = lease.header.microbatch
        batch = cls(fields, lease, spec)
        if copy:
            copied = batch.clone()
            batch.release()
            return copied
        return batch

    # ---- fields ----

    @property
    def tokens(self) -> Any:
        """Token ids. Shape (rows, length)."""
        return self["tokens"]

    @property
    def labels(self) -> Any:
        """Labels by the job's convention. Shape (rows, length)."""
        return self["labels"]

    @property
    def position_ids(self) -> Any:
        """Position inside the segment. Shape (rows, length), int32."""
        return self["position_ids"]

    @property
    def cu_seqlens(self) -> Any:
        """Segment boundaries over the flattened rows. Shape (segments + 1,), int32."""
        return self["cu_seqlens"]

    @property
    def segment_source(self) -> Any:
        """Source index of each segment, -1 for padding. Shape (segments,), int32."""
        return self["segment_source"]

    @property
    def segment_ids(self) -> Any:
        """Segment number of each token. Shape (rows, length), int32; made on first use."""
        return self[SEGMENT_IDS]

    @property
    def flat(self) -> FlatView:
        """The token fields as [1, rows * length], over the same bytes."""
        return FlatView(
            *(self[name].reshape(1, -1) for name in ("tokens", "labels", "position_ids"))
        )

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment, padding included."""
        return int(self["max_seqlen"])

    @property
    def valid_tokens(self) -> int:
        """Trained labels of this microbatch."""
        return int(self["valid_tokens"])

    @property
    def rows(self) -> int:
        """Rows of this microbatch."""
        return int(self["rows"])

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
        """How labels are to be read; empty where no spec is known."""
        if self.spec is None:
            return {}
        return {
            "labels": self.spec.labels,
            "documents": self.spec.documents,
            "ignore_label": self.spec.ignore_label,
            "pad_id": self.spec.pad_id,
        }

    def flash_kwargs(
        self, style: Literal["flash_attn", "transformers"] = "flash_attn"
    ) -> dict[str, Any]:
        """Return boundaries as the keyword arguments of variable-length attention kernels.

        Args:
            style: flash_attn names them as `flash_attn_varlen_func` does, transformers as
                `FlashAttentionKwargs` does.
        """
        bounds, longest = self.cu_seqlens, self.max_seqlen
        if style == "transformers":
            return {
                "cu_seq_lens_q": bounds,
                "cu_seq_lens_k": bounds,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        return {
            "cu_seqlens_q": bounds,
            "cu_seqlens_k": bounds,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
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

    def clone(self) -> Batch:
        """Return a batch with private, writable arrays; it holds no slot."""
        copied = {name: _copy_array(value) for name, value in self._checked().items()}
        return Batch(copied, None, self.spec)

    def numpy(self) -> Batch:
        """Return a batch with numpy arrays, views of the same bytes where those lie in host memory.

        Views of a slot are read-only and hold it as tensors do.
        """
        arrays = {name: _to_numpy(value) for name, value in self._checked().items()}
        if self.is_leased:
            for value in arrays.values():
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False
        return Batch(arrays, self._lease, self.spec)

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """Return a batch with its tensors on `device`; the slot is held until the copies completed.

        Host memory of a slot must not change under a copy in flight, and torch does not track
        memory that it does not own: an event behind the copies does. On the same device nothing is
        copied and the batch itself is returned.

        Raises:
            UsageError: The batch holds numpy arrays.
            BatchReleasedError: The batch was released.
        """
        fields = self._checked()
        tensors = [value for value in fields.values() if torch_adapter.is_tensor(value)]
        if not tensors:
            raise UsageError("a batch of numpy arrays has no device; open the loader with torch")
        if all(torch_adapter.is_same_device(tensor, device) for tensor in tensors):
            return self
        moved, event = torch_adapter.copy_to_device(fields, device, non_blocking=non_blocking)
        if event is not None and self._lease is not None:
            self._lease.hold_until(event, tensors)
        return Batch(moved, None, self.spec)

    # ---- dict ----

    def __missing__(self, key: str) -> Any:
        if self._is_released:
            raise BatchReleasedError(
                f"field {key!r} of a released batch was asked for; clone() before release()"
            )
        if key != SEGMENT_IDS or "cu_seqlens" not in self:
            raise KeyError(key)
        made = _segment_ids(self["cu_seqlens"], self.rows)
        self[key] = made
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a batch has no field {name!r}; it has {sorted(self)}") from None

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


def view_field_numpy(memory: Any, field: TocField) -> Any:
    """Return a read-only array over a field of a slot; it holds the slot while it lives."""
    count = 1
    for extent in field.shape:
        count *= extent
    if count == 0:
        return np.empty(field.shape, field.dtype)
    # Through a read-only memoryview, or numpy would let the user make the array writable again.
    flat: Any = np.frombuffer(
        memoryview(memory).toreadonly(),
        dtype=field.dtype,
        count=count,
        offset=PAYLOAD_OFFSET + field.offset_bytes,
    )
    return flat.reshape(field.shape)


def _segment_ids(cu_seqlens: Any, rows: int) -> Any:
    if torch_adapter.is_tensor(cu_seqlens):
        return torch_adapter.segment_ids(cu_seqlens, (rows, int(cu_seqlens[-1]) // rows))
    lengths = np.diff(cu_seqlens)
    numbers = np.arange(len(lengths), dtype=np.int32)
    return np.repeat(numbers, lengths).reshape(rows, -1)


def _copy_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if torch_adapter.is_tensor(value) else value


def _to_numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if torch_adapter.is_tensor(value) else value
