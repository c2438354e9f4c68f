"""Photos for the image bench: JPEGs of about 0.28 megapixels in a WebDataset tar, with captions.

Cut from the photos of the test data (MSD_TEST_DATA, default ../shared/data) where these are there,
else from drawn pictures with the spectrum of photos. Equal numbers give equal files.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = ((640, 427), (427, 640), (600, 450), (480, 576), (528, 528))
"""Width and height; about 0.28 megapixels each."""
QUALITIES = (85, 90)
PHOTO_PIXELS_MIN = 600_000
DATA = Path(os.environ.get("MSD_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def make_tar(path: Path, count: int, photos_dir: Path = DATA / "images") -> Path:
    """Write `count` photos with captions as a WebDataset tar; return its path."""
    photos = list(find_photos(photos_dir)) or [drawn(number) for number in range(8)]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(count):
            caption = f"photo {number}: a view of {len(photos)} places, cut and scaled"
            for ending, content in (("jpg", photo(photos, number)), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number:06d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def find_photos(folder: Path) -> Iterator[Image.Image]:
    """Give the upright RGB photos of a folder that are large enough to be cut from."""
    for path in sorted(folder.glob("*.[jJ][pP][gG]")) if folder.is_dir() else []:
        try:
            with Image.open(path) as image:
                if image.width * image.height >= PHOTO_PIXELS_MIN and image.mode == "RGB":
                    yield image.copy()
        except OSError:
            continue


def drawn(number: int, width: int = 1280, height: int = 960) -> Image.Image:
    """Return a drawn picture whose spectrum falls as that of photos, with a few hard edges."""
    rng = np.random.default_rng(1000 + number)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1.0
    channels = []
    for _ in range(3):
        phase = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
        wave = np.fft.irfft2(phase / frequency**1.15, (height, width))
        channels.append(wave / wave.std())
    shared = channels[0][..., None]  # colours of photos follow their brightness
    pixels = 128 + 48 * (0.85 * shared + 0.3 * np.stack(channels, -1))
    for _ in range(12):
        top, left = int(rng.integers(height - 64)), int(rng.integers(width - 64))
        pixels[
            top : top + int(rng.integers(32, 320)), left : left + int(rng.integers(32, 320))
        ] += rng.normal(0, 30, 3)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def photo(photos: list[Image.Image], number: int) -> bytes:
    """Return photo `number` as a JPEG: a random part of one of the pictures, scaled down."""
    rng = np.random.default_rng(number)
    source = photos[number % len(photos)]
    width, height = SIZES[int(rng.integers(len(SIZES)))]
    fit = min(source.width / width, source.height / height)
    zoom = fit * float(rng.uniform(min(1.0, max(0.6, 1 / fit)), 1.0))
    part_width, part_height = zoom * width, zoom * height
    left = float(rng.uniform(0, source.width - part_width))
    top = float(rng.uniform(0, source.height - part_height))
    box = (left, top, left + part_width, top + part_height)
    cut = source.resize((width, height), Image.Resampling.LANCZOS, box=box)
    out = io.BytesIO()
    quality = int(rng.integers(QUALITIES[0], QUALITIES[1] + 1))
    cut.save(out, "JPEG", quality=quality, subsampling="4:2:0")
    return out.getvalue()
