"""The demo's vision-language model: a small ViT, a projector, and the demo's GPT behind them.

Imported by the rank program alone, since it needs torch. The encoder is whole on every
tensor-parallel rank: its outputs join the GPT's embeddings, whose gradients are equal there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from msd_client.media import Media
from msd_client.msdctl.demo_images import PATCH_VALUES, PICTURE_PATCHES
from msd_client.msdctl.demo_model import Gpt, GptShape, TensorParallel

ENCODER_WIDTH, ENCODER_HEADS = 96, 4


class Encoder(nn.Module):  # type: ignore[misc] # torch is not seen by the type check
    """Patches of pictures to vectors: an embedding, places, and one layer of attention."""

    def __init__(self, width_out: int) -> None:
        super().__init__()
        width = ENCODER_WIDTH
        self.patch = nn.Linear(PATCH_VALUES, width)
        self.places = nn.Parameter(torch.randn(PICTURE_PATCHES, width) * 0.02)
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_hidden = nn.LayerNorm(width)
        self.hidden = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.projector = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width_out)
        )

    def forward(self, patches: Any) -> Any:
        """Return a vector for each patch.

        Args:
            patches: Bytes, pictures of PICTURE_PATCHES patches side by side. Shape (pictures *
                PICTURE_PATCHES, PATCH_VALUES).

        Returns:
            Shape (pictures * PICTURE_PATCHES, width of the GPT).
        """
        pixels = patches.float() / 127.5 - 1
        x = self.patch(pixels).view(-1, PICTURE_PATCHES, ENCODER_WIDTH) + self.places
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (ENCODER_HEADS, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        x = x + self.hidden(self.norm_hidden(x))
        return self.projector(x).flatten(0, 1)


class Vlm(nn.Module):  # type: ignore[misc]
    """Encoder and GPT. Equal seeds give equal whole weights, whatever the group's size."""

    def __init__(self, shape: GptShape, parallel: TensorParallel, seed: int) -> None:
        super().__init__()
        self.gpt = Gpt(shape, parallel, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = Encoder(shape.width)

    @property
    def blocks(self) -> Any:
        """Layers whose weights are split over the tensor-parallel ranks."""
        return self.gpt.blocks

    def forward(self, batch: Any, pictures: Media) -> Any:
        """Return logits. Shape (rows, length, vocabulary).

        Args:
            batch: A microbatch; tokens, positions and segments are read.
            pictures: Its images.
        """
        added = self.encoder(pictures.patches)
        return self.gpt(
            batch.tokens, batch.position_ids, batch.segment_ids, (pictures.places, added)
        )

    def whole_size(self) -> int:
        """Return the parameters of the whole model, over all tensor-parallel ranks."""
        own: int = sum(parameter.numel() for parameter in self.encoder.parameters())
        return own + self.gpt.whole_size()


def caption_losses(losses: Any, batch: Any, pictures: Media, ignore_label: int) -> Any:
    """Return the summed loss of captions, their tokens, and the pictures of a microbatch.

    Args:
        losses: Cross entropy of each token, 0 where it is not trained. Shape (rows, length).
        batch: The microbatch.
        pictures: Its images.
        ignore_label: Label of tokens that are not trained.

    Returns:
        Shape (3,), float32.
    """
    is_caption = torch.isin(batch.segment_ids, pictures.segments)
    tokens = (is_caption & (batch.labels != ignore_label)).sum()
    total = (losses * is_caption).sum()
    return torch.stack([total, tokens.float(), torch.tensor(float(len(pictures.segments)))])
