"""The size that a policy gives a picture, and the antialiased resize to it.

The C kernel and Pillow give the same bytes; Pillow stands in where the kernel was not built.
`MSD_PIXELS=pillow` forces that.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.kernel_stamp import load_kernel
from federation.model.media import SIDE_PIXELS_MAX, ResizeRule
from msd_daemon.transforms.media_error import MediaError

Pixels = npt.NDArray[np.uint8]

NATIVE_RATIO_MAX = 200
"""Longest against shortest side under `native`; Qwen2-VL's processor refuses the same."""

_FILTERS = {"bicubic": 0, "bilinear": 1, "lanczos": 2}


def _load_kernel() -> Any:
    if os.environ.get("MSD_PIXELS", "") == "pillow":
        return None
    return load_kernel("msd_daemon.transforms._image_kernel", Path(__file__).parent)


kernel: Any = _load_kernel()

KERNEL: Literal["c", "pillow"] = "pillow" if kernel is None else "c"
"""Which of the two was chosen at import."""


class Target(NamedTuple):
    """Size to resize to, and the part that is kept of it."""

    height: int
    width: int
    crop: tuple[int, int, int, int] | None = None
    """Top, left, height, width."""


def target_size(rule: ResizeRule, height: int, width: int, rng: np.random.Generator) -> Target:
    """Return the size that an upright picture gets.

    Args:
        rule: Policy and its sizes.
        height: Pixels, before.
        width: Pixels, before.
        rng: Says where a random crop lies; other policies draw nothing.

    Raises:
        MediaError: Its sides are too unlike for `native`, or a side would be too long.
    """
    target = _target(rule, height, width, rng)
    if max(target.height, target.width) > SIDE_PIXELS_MAX:
        raise MediaError(
            f"picture of {width}x{height} pixels would be resized to {target.width}x"
            f"{target.height}, a side has at most {SIDE_PIXELS_MAX}; leave it out"
        )
    return target


def _target(rule: ResizeRule, height: int, width: int, rng: np.random.Generator) -> Target:
    match rule.policy:
        case "none":
            return Target(height, width)
        case "fixed":
            return Target(rule.height, rule.width)
        case "short_side":
            return _short_side(rule, height, width, rng)
        case "multiple":
            return _nearest(rule.multiple, height, width)
        case "max_pixels":
            return _max_pixels(rule, height, width)
        case "native":
            return _native(rule, height, width)


def _nearest(multiple: int, height: int, width: int) -> Target:
    return Target(
        max(multiple, round(height / multiple) * multiple),
        max(multiple, round(width / multiple) * multiple),
    )


def _short_side(rule: ResizeRule, height: int, width: int, rng: np.random.Generator) -> Target:
    side = rule.side
    long = max(side, side * max(height, width) // min(height, width))
    new_height, new_width = (side, long) if height <= width else (long, side)
    if rule.crop == "none":
        return _nearest(rule.multiple, new_height, new_width)
    spare_rows, spare_columns = new_height - side, new_width - side
    if rule.crop == "center":
        top, left = spare_rows // 2, spare_columns // 2
    else:
        top, left = int(rng.integers(spare_rows + 1)), int(rng.integers(spare_columns + 1))
    return Target(new_height, new_width, (top, left, side, side))


def _max_pixels(rule: ResizeRule, height: int, width: int) -> Target:
    """Shrinks where there are too many pixels, never enlarges but to a whole multiple."""
    multiple, limit = rule.multiple, rule.pixels_max
    nearest = _nearest(multiple, height, width)
    if nearest.height * nearest.width <= limit:
        return nearest
    shrink = math.sqrt(limit / (height * width))
    new_height = max(1, math.floor(height * shrink / multiple)) * multiple
    new_width = max(1, math.floor(width * shrink / multiple)) * multiple
    # A long thin picture keeps one whole multiple; the other side gives way.
    if new_height * new_width > limit and new_height > new_width:
        new_height = max(1, limit // new_width // multiple) * multiple
    elif new_height * new_width > limit:
        new_width = max(1, limit // new_height // multiple) * multiple
    return Target(new_height, new_width)


def _native(rule: ResizeRule, height: int, width: int) -> Target:
    """Qwen2-VL's rule: nearest multiples, within the least and the most pixels."""
    if max(height, width) > NATIVE_RATIO_MAX * min(height, width):
        raise MediaError(
            f"picture of {width}x{height} pixels: one side is more than {NATIVE_RATIO_MAX} times "
            "the other, which resize native refuses; leave it out, or use resize max_pixels"
        )
    factor = rule.multiple
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > rule.pixels_max:
        beta = math.sqrt(height * width / rule.pixels_max)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < rule.pixels_min:
        beta = math.sqrt(rule.pixels_min / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return Target(max(factor, new_height), max(factor, new_width))


def resize(
    pixels: Pixels,
    target: Target,
    rule: ResizeRule,
    extent: tuple[float, float] | None = None,
    *,
    use: Literal["c", "pillow"] | None = None,
) -> Pixels:
    """Return pixels of the wanted size.

    Args:
        pixels: Shape (height, width, 3).
        target: As `target_size` gives it.
        rule: Its filter is used.
        extent: Height and width of the part from the top left that is the picture, where the last
            row and column are a part of a pixel; None: all.
        use: Overrides the choice of the import, for tests and measurements.
    """
    height, width = target.height, target.width
    extent = extent or (float(pixels.shape[0]), float(pixels.shape[1]))
    if extent != (height, width):
        if (use or KERNEL) == "c":
            source = np.ascontiguousarray(pixels)
            pixels = np.empty((height, width, 3), np.uint8)
            shape = (*source.shape[:2], *extent)
            kernel.resize(source, *shape, pixels, height, width, _FILTERS[rule.filter])
        else:
            pixels = _resize_by_pillow(pixels, extent, (height, width), rule.filter)
    if target.crop is not None:
        top, left, rows, columns = target.crop
        pixels = np.ascontiguousarray(pixels[top : top + rows, left : left + columns])
    return pixels


def _resize_by_pillow(
    pixels: Pixels, extent: tuple[float, float], size: tuple[int, int], name: str
) -> Pixels:
    from PIL import Image

    how = getattr(Image.Resampling, name.upper())
    box = (0.0, 0.0, extent[1], extent[0])
    return np.asarray(Image.fromarray(pixels).resize((size[1], size[0]), how, box=box))
