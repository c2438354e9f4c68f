"""Orders and values of patches, against plain loops over the published layouts."""

from __future__ import annotations

import numpy as np
import pytest

from federation.model.media import PatchRule
from msd_daemon.transforms import image_resize
from msd_daemon.transforms.image_patches import Grid, grid_of, patchify, value_table

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
FORMS = ["pillow"] if image_resize.kernel is None else ["c", "pillow"]


def frames_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def qwen2_vl(frames: np.ndarray, patch: int, temporal: int, merge: int) -> list[list[int]]:
    """Qwen2-VL's processor in plain loops: reshape(t, tp, c, h/m, m, p, w/m, m, p), then
    transpose(0, 3, 6, 4, 7, 2, 1, 5, 8); the last frame is repeated up to a multiple of tp."""
    frames = list(frames)
    while len(frames) % temporal:
        frames.append(frames[-1])
    height, width = frames[0].shape[:2]
    rows = []
    for group in range(len(frames) // temporal):
        for square_row in range(height // patch // merge):
            for square_column in range(width // patch // merge):
                for row in range(merge):
                    for column in range(merge):
                        top = (square_row * merge + row) * patch
                        left = (square_column * merge + column) * patch
                        rows.append(
                            [
                                int(frames[group * temporal + frame][top + y, left + x, channel])
                                for channel in range(3)
                                for frame in range(temporal)
                                for y in range(patch)
                                for x in range(patch)
                            ]
                        )
    return rows


def raster(frames: np.ndarray, patch: int, temporal: int) -> list[list[int]]:
    frames = list(frames)
    while len(frames) % temporal:
        frames.append(frames[-1])
    height, width = frames[0].shape[:2]
    return [
        [
            int(frames[group * temporal + frame][top + y, left + x, channel])
            for frame in range(temporal)
            for y in range(patch)
            for x in range(patch)
            for channel in range(3)
        ]
        for group in range(len(frames) // temporal)
        for top in range(0, height, patch)
        for left in range(0, width, patch)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("frames", "patch", "temporal", "merge"),
    [
        ((1, 28, 56), 14, 2, 2),
        ((1, 12, 8), 2, 2, 2),
        ((4, 12, 8), 2, 2, 2),
        ((3, 12, 8), 2, 2, 1),
        ((2, 16, 16), 16, 1, 1),
        ((1, 36, 18), 3, 1, 3),
        ((6, 34, 68), 17, 3, 2),
    ],
)
def test_qwen2_vl_is_the_published_order(form, frames, patch, temporal, merge) -> None:
    pixels = frames_of(*frames)
    rule = PatchRule("qwen2_vl", patch, temporal, merge)
    found = patchify(pixels, rule, None, use=form)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.tolist() == qwen2_vl(pixels, patch, temporal, merge)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["raster", "navit"])
@pytest.mark.parametrize(
    ("frames", "patch", "temporal"), [((1, 32, 48), 16, 1), ((1, 9, 6), 3, 2), ((3, 8, 8), 4, 2)]
)
def test_raster_and_navit_go_row_by_row(form, layout, frames, patch, temporal) -> None:
    pixels = frames_of(*frames)
    found = patchify(pixels, PatchRule(layout, patch, temporal), None, use=form)
    assert found.tolist() == raster(pixels, patch, temporal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["raster", "qwen2_vl"])
def test_values_are_normalised_bit_by_bit_as_processors_do(form, dtype, layout) -> None:
    rule = PatchRule(layout, 14, 2, 2, CLIP_MEAN, CLIP_STD)
    pixels = frames_of(1, 56, 84)
    plain = patchify(pixels, rule, None)
    found = patchify(pixels, rule, value_table(rule, dtype), use=form)
    assert found.dtype == dtype
    # rescale: float64 product rounded to float32; normalise: float32 (x - mean) / std
    rescaled = (plain.astype(np.float64) * (1 / 255)).astype(np.float32)
    by_channel = (-1, 3, 2 * 14 * 14) if layout == "qwen2_vl" else (-1, 2 * 14 * 14, 3)
    shape = (1, 3, 1) if layout == "qwen2_vl" else (1, 1, 3)
    mean = np.array(CLIP_MEAN, np.float32).reshape(shape)
    std = np.array(CLIP_STD, np.float32).reshape(shape)
    wanted = ((rescaled.reshape(by_channel) - mean) / std).astype(dtype)
    assert found.tobytes() == wanted.tobytes()


def test_the_grid_counts_patches() -> None:
    rule = PatchRule("qwen2_vl", 14, 2, 2)
    assert grid_of(rule, 1, 420, 644) == Grid(1, 30, 46)
    assert grid_of(rule, 5, 28, 56) == Grid(3, 2, 4)
    assert Grid(3, 2, 4).patches == 24


@pytest.mark.skipif(image_resize.kernel is None, reason="the pixel kernel was not built")
def test_the_kernel_refuses_what_does_not_fit() -> None:
    call = image_resize.kernel.patchify
    pixels, out = frames_of(1, 28, 28), np.zeros((4, 588), np.uint8)
    with pytest.raises(ValueError, match="no whole number of patches"):
        call(pixels, 1, 28, 28, out, 13, 1, 1, True, b"", 1)
    with pytest.raises(ValueError, match="no whole number of patches"):
        call(frames_of(3, 28, 28), 3, 28, 28, out, 14, 2, 1, True, b"", 1)
    with pytest.raises(ValueError, match="target has 2352 bytes, expected 4704"):
        call(pixels, 1, 28, 28, out, 14, 2, 1, True, b"", 1)
    with pytest.raises(ValueError, match="table has 0 bytes, expected 3072"):
        call(pixels, 1, 28, 28, np.zeros((4, 588), np.float32), 14, 1, 1, True, b"", 4)
    with pytest.raises(ValueError, match="1, 2 or 4 bytes"):
        call(pixels, 1, 28, 28, out, 14, 1, 1, True, b"", 3)
