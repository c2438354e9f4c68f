"""The demo's GPT with tensor parallelism: heads and hidden units are split over the `tp` ranks.

Imported by the rank program alone, since it needs torch. Column-parallel layers hold rows of the
weight and take the whole input; row-parallel ones hold columns and give partial sums, which one
all-reduce joins. In the backward pass the all-reduce stands at the column-parallel input instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class GptShape:
    """Sizes of the model; `heads` and `hidden` are split over the tensor-parallel ranks."""

    vocabulary: int
    row_tokens: int
    layers: int = 2
    width: int = 128
    heads: int = 4

    @property
    def hidden(self) -> int:
        """Units of a feed-forward layer."""
        return 4 * self.width


class TensorParallel:
    """The tensor-parallel group of this rank, and the seconds spent in its all-reduces.

    Args:
        group: Process group; None where one rank holds the whole model.
    """

    def __init__(self, group: Any | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.seconds = 0.0

    def sum(self, tensor: Any) -> Any:
        """Return the sum over the group."""
        if self.size == 1:
            return tensor
        began = time.perf_counter()
        summed = tensor.contiguous().clone()
        dist.all_reduce(summed, group=self.group)
        self.seconds += time.perf_counter() - began
        return summed

    def columns(self, weight: Any) -> Any:
        """Return this rank's part of the output units of a whole weight (out, in)."""
        return weight.chunk(self.size, dim=0)[self.rank].clone()

    def rows(self, weight: Any) -> Any:
        """Return this rank's part of the input units of a whole weight (out, in)."""
        return weight.chunk(self.size, dim=1)[self.rank].clone()


class _Enter(torch.autograd.Function):  # type: ignore[misc] # torch is not seen by the type check
    """Identity; its gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Any, parallel: TensorParallel) -> Any:
        ctx.parallel = parallel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.parallel.sum(gradient), None


class _Leave(torch.autograd.Function):  # type: ignore[misc]
    """Sum of partial results over the group; its gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Any, parallel: TensorParallel) -> Any:  # noqa: ARG004
        return parallel.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004
        return gradient, None


class Block(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward, each column-parallel then row-parallel."""

    def __init__(self, shape: GptShape, parallel: TensorParallel, generator: Any) -> None:
        super().__init__()
        self.parallel = parallel
        self.heads = shape.heads // parallel.size
        width, hidden = shape.width, shape.hidden

        def weight(out: int, into: int, scale: float = 0.02) -> Any:
            return torch.randn(out, into, generator=generator) * scale

        # Residual branches begin small; each of q, k and v is split by heads on its own.
        small = 0.02 / (2 * shape.layers) ** 0.5
        self.qkv = nn.ParameterList(parallel.columns(weight(width, width)) for _ in range(3))
        self.out = nn.Parameter(parallel.rows(weight(width, width, small)))
        self.up = nn.Parameter(parallel.columns(weight(hidden, width)))
        self.down = nn.Parameter(parallel.rows(weight(width, hidden, small)))
        self.norm_attention = nn.LayerNorm(width)
        self.norm_hidden = nn.LayerNorm(width)

    def forward(self, x: Any, mask: Any) -> Any:
        rows, length, _ = x.shape
        entered = _Enter.apply(self.norm_attention(x), self.parallel)
        q, k, v = (
            functional.linear(entered, part).view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv
        )
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        seen = seen.transpose(1, 2).reshape(rows, length, -1)
        x = x + _Leave.apply(functional.linear(seen, self.out), self.parallel)
        entered = _Enter.apply(self.norm_hidden(x), self.parallel)
        active = functional.gelu(functional.linear(entered, self.up))
        return x + _Leave.apply(functional.linear(active, self.down), self.parallel)


class Gpt(nn.Module):  # type: ignore[misc]
    """A small GPT. Equal seeds give equal whole weights, whatever the group's size."""

    def __init__(self, shape: GptShape, parallel: TensorParallel, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parallel = parallel

        def table(rows: int, scale: float) -> Any:
            return nn.Parameter(torch.randn(rows, shape.width, generator=generator) * scale)

        self.embedding = table(shape.vocabulary, 0.1)
        self.positions = table(shape.row_tokens, 0.02)
        self.blocks = nn.ModuleList(Block(shape, parallel, generator) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        # The embedding is the output layer too: a small gain makes the first guesses near even.
        nn.init.constant_(self.norm.weight, 0.2)

    def forward(
        self,
        tokens: Any,
        position_ids: Any,
        segment_ids: Any,
        added: tuple[Any, Any] | None = None,
    ) -> Any:
        """Return logits. Tokens, positions, segments and logits have the shape (rows, length, ...).

        Args:
            tokens: Ids.
            position_ids: Positions inside the documents.
            segment_ids: Which document each token is of.
            added: Places in the flattened rows, and vectors that are added to the embeddings there.
                Shapes (n,) and (n, width).
        """
        mask = document_mask(segment_ids)
        x = self.embedding[tokens] + self.positions[position_ids]
        if added is not None:
            places, vectors = added
            x = x.flatten(0, 1).index_add(0, places, vectors).view_as(x)
        for block in self.blocks:
            x = block(x, mask)
        return functional.linear(self.norm(x), self.embedding)

    def whole_size(self) -> int:
        """Return the parameters of the whole model, over all tensor-parallel ranks."""
        split: int = sum(
            parameter.numel()
            for block in self.blocks
            for parameter in (*block.qkv, block.out, block.up, block.down)
        )
        own: int = sum(parameter.numel() for parameter in self.parameters())
        return own + split * (self.parallel.size - 1)


def document_mask(segment_ids: Any) -> Any:
    """Return who may look at whom: earlier tokens of the same document. Shape (rows, 1, n, n)."""
    is_same = segment_ids[:, :, None] == segment_ids[:, None, :]
    length = segment_ids.shape[1]
    return (is_same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]


def sum_of_losses(logits: Any, labels: Any, ignore_label: int) -> Any:
    """Return the summed cross entropy of a microbatch."""
    return _cross_entropy(logits, labels, ignore_label, "sum")


def losses_of_tokens(logits: Any, labels: Any, ignore_label: int) -> Any:
    """Return the cross entropy of each token, 0 where it is not trained. Shape (rows, length)."""
    return _cross_entropy(logits, labels, ignore_label, "none").view_as(labels)


def _cross_entropy(logits: Any, labels: Any, ignore_label: int, reduction: str) -> Any:
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_label,
        reduction=reduction,
    )
