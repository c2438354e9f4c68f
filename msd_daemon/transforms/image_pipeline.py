"""From image or video bytes to patches: decode, resize, the user's step, patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.media import MediaRule, PatchRule, ResizeRule
from msd_daemon.transforms.audio_pipeline import describe
from msd_daemon.transforms.image_decode import decode_image
from msd_daemon.transforms.image_patches import Grid, grid_of, patchify, value_table
from msd_daemon.transforms.image_resize import Target, resize, target_size
from msd_daemon.transforms.media_error import MediaError, over_limit
from msd_daemon.transforms.video_decode import decode_frames

Pixels = npt.NDArray[np.uint8]
UserStep = Callable[[npt.NDArray[Any], np.random.Generator], npt.NDArray[Any]]


class ImagePipeline:
    """Makes patches of images, or of videos, by one rule."""

    def __init__(self, rule: MediaRule, call: UserStep | None) -> None:
        chosen = rule.video if rule.modality == "video" else rule.image
        assert chosen is not None
        self.rule, self.call = rule, call
        self.resize: ResizeRule = chosen.resize
        self.patches: PatchRule = chosen.patches
        self.table = value_table(self.patches, rule.unit_dtype)

    def image(self, content: bytes, rng: np.random.Generator) -> tuple[npt.NDArray[Any], Grid]:
        """Return the patches of an image and its grid.

        Raises:
            MediaError: It is no sample, or the user's step gave what is no image.
        """
        rule = self.rule.image
        assert rule is not None
        target: Target | None = None

        def wanted(height: int, width: int) -> tuple[int, int]:
            nonlocal target
            target = target_size(self.resize, height, width, rng)
            return target.height, target.width

        decoded = decode_image(content, rule, wanted)
        if target is None:  # decoded whole, by Pillow or without a header that was believed
            target = target_size(self.resize, decoded.height, decoded.width, rng)
        pixels = resize(decoded.pixels, target, self.resize, decoded.extent)
        if self.call is not None:
            pixels = self._checked(self.call(pixels, rng), 3)
        return self._cut(pixels[None])

    def video(self, content: bytes, rng: np.random.Generator) -> tuple[npt.NDArray[Any], Grid]:
        """Return the patches of a video and its grid; frames are those that its rule chooses.

        Raises:
            MediaError: It is no sample, or the user's step gave what is no video.
        """
        rule = self.rule.video
        assert rule is not None
        target: Target | None = None
        frames: list[Pixels] = []
        for times, frame in decode_frames(content, rule):
            if target is None:  # later frames of another size get that of the first
                height, width = frame.shape[:2]
                target = target_size(self.resize, height, width, rng)
            frames += [resize(frame, target, self.resize)] * times
            self._check_units(grid_of(self.patches, len(frames), *frames[0].shape[:2]))
        pixels = np.stack(frames)
        if self.call is not None:
            pixels = self._checked(self.call(pixels, rng), 4)
        return self._cut(pixels)

    def _cut(self, frames: Pixels) -> tuple[npt.NDArray[Any], Grid]:
        count, height, width = frames.shape[:3]
        side = self.patches.side
        if height % side or width % side:
            raise MediaError(
                f"{self.rule.modality} of {width}x{height} pixels does not divide into patches of "
                f"{side}; give resize a multiple of {side}"
            )
        grid = grid_of(self.patches, count, height, width)
        self._check_units(grid)
        return patchify(frames, self.patches, self.table), grid

    def _check_units(self, grid: Grid) -> None:
        if grid.patches > self.rule.row_units_max:
            raise over_limit(
                f"{self.rule.modality} of {grid.t}x{grid.h}x{grid.w} patches",
                grid.patches,
                f"{self.rule.row_units_max} of a row",
                "batch.microbatch_patches, or lower resize.max_pixels",
            )

    def _checked(self, pixels: Any, axes: int) -> Pixels:
        is_picture = isinstance(pixels, np.ndarray) and pixels.ndim == axes
        if not is_picture or pixels.dtype != np.uint8 or pixels.shape[-1] != 3 or not pixels.size:
            shape = "(height, width, 3)" if axes == 3 else "(frames, height, width, 3)"
            raise MediaError(
                f"{self.rule.step.call if self.rule.step else 'the user step'} gave {describe(pixels)} for the "
                f"{self.rule.modality}; return uint8 of shape {shape}"
            )
        return np.ascontiguousarray(pixels)
