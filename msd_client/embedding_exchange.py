"""Sends embeddings from the ranks that encoded them to those that hold their text, gradients back.

For jobs whose media may be encoded anywhere (`strategy: vlm_hybrid`, `batch.encode: any`); for others
the same calls send nothing, so a trainer needs no second path. The one module beside the demo that
imports torch when it is imported.

    vectors = encoder(mb.media("image"))       # one a placeholder token, item by item
    inputs = place_embeddings(embed(mb.tokens), mb, "image", vectors, group)

Every rank of the group makes the call in every microbatch, one without an item to encode or to
receive, too: an all-to-all waits for all, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from msd_client.batch import Batch
from msd_client.contract.errors import UsageError
from msd_client.contract.media_fields import Modality
from msd_client.media import is_routed


def place_embeddings(
    inputs: Any,
    batch: Batch,
    modality: Modality,
    embeddings: Any,
    group: Any = None,
    *,
    is_trained: bool = True,
) -> Any:
    """Return the inputs of the backbone with the embeddings of a modality at their places.

    Args:
        inputs: Embedded tokens of this rank. Shape (rows, length, width).
        batch: The microbatch.
        modality: image, video or audio.
        embeddings: See `exchange_embeddings`.
        group: See there.
        is_trained: See there.

    Returns:
        Shape (rows, length, width), the dtype of `inputs`, which stay as they are.

    Raises:
        UsageError: See there.
    """
    received = exchange_embeddings(batch, modality, embeddings, group, is_trained=is_trained)
    places, numbers = (
        torch.as_tensor(array, device=inputs.device).long()
        for array in batch.local_places(modality)
    )
    flat = inputs.reshape(-1, inputs.shape[-1])
    return flat.index_put((places,), received[numbers].to(flat.dtype)).view(inputs.shape)


def exchange_embeddings(
    batch: Batch,
    modality: Modality,
    embeddings: Any,
    group: Any = None,
    *,
    is_trained: bool = True,
) -> Any:
    """Return the embeddings of this rank's text, numbered as `batch.local_places` has them.

    Args:
        batch: The microbatch.
        modality: image, video or audio.
        embeddings: Of the items of `batch.media`, one a placeholder token, item by item. Shape
            (n, width); the same width and dtype on all ranks.
        group: Ranks that differ along the dp axes alone, in the order of their dp groups
            (`msd_client.mesh.dp_peers`); None = all ranks, where the mesh has dp axes alone.
        is_trained: True where gradients flow back into the encoder; the same on all ranks. A rank
            whose encoder had nothing to do takes part in the backward exchange all the same.

    Raises:
        UsageError: The batch has no such media, there are more or fewer embeddings than placeholder
            tokens, or the group has not the ranks that the batch was made for.
    """
    if not is_routed(batch, modality):
        batch.media(modality)
        return embeddings
    route = batch.route(modality)
    sends, receives = route.send_counts, route.recv_counts
    if len(embeddings) != sum(sends):
        raise UsageError(
            f"{len(embeddings)} embeddings of {modality}, the items of this microbatch have "
            f"{sum(sends)} placeholder tokens: an encoder gives one for each",
            seen=len(embeddings),
            limit=sum(sends),
        )
    size, own = dist.get_world_size(group), dist.get_rank(group)
    if size != len(sends) or own < 0 or sends[own] != receives[own]:
        raise UsageError(
            f"place {own} of a group of {size} ranks cannot exchange embeddings among {len(sends)} "
            "data-parallel groups: give the ranks that differ along the dp axes alone, in order "
            "(msd_client.mesh.dp_peers)",
            seen=size,
            limit=len(sends),
        )
    if is_trained and torch.is_grad_enabled() and not embeddings.requires_grad:
        embeddings = embeddings.detach().requires_grad_()
    return _Exchange.apply(embeddings.contiguous(), sends, receives, group)


class _Exchange(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type check
    """An all-to-all of rows; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Any, sends: list[int], receives: list[int], group: Any) -> Any:
        """Return the rows that the others sent."""
        ctx.counts = sends, receives, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None, None]:
        """Return the gradients of the rows that were sent."""
        sends, receives, group = ctx.counts
        return _all_to_all(gradient.contiguous(), receives, sends, group), None, None, None


def _all_to_all(rows: Any, sends: list[int], receives: list[int], group: Any) -> Any:
    received = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(received, rows, receives, sends, group=group)
    return received
