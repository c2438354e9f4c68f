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


class TorchOps:
    """`msd_client.contract.context_parallel.ArrayOps` of torch, on one device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def arange(self, count: int) -> Any:
        """Return 0 to `count` - 1 as int32."""
        import torch

        return torch.arange(count, dtype=torch.int32, device=self._device)

    def repeat(self, values: Any, counts: Any, total: int) -> Any:
        """Return each value `counts` times; `total` spares a device the wait for their sum."""
        import torch

        return torch.repeat_interleave(values, counts, output_size=total)

    def concatenate(self, arrays: Any, axis: int) -> Any:
        """Return the tensors one after the other."""
        import torch

        return torch.cat(arrays, axis)


def local_of(places: Any, own: Any, places_count: int) -> tuple[Any, Any]:
    """Return which of `places` are among `own`; see `msd_client.media._local_of`."""
    import torch

    local = torch.full((places_count,), -1, dtype=torch.int32, device=places.device)
    local[own] = torch.arange(len(own), dtype=torch.int32, device=places.device)
    found = local[places]
    numbers = torch.nonzero(found >= 0).reshape(-1)
    return found[numbers], numbers.to(torch.int32)


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
