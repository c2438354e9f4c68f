"""Image bytes become upright RGB pixels; the format is told by the content, never by a name.

A plain JPEG (one or three components) takes libjpeg-turbo through simplejpeg, strictly: whatever it
warns of, and everything else, is for Pillow to decode or to refuse. A file that is cut short is
refused by both, never filled with grey.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import SIDE_PIXELS_MAX, ImageRule
from msd_daemon.transforms.image_colour import to_rgb
from msd_daemon.transforms.media_error import MediaError, over_limit, undecodable

Pixels = npt.NDArray[np.uint8]
WantedSize = Callable[[int, int], tuple[int, int]]

PLUGINS = {
    "JPEG": "Jpeg",
    "PNG": "Png",
    "WEBP": "WebP",
    "GIF": "Gif",
    "TIFF": "Tiff",
    "BMP": "Bmp",
    "AVIF": "Avif",
    "ICO": "Ico",
    "PPM": "Ppm",
    "JPEG2000": "Jpeg2K",
}
"""Formats that are tried, and Pillow's modules of them; none of them runs another program."""

ORIENTATION_TAG = 0x0112
_EXIF_SEARCH_BYTES = 1 << 16
_JPEG_START = b"\xff\xd8\xff"


class Decoded(NamedTuple):
    """An upright image."""

    pixels: Pixels
    """Shape (height, width, 3); may be scaled by eighths, 1/2 at most."""
    height: int
    """Of the upright image in the file, before any scaling."""
    width: int
    extent: tuple[float, float] | None = None
    """Height and width of the image in `pixels`, whose last row and column may be a part of one
    where it was scaled; None: all of them."""


def decode_image(content: bytes, rule: ImageRule, wanted: WantedSize | None = None) -> Decoded:
    """Return an image upright, in RGB, on the rule's background; of an animation its first frame.

    Args:
        content: The whole file.
        rule: Limits, background and whether a JPEG may be decoded smaller.
        wanted: Gives the size an upright (height, width) will be resized to; None: never smaller.

    Raises:
        MediaError: It cannot be decoded whole, or is over a limit.
    """
    if not content:
        raise MediaError("image of 0 bytes; replace or remove the file")
    if content.startswith(_JPEG_START):
        decoded = _decode_plain_jpeg(content, rule, wanted)
        if decoded is not None:
            return decoded
    return _decode_by_pillow(content, rule)


def _decode_plain_jpeg(
    content: bytes, rule: ImageRule, wanted: WantedSize | None
) -> Decoded | None:
    """Return None where the file is not as plain as it looked."""
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    if colours not in ("YCbCr", "Gray", "RGB"):
        return None
    _check_size("JPEG", height, width, rule)
    orientation = _jpeg_orientation(content)
    if orientation is None:
        return None
    upright = (width, height) if orientation >= 5 else (height, width)
    scaling: dict[str, int] = {}
    # A turned image would have its partial pixels at the top or left.
    is_whole = orientation == 1 or (height % 8 == 0 and width % 8 == 0)
    if wanted is not None and rule.draft_gap and is_whole:
        least = wanted(*upright)
        if orientation >= 5:
            least = least[::-1]
        rows, columns = least[0] * rule.draft_gap, least[1] * rule.draft_gap
        if 2 * rows <= height and 2 * columns <= width:
            scaling = {"min_height": rows, "min_width": columns, "min_factor": 2}
    try:
        pixels = simplejpeg.decode_jpeg(content, "RGB", **scaling)
    except ValueError:
        return None
    eighths = round(8 * max(pixels.shape[:2]) / max(height, width))
    if orientation != 1:
        return Decoded(_turn(pixels, orientation), *upright)
    if eighths == 8:
        return Decoded(pixels, *upright)
    return Decoded(pixels, *upright, (height * eighths / 8, width * eighths / 8))


def _jpeg_orientation(content: bytes) -> int | None:
    """Return the orientation that the metadata names, 1 where there is none; None: unreadable."""
    if b"\xff\xe1" not in content[:_EXIF_SEARCH_BYTES]:
        return 1
    from PIL import Image

    try:
        with (
            _pillow_limits(SIDE_PIXELS_MAX**2),
            Image.open(io.BytesIO(content), formats=("JPEG",)) as image,
        ):
            return orientation_of(image)
    except Exception:  # noqa: BLE001 - a decoder on hostile bytes; the caller tries the slow way
        return None


def _decode_by_pillow(content: bytes, rule: ImageRule) -> Decoded:
    from PIL import Image, UnidentifiedImageError

    name = "image"
    try:
        with (
            _pillow_limits(rule.pixels_max),
            Image.open(io.BytesIO(content), formats=_formats()) as image,
        ):
            name = f"{image.format} image"
            _check_size(str(image.format), image.height, image.width, rule)
            image.load()
            orientation = orientation_of(image)
            # Some formats learn their true size as they load.
            _check_size(str(image.format), image.height, image.width, rule)
            pixels = np.asarray(to_rgb(image, rule.background))
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        found = re.search(r"\d+", str(error))
        seen = found.group() if found else "too many"
        kind = f"{name} that begins {content[:4].hex(' ')}, pixels"
        raise over_limit(kind, seen, rule.pixels_max, "decode.max_pixels") from error
    except UnidentifiedImageError as error:
        said = f"none of {', '.join(PLUGINS)}, or a header that these refuse"
        raise undecodable(name, content, said) from error
    except Exception as error:  # a decoder on hostile bytes raises anything
        raise undecodable(name, content, error) from error
    if orientation != 1:
        pixels = _turn(pixels, orientation)
    return Decoded(pixels, *pixels.shape[:2])


@functools.cache
def _formats() -> tuple[str, ...]:
    for module in PLUGINS.values():
        importlib.import_module(f"PIL.{module}ImagePlugin")
    return tuple(PLUGINS)


def _check_size(name: str, height: int, width: int, rule: ImageRule) -> None:
    if height * width > rule.pixels_max:
        raise over_limit(
            f"{name} image of {width}x{height}, pixels",
            height * width,
            rule.pixels_max,
            "decode.max_pixels",
        )
    if max(height, width) > SIDE_PIXELS_MAX:
        raise MediaError(
            f"{name} image of {width}x{height} pixels, a side has at most {SIDE_PIXELS_MAX}; "
            "leave it out"
        )


def orientation_of(image: Any) -> int:
    """Return 1 to 8 as EXIF counts them; 1 where a Pillow image names none or a broken one."""
    try:
        orientation = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 - broken metadata must not cost good pixels
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _turn(pixels: Pixels, orientation: int) -> Pixels:
    from PIL import Image

    how = Image.Transpose
    turn = {
        2: how.FLIP_LEFT_RIGHT,
        3: how.ROTATE_180,
        4: how.FLIP_TOP_BOTTOM,
        5: how.TRANSPOSE,
        6: how.ROTATE_270,
        7: how.TRANSVERSE,
        8: how.ROTATE_90,
    }[orientation]
    return np.asarray(Image.fromarray(pixels).transpose(turn))


@contextlib.contextmanager
def _pillow_limits(pixels_max: int) -> Iterator[None]:
    """Make Pillow refuse pictures inside pictures too (icons, frames), and decode in one thread."""
    from PIL import AvifImagePlugin, Image, ImageFile

    before = Image.MAX_IMAGE_PIXELS, AvifImagePlugin.DEFAULT_MAX_THREADS
    # Pillow refuses at twice its number, and warns from the number on.
    Image.MAX_IMAGE_PIXELS = (pixels_max + 1) // 2
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS, AvifImagePlugin.DEFAULT_MAX_THREADS = before
