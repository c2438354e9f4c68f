"""The peer of the image bench: a PyTorch DataLoader as a careful user writes it.

Each worker reads its part of the tar (places listed once, shuffled by a seed), decodes, resizes and
cuts patches, and fills rows in order; a whole microbatch is one row, made in the worker
(`batch_size=None`) and put together straight into the shared memory that it travels in, as
torch's own collate does.
"""

from __future__ import annotations

import importlib.util
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from bench.image_decoders import (
    MERGE,
    PATCH,
    WAYS,
    one_thread,
    patches_by_planes,
    patches_of,
)

PLACEHOLDER, BEGIN, END, STOP = 255, 254, 253, 256
IGNORE = -100


class Photo(NamedTuple):
    """One sample."""

    ids: np.ndarray
    is_trained: np.ndarray
    patches: np.ndarray
    grid: tuple[int, int, int]


class Place(NamedTuple):
    """Where the files of a sample lie in the tar."""

    image: tuple[int, int]
    text: tuple[int, int]


def list_tar(path: Path) -> list[Place]:
    """Return the places of all samples: first byte and bytes of image and text."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, ending = member.name.partition(".")
            found.setdefault(key, {})[ending] = (member.offset_data, member.size)
    return [Place(parts["jpg"], parts["txt"]) for parts in found.values()]


class PackedPhotos(IterableDataset):
    """Packed rows of captioned photos."""

    def __init__(
        self, tar: str, way: str, row_tokens: int, row_patches: int, rank: int, ranks: int
    ) -> None:
        self.tar, self.way = Path(tar), WAYS[way]
        has_opencv = importlib.util.find_spec("cv2") is not None
        self.cut = patches_by_planes if has_opencv and way != "pillow" else patches_of
        self.row_tokens, self.row_patches = row_tokens, row_patches
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        row: list[Photo] = []
        tokens = patches = 0
        for photo in self._photos():
            too_long = tokens + len(photo.ids) > self.row_tokens
            if too_long or patches + len(photo.patches) > self.row_patches:
                yield packed(row, self.row_tokens)
                row, tokens, patches = [], 0, 0
            row.append(photo)
            tokens += len(photo.ids)
            patches += len(photo.patches)

    def _photos(self) -> Iterator[Photo]:
        one_thread()
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        shard, shards = self.rank * workers + worker, self.ranks * workers
        places = list_tar(self.tar)
        epoch = 0
        with self.tar.open("rb") as file:
            while True:
                order = np.random.default_rng(epoch).permutation(len(places))[shard::shards]
                for number in order.tolist():
                    image, text = (read_at(file, *part) for part in places[number])
                    yield self._photo(image, text)
                epoch += 1

    def _photo(self, image: bytes, text: bytes) -> Photo:
        pixels = self.way(image)
        patches = self.cut(pixels)
        taken = len(patches) // MERGE**2
        ids = np.empty(taken + len(text) + 3, np.int64)
        ids[0], ids[1 : taken + 1], ids[taken + 1] = BEGIN, PLACEHOLDER, END
        ids[taken + 2 : -1] = np.frombuffer(text, np.uint8)
        ids[-1] = STOP
        is_trained = np.zeros(len(ids), bool)
        is_trained[taken + 2 :] = True
        return Photo(
            ids, is_trained, patches, (1, pixels.shape[0] // PATCH, pixels.shape[1] // PATCH)
        )


def read_at(file, begin: int, size: int) -> bytes:
    file.seek(begin)
    return file.read(size)


def packed(row: list[Photo], row_tokens: int) -> dict[str, torch.Tensor]:
    """Return a microbatch of one row: tokens, labels, positions and boundaries, and all patches."""
    tokens = np.zeros((1, row_tokens), np.int32)
    labels = np.full((1, row_tokens), IGNORE, np.int64)
    positions = np.zeros((1, row_tokens), np.int32)
    at, ends = 0, [0]
    for photo in row:
        end = at + len(photo.ids)
        tokens[0, at:end] = photo.ids
        own = np.where(photo.is_trained, photo.ids, IGNORE)
        labels[0, at : end - 1] = own[1:]
        positions[0, at:end] = np.arange(len(photo.ids))
        ends.append(end)
        at = end
    count = sum(len(photo.patches) for photo in row)
    patches = shared_bytes(count, row[0].patches.shape[1])
    torch.cat([torch.from_numpy(photo.patches) for photo in row], out=patches)
    units = [0, *np.cumsum([len(photo.patches) for photo in row]).tolist()]
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
        "image_patches": patches,
        "image_grids": torch.tensor([photo.grid for photo in row], dtype=torch.int32),
        "image_cu_seqlens": torch.tensor(units, dtype=torch.int32),
    }


def shared_bytes(rows: int, values: int) -> torch.Tensor:
    """Return a tensor that a worker need not copy to send: its memory is shared already."""
    if get_worker_info() is None:
        return torch.empty(rows, values, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(rows * values)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (rows, values))
