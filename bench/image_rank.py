"""One rank of the image bench: idle, on a DataLoader, or on msd; driven by its parent over stdin.

Every rank copies all of a batch into memory of its own, as the copy to a device would read it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from bench.rank import drive, pause

torch.set_num_threads(1)

FIELDS = ("tokens", "labels", "position_ids", "cu_seqlens")
MEDIA = ("patches", "grids", "cu_seqlens")


class Copies:
    """A small buffer that batches are copied through: their bytes are read, none are kept."""

    def __init__(self) -> None:
        self._buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def take(self, tensor: torch.Tensor) -> None:
        """Copy a tensor."""
        flat = tensor.reshape(-1).view(torch.uint8)
        for part in flat.split(len(self._buffer)):
            self._buffer[: len(part)].copy_(part)


def peer_samples(options: argparse.Namespace) -> Iterator[int]:
    """Read from a DataLoader; give the samples of each batch."""
    from bench.image_peer import PackedPhotos
    from bench.torch_loader import loader

    dataset = PackedPhotos(
        options.tar,
        options.kind,
        options.row_tokens,
        options.row_patches,
        options.rank,
        options.ranks,
    )
    copies = Copies()
    for batch in loader(dataset, options.workers):
        for tensor in batch.values():
            copies.take(tensor)
        yield len(batch["image_grids"])


def msd_samples(options: argparse.Namespace) -> Iterator[int]:
    """Read from msd; give the samples of each batch."""
    import msd_client

    copies = Copies()
    with msd_client.connect(
        options.job,
        mesh={"dp": options.ranks},
        rank=options.rank,
        daemon=options.socket,
        deadlines={"next_batch_s": 60.0},
    ) as data:
        for step in data.train:
            for batch in step:
                images = copy_batch(copies, batch)
                del batch  # else the loop variable keeps its slot
                yield images


def copy_batch(copies: Copies, batch: Any) -> int:
    """Copy a batch of msd; return its images."""
    media = batch.media("image")
    for name in FIELDS:
        copies.take(batch[name])
    for name in MEDIA:
        copies.take(getattr(media, name))
    return len(media.grids)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", help="idle, msd, or a way of bench.image_decoders")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--tar", default="")
    parser.add_argument("--job", default="")
    parser.add_argument("--socket", default="")
    parser.add_argument("--row-tokens", type=int, default=0)
    parser.add_argument("--row-patches", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--count", type=int, default=8)
    options = parser.parse_args()
    if options.kind == "idle":
        import msd_client  # noqa: F401

        pause("warm")
        return
    stream = msd_samples(options) if options.kind == "msd" else peer_samples(options)
    drive(stream, options.warm, options.count)


if __name__ == "__main__":
    main()
