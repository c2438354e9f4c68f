"""Every colour model that Pillow gives becomes RGB bytes on a stated background.

16 bits become 8 by their high byte, as Pillow does it for colour PNG itself. ICC profiles are not
applied; Lab is converted to sRGB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from msd_daemon.transforms.media_error import MediaError

Pixels = npt.NDArray[np.uint8]
Background = tuple[int, ...]

WORD_MAX = (1 << 16) - 1
_WITH_ALPHA = frozenset({"RGBA", "LA", "PA", "La", "RGBa"})
_WITH_KEY = frozenset({"1", "L", "P", "RGB"})
"""Modes that may name one transparent colour."""


def to_rgb(image: Any, background: Background) -> Any:
    """Return a decoded Pillow image in mode RGB.

    Args:
        image: Loaded.
        background: Red, green and blue that transparent pixels lie on.

    Raises:
        MediaError: The colour model says no range of its values.
    """
    mode = image.mode
    if mode in _WITH_ALPHA or (mode in _WITH_KEY and "transparency" in image.info):
        return _compose(image.convert("RGBA"), background)
    if mode == "RGB":
        return image
    if mode == "LAB":
        return _from_lab(image)
    if mode.startswith("I"):
        return _from_words(image, background)
    if mode == "F":
        raise MediaError(
            f"{image.format} image of 32-bit floats says no range of its values; convert it to 8 "
            "or 16 bits"
        )
    return image.convert("RGB")


def _compose(image: Any, background: Background) -> Any:
    from PIL import Image

    below = Image.new("RGB", image.size, background)
    below.paste(image, mask=image.getchannel("A"))
    return below


def _from_words(image: Any, background: Background) -> Any:
    from PIL import Image

    words = np.asarray(image)
    low, high = (int(words.min()), int(words.max())) if words.size else (0, 0)
    if low < 0 or high > WORD_MAX:
        raise MediaError(
            f"{image.format} image of 32-bit integers has values {low} to {high}, the limit is "
            f"0 to {WORD_MAX}; convert it to 8 or 16 bits"
        )
    key = image.info.get("transparency")
    grey = Image.fromarray((words >> 8).astype(np.uint8)).convert("RGB")
    if isinstance(key, int):
        grey.paste(
            background, mask=Image.fromarray(np.where(words == key, 255, 0).astype(np.uint8))
        )
    return grey


_lab_transform: Any = None


def _from_lab(image: Any) -> Any:
    global _lab_transform
    from PIL import ImageCms

    if _lab_transform is None:
        _lab_transform = ImageCms.buildTransform(
            ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
        )
    return ImageCms.applyTransform(image, _lab_transform)
