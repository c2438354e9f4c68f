"""Ways from a JPEG to resized RGB pixels that a user of a DataLoader has, and their patches.

`pillow` is the usual one. The others are the fastest found: libjpeg-turbo by simplejpeg, then a
resize by OpenCV's area or torch's antialiased kernel. OpenCV's area averages where it shrinks and
interpolates linearly where it enlarges; its other filters are never antialiased, so they don't
compete. torchvision's own decoder is as fast as libjpeg-turbo, its resize is torch's; spdl needs
FFmpeg of the system, whose JPEG decoder is slower.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import numpy as np

PATCH, MERGE, TEMPORAL = 14, 2, 2
Pixels = np.ndarray


def target_of(height: int, width: int) -> tuple[int, int]:
    """Return the nearest multiples of a merged patch (Qwen2-VL's rule within its limits)."""
    side = PATCH * MERGE
    return round(height / side) * side, round(width / side) * side


def pillow(content: bytes) -> Pixels:
    """Decode and resize by Pillow, bicubic and antialiased."""
    from PIL import Image

    image = Image.open(io.BytesIO(content)).convert("RGB")
    height, width = target_of(image.height, image.width)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def turbo_area(content: bytes) -> Pixels:
    """Decode by libjpeg-turbo, resize by OpenCV's area filter."""
    import cv2
    import simplejpeg

    pixels = simplejpeg.decode_jpeg(content, "RGB")
    height, width = target_of(*pixels.shape[:2])
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


def turbo_torch(content: bytes) -> Pixels:
    """Decode by libjpeg-turbo, resize by torch's antialiased bicubic kernel for bytes."""
    import simplejpeg
    import torch

    pixels = simplejpeg.decode_jpeg(content, "RGB")
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(
        planes, target_of(*pixels.shape[:2]), mode="bicubic", antialias=True
    )
    return resized[0].permute(1, 2, 0).numpy()


WAYS: dict[str, Callable[[bytes], Pixels]] = {
    "pillow": pillow,
    "turbo_area": turbo_area,
    "turbo_torch": turbo_torch,
}


def patches_of(pixels: Pixels) -> np.ndarray:
    """Return the patches of an image as Qwen2-VL's processor orders them, by numpy.

    Shape (patches, 3 * TEMPORAL * PATCH * PATCH), uint8.
    """
    rows, columns = (size // (PATCH * MERGE) for size in pixels.shape[:2])
    cut = pixels.reshape(rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    patches = np.empty((*ordered.shape[:5], TEMPORAL, PATCH, PATCH), np.uint8)
    for frame in range(TEMPORAL):
        patches[..., frame, :, :] = ordered
    return patches.reshape(rows * columns * MERGE * MERGE, -1)


def patches_by_planes(pixels: Pixels) -> np.ndarray:
    """Return the same patches, the fastest way found without a compiler: planes, PATCH bytes a copy."""
    import cv2

    rows, columns = (size // (PATCH * MERGE) for size in pixels.shape[:2])
    line = np.dtype(f"V{PATCH}")
    patches = np.empty((rows, columns, MERGE, MERGE, 3, TEMPORAL, PATCH), line)
    for channel, plane in enumerate(cv2.split(pixels)):
        cut = plane.view(line).reshape(rows, MERGE, PATCH, columns, MERGE)
        for frame in range(TEMPORAL):
            patches[:, :, :, :, channel, frame] = cut.transpose(0, 3, 1, 4, 2)
    return patches.view(np.uint8).reshape(rows * columns * MERGE * MERGE, -1)


def one_thread() -> None:
    """Have OpenCV and torch work on the calling thread alone, as DataLoader workers should."""
    import torch

    torch.set_num_threads(1)
    try:
        import cv2
    except ImportError:
        return
    cv2.setNumThreads(1)


def milliseconds(contents: list[bytes], repeats: int) -> dict[str, float]:
    """Return the CPU milliseconds an image of every way that can be imported, the best repeat."""
    one_thread()
    found: dict[str, float] = {}
    for name, way in WAYS.items():
        try:
            way(contents[0])
        except ImportError:
            continue
        times = []
        for _ in range(repeats):
            begun = time.process_time()
            for content in contents:
                way(content)
            times.append(time.process_time() - begun)
        found[name] = 1e3 * min(times) / len(contents)
    return found
