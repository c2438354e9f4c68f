"""Sizes that policies give, and pixels that equal Pillow's antialiased resize."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from federation.model.media import ResizeRule
from msd_daemon.transforms import image_resize
from msd_daemon.transforms.image_resize import Target, resize, target_size
from msd_daemon.transforms.media_error import MediaError

needs_kernel = pytest.mark.skipif(
    image_resize.kernel is None, reason="the pixel kernel was not built"
)
FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}


def size(rule: ResizeRule, height: int, width: int, seed: int = 0) -> Target:
    return target_size(rule, height, width, np.random.default_rng(seed))


@needs_kernel
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_gives_the_bytes_of_pillow(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    side = int(rng.choice([4, 40, 300]))
    height, width, new_height, new_width = (int(n) for n in rng.integers(1, side, 4))
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if seed % 2:  # hard edges reach the clipped ends
        pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
    rule = ResizeRule(filter=name)
    found = resize(pixels, Target(new_height, new_width), rule, use="c")
    wanted = Image.fromarray(pixels).resize((new_width, new_height), FILTERS[name])
    assert np.array_equal(found, np.asarray(wanted))


@needs_kernel
@pytest.mark.parametrize("seed", range(20))
def test_both_give_the_same_bytes_of_a_part(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width, new_height, new_width = (int(n) for n in rng.integers(2, 150, 4))
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    extent = (height - float(rng.choice([0, 0.25, 0.625])), width - float(rng.choice([0, 0.5])))
    target = Target(new_height, new_width)
    by_kernel = resize(pixels, target, ResizeRule(), extent, use="c")
    assert np.array_equal(by_kernel, resize(pixels, target, ResizeRule(), extent, use="pillow"))


@needs_kernel
def test_the_kernel_refuses_what_does_not_fit() -> None:
    pixels, out = np.zeros((4, 5, 3), np.uint8), np.zeros((2, 2, 3), np.uint8)
    call = image_resize.kernel.resize
    with pytest.raises(ValueError, match="source has 60 bytes, expected 75"):
        call(pixels, 5, 5, 5.0, 5.0, out, 2, 2, 0)
    with pytest.raises(ValueError, match="target has 12 bytes, expected 27"):
        call(pixels, 4, 5, 4.0, 5.0, out, 3, 3, 0)
    with pytest.raises(ValueError, match="sizes are 1 to"):
        call(pixels, 4, 5, 4.0, 5.0, out, 0, 2, 0)
    with pytest.raises(ValueError, match="no part of the source"):
        call(pixels, 4, 5, 4.5, 5.0, out, 2, 2, 0)
    with pytest.raises(ValueError, match="no part of the source"):
        call(pixels, 4, 5, float("nan"), 5.0, out, 2, 2, 0)
    with pytest.raises(ValueError, match="none of 0 to 2"):
        call(pixels, 4, 5, 4.0, 5.0, out, 2, 2, 3)


def smart_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The published rule of Qwen2-VL's image processor, in its own words."""
    h_bar = round(height / factor) * factor
    w_bar = round(width / factor) * factor
    if h_bar * w_bar > most:
        beta = math.sqrt((height * width) / most)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < least:
        beta = math.sqrt(least / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


def test_native_is_the_published_rule() -> None:
    rule = ResizeRule("native", multiple=28, pixels_min=3136, pixels_max=1003520)
    assert size(rule, 427, 640) == Target(420, 644)
    assert size(rule, 2400, 3840) == Target(784, 1260)
    assert size(rule, 1, 1) == Target(56, 56)
    rng = np.random.default_rng(0)
    for height, width in rng.integers(1, 6000, (2000, 2)).tolist():
        if max(height, width) > 200 * min(height, width):
            continue
        assert size(rule, height, width)[:2] == smart_resize(height, width, 28, 3136, 1003520)
    with pytest.raises(MediaError, match="10x2001 pixels: one side is more than 200 times"):
        size(rule, 2001, 10)


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        (ResizeRule("none"), (33, 77), Target(33, 77)),
        (ResizeRule("fixed", height=224, width=336), (33, 77), Target(224, 336)),
        (ResizeRule("multiple", multiple=16), (33, 77), Target(32, 80)),
        (ResizeRule("multiple", multiple=16), (3, 7), Target(16, 16)),
        (ResizeRule("short_side", side=224, multiple=16), (480, 640), Target(224, 304)),
        (ResizeRule("short_side", side=224, multiple=16), (640, 480), Target(304, 224)),
        (
            ResizeRule("short_side", side=224, crop="center"),
            (480, 640),
            Target(224, 298, (0, 37, 224, 224)),
        ),
        (ResizeRule("max_pixels", multiple=16, pixels_max=65536), (100, 100), Target(96, 96)),
        (ResizeRule("max_pixels", multiple=16, pixels_max=65536), (1000, 1000), Target(256, 256)),
        (ResizeRule("max_pixels", multiple=16, pixels_max=65536), (10, 60000), Target(16, 4096)),
        (ResizeRule("max_pixels", multiple=16, pixels_max=65536), (60000, 10), Target(4096, 16)),
    ],
)
def test_policies(rule: ResizeRule, before: tuple[int, int], after: Target) -> None:
    assert size(rule, *before) == after


def test_max_pixels_is_a_limit() -> None:
    rule = ResizeRule("max_pixels", multiple=14, pixels_max=50176)
    for height, width in np.random.default_rng(1).integers(1, 9000, (500, 2)).tolist():
        found = size(rule, height, width)
        assert found.height * found.width <= 50176
        assert found.height % 14 == found.width % 14 == 0


def test_a_random_crop_lies_inside_and_hangs_on_the_generator_alone() -> None:
    rule = ResizeRule("short_side", side=100, crop="random")
    crops = [size(rule, 300, 600, seed).crop for seed in range(50)]
    assert crops == [size(rule, 300, 600, seed).crop for seed in range(50)]
    lefts = {crop[1] for crop in crops}
    assert min(lefts) >= 0
    assert max(lefts) <= 100
    assert len(lefts) > 20
    pixels = resize(np.zeros((300, 600, 3), np.uint8), size(rule, 300, 600), rule)
    assert pixels.shape == (100, 100, 3)
    assert pixels.flags.c_contiguous


def test_a_side_that_grows_too_long_is_refused() -> None:
    with pytest.raises(MediaError, match="a side has at most 65536"):
        size(ResizeRule("short_side", side=1000), 2, 60000)
