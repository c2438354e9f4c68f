"""Pictures for `msdctl demo --multimodal`: drawn shapes with captions that name them, in a tar.

The captions hold nothing that the pictures don't show, so a model that looks at them has less to
guess; the source's part of the job, and the job's keys for images, stand here too.
"""

from __future__ import annotations

import io
import itertools
import math
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msd_client.contract.errors import ResourceError
from msd_client.msdctl.demo_sources import DemoSource

PICTURES = 2000
PICTURES_NAME = "pictures"
SIDES = (36, 40, 48, 56)
"""Pixels; pictures are not square, the job's resize makes them so."""
SIDE_PIXELS, PATCH_PIXELS = 32, 8
PICTURE_PATCHES = (SIDE_PIXELS // PATCH_PIXELS) ** 2
PATCH_VALUES = 3 * PATCH_PIXELS**2
SEED = 17

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 70),
    "blue": (45, 80, 220),
    "yellow": (240, 200, 40),
    "purple": (140, 60, 180),
    "orange": (245, 130, 30),
    "black": (15, 15, 15),
}
GROUNDS = {"white": (250, 250, 250), "grey": (150, 150, 150), "pink": (250, 190, 200)}
SIZES = {"small": 0.22, "large": 0.42}

Box = tuple[float, float, float, float]


def _circle(draw: Any, box: Box, colour: tuple[int, int, int]) -> None:
    draw.ellipse(box, fill=colour)


def _square(draw: Any, box: Box, colour: tuple[int, int, int]) -> None:
    draw.rectangle(box, fill=colour)


def _triangle(draw: Any, box: Box, colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    draw.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=colour)


def _cross(draw: Any, box: Box, colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    arm = (right - left) / 6
    across, down = (left + right) / 2, (top + bottom) / 2
    draw.rectangle((left, down - arm, right, down + arm), fill=colour)
    draw.rectangle((across - arm, top, across + arm, bottom), fill=colour)


SHAPES: dict[str, Callable[[Any, Box, tuple[int, int, int]], None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
}


def picture_source(folder: Path, pictures: int = PICTURES) -> DemoSource:
    """Draw pictures into a tar in a folder; return them as a source of the demo.

    Raises:
        ResourceError: Pillow is not installed.
    """
    path = folder / "pictures.tar"
    _write_tar(path, pictures)
    what = f"{pictures:,} drawn pictures with captions, PNG and text in a tar"
    section = {"paths": str(path), "image": "png", "text": "txt"}
    return DemoSource(PICTURES_NAME, what, section, path.stat().st_size, 1)


def blind_loss(caption_tokens: float) -> float:
    """Return the least mean loss of a caption's token without a look at the picture, in nats.

    Pictures are drawn evenly from all kinds, so a caption holds the logarithm of their number.

    Args:
        caption_tokens: Trained tokens of a caption, on average.
    """
    return math.log(len(SIZES) * len(COLOURS) * len(SHAPES) * len(GROUNDS)) / caption_tokens


def job_keys() -> dict[str, Any]:
    """Return the keys of a job that has such a source, its batch's aside."""
    return {
        "image": [
            "decode",
            {"resize": "fixed", "height": SIDE_PIXELS, "width": SIDE_PIXELS},
            {"patchify": "raster", "patch": PATCH_PIXELS},
        ],
        # Bytes that no UTF-8 text holds.
        "placeholder": {"image": {"token": 0xFF, "begin": 0xFE, "end": 0xFD}},
    }


def _write_tar(path: Path, pictures: int) -> None:
    drawn = random.Random(SEED)  # noqa: S311 - the same pictures each time
    kinds = list(itertools.product(SIZES, COLOURS, SHAPES, GROUNDS))
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(pictures):
            size, colour, shape, ground = drawn.choice(kinds)
            image = _picture(drawn, size, colour, shape, ground)
            caption = f"a {size} {colour} {shape} on {ground}"
            for ending, content in (("png", image), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number:05d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _picture(drawn: random.Random, size: str, colour: str, shape: str, ground: str) -> bytes:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ResourceError(
            "the pictures are drawn by Pillow, which is not installed: pip install 'msd[daemon]'"
        ) from None
    width, height = drawn.choice(SIDES), drawn.choice(SIDES)
    image = Image.new("RGB", (width, height), GROUNDS[ground])
    radius = SIZES[size] * min(width, height)
    across = drawn.uniform(radius, width - radius)
    down = drawn.uniform(radius, height - radius)
    box = (across - radius, down - radius, across + radius, down + radius)
    SHAPES[shape](ImageDraw.Draw(image), box, COLOURS[colour])
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()
