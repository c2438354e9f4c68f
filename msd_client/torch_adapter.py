"""torch views of a slot, and copies to a device. Imports torch on first use, never before.

A view is a tensor over memory that is mapped read-only: an in-place operation on it kills the
process with SIGSEGV (torch knows no read-only tensors). Clone first.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from msd_client.contract.ring_layout import PAYLOAD_OFFSET, TocField
from msd_client.ring_reader import DeviceEvent


def has_torch() -> bool:
    """Return True where torch is imported or could be."""
    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None


def view_field(memory: Any, field: TocField) -> Any:
    """Return a tensor over a field of a slot, without a copy; it holds the slot while it lives."""
    import torch

    dtype = getattr(torch, field.dtype)
    count = 1
    for extent in field.shape:
        count *= extent
    if count == 0:
        return torch.empty(field.shape, dtype=dtype)  # frombuffer refuses empty ones
    flat = torch.frombuffer(
        memory, dtype=dtype, count=count, offset=PAYLOAD_OFFSET + field.offset_bytes
    )
    return flat.view(field.shape)


def is_tensor(value: object) -> bool:
    """Return True for torch tensors; does not import torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def segment_ids(cu_seqlens: Any, shape: tuple[int, int]) -> Any:
    """Return the segment number of every token. Shape `shape`, int32, on the device of the input."""
    import torch

    count = cu_seqlens.shape[0] - 1
    numbers = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device)
    lengths = torch.diff(cu_seqlens).to(torch.int64)
    # output_size spares a device the wait for the sum of lengths.
    flat = torch.repeat_interleave(numbers, lengths, output_size=shape[0] * shape[1])
    return flat.view(shape)


def is_same_device(tensor: Any, device: Any) -> bool:
    """Return True where `tensor.to(device)` would copy nothing."""
    import torch

    wanted = torch.device(device)
    have = tensor.device
    return bool(have.type == wanted.type and wanted.index in (None, have.index))


def copy_to_device(
    fields: dict[str, Any], device: Any, *, non_blocking: bool
) -> tuple[dict[str, Any], DeviceEvent | None]:
    """Copy all tensors of `fields` to a device.

    Returns:
        The fields with tensors on the device, and an event recorded behind the copies; None where
        they have completed already. Until the event completed the source memory must not change:
        torch does not track memory that it does not own (pytorch/pytorch#69124).
    """
    import torch

    wanted = torch.device(device)
    moved = {
        name: value.to(wanted, non_blocking=non_blocking) if is_tensor(value) else value
        for name, value in fields.items()
    }
    return moved, record_event(wanted) if non_blocking else None


def record_event(device: Any) -> DeviceEvent | None:
    """Return an event recorded on the device's current stream; None where nothing runs behind."""
    if device.type in ("cpu", "meta"):
        return None
    import torch

    module = torch.get_device_module(device)
    with module.device(device):
        event: DeviceEvent = module.Event()
        event.record()  # type: ignore[attr-defined]
    return event
