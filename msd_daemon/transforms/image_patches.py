"""Upright RGB frames become patches; orders and values are those that encoders are trained on.

raster, navit: patches row by row; values (frame, row, column, channel) in C order.
qwen2_vl: patches by frame group, then by squares of merge x merge patches, row by row, and row by
row inside a square; values (channel, frame, row, column) in C order. These are the rows of
`pixel_values` of Qwen2-VL's processor.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import CHANNELS, PatchRule
from msd_daemon.transforms import image_resize

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]


class Grid(NamedTuple):
    """Patches of an item, before any merge."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        """Patches in all."""
        return self.t * self.h * self.w


def grid_of(rule: PatchRule, frames: int, height: int, width: int) -> Grid:
    """Return the grid of frames whose sides are multiples of `rule.side`.

    Frames are filled up to a multiple of `rule.temporal` by repeating the last one.
    """
    return Grid(-(-frames // rule.temporal), height // rule.patch, width // rule.patch)


def value_table(rule: PatchRule, dtype: str) -> Array | None:
    """Return what each byte of each channel becomes; None where bytes stay bytes.

    Computed as image processors do it: pixel * (1 / 255) rounded to float32, minus mean, over std
    in float32, then rounded to the dtype. Shape (3, 256).
    """
    if dtype == "uint8":
        return None
    rescaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean = np.array(rule.mean, np.float32)[:, None]
    std = np.array(rule.std, np.float32)[:, None]
    return np.ascontiguousarray(((rescaled[None] - mean) / std).astype(dtype))


def patchify(
    frames: Pixels,
    rule: PatchRule,
    table: Array | None,
    *,
    use: Literal["c", "pillow"] | None = None,
) -> Array:
    """Return the patches of an item.

    Args:
        frames: Shape (frames, height, width, 3); sides are multiples of `rule.side`.
        rule: Layout and sizes.
        table: As `value_table` gives it.
        use: `pillow` forces the numpy form, for tests and measurements.

    Returns:
        Shape (patches, values), C-contiguous, of the table's dtype, else uint8.
    """
    count, height, width = frames.shape[:3]
    short = -count % rule.temporal
    if short and count > 1:
        frames = np.concatenate([frames, np.repeat(frames[-1:], short, axis=0)])
    grid = grid_of(rule, count, height, width)
    if (use or image_resize.KERNEL) != "c":
        return _patchify_by_numpy(frames, rule, grid, table)
    dtype = np.dtype(np.uint8) if table is None else table.dtype
    patches = np.empty((grid.patches, rule.values), dtype)
    is_qwen = rule.layout == "qwen2_vl"
    image_resize.kernel.patchify(
        np.ascontiguousarray(frames),
        *frames.shape[:3],
        patches,
        rule.patch,
        rule.temporal,
        rule.merge if is_qwen else 1,
        is_qwen,
        b"" if table is None else table,
        dtype.itemsize,
    )
    return patches


def unpatchify(patches: Array, rule: PatchRule, grid: tuple[int, int, int]) -> Pixels:
    """Return the frames that patches were made of, as the model sees them.

    Args:
        patches: Shape (patches, values), of uint8 or normalised.
        rule: Layout and sizes.
        grid: Patches in time, height and width.

    Returns:
        Shape (t * temporal, height, width, 3); an image's frames are all alike.
    """
    shape, order, channel_axis = _axes(rule, Grid(*grid))
    values = patches.reshape([shape[axis] for axis in order])
    if values.dtype != np.uint8:
        broadcast = [1] * values.ndim
        broadcast[channel_axis] = CHANNELS
        mean = np.array(rule.mean, np.float32).reshape(broadcast)
        std = np.array(rule.std, np.float32).reshape(broadcast)
        pixels = (values.astype(np.float32) * std + mean) * 255
        values = pixels.round().clip(0, 255).astype(np.uint8)
    frames = values.transpose(np.argsort(order))
    height, width = grid[1] * rule.patch, grid[2] * rule.patch
    return np.ascontiguousarray(frames).reshape(grid[0] * rule.temporal, height, width, CHANNELS)


def _axes(rule: PatchRule, grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shape of cut frames, the order of its axes in patches, that of channels there."""
    p, t, m = rule.patch, rule.temporal, rule.merge
    if rule.layout == "qwen2_vl":
        shape = (grid.t, t, grid.h // m, m, p, grid.w // m, m, p, CHANNELS)
        return shape, (0, 2, 5, 3, 6, 8, 1, 4, 7), 5
    return (grid.t, t, grid.h, p, grid.w, p, CHANNELS), (0, 2, 4, 1, 3, 5, 6), 6


def _patchify_by_numpy(frames: Pixels, rule: PatchRule, grid: Grid, table: Array | None) -> Array:
    if len(frames) == 1:
        frames = np.repeat(frames, rule.temporal, axis=0)
    cut, order, channel_axis = _axes(rule, grid)
    patches = np.ascontiguousarray(frames.reshape(cut).transpose(order))
    if table is not None:
        shape = [1] * patches.ndim
        shape[channel_axis] = CHANNELS
        patches = table[np.arange(CHANNELS).reshape(shape), patches]
    return patches.reshape(grid.patches, rule.values)
