"""Images of every colour model, turned, cut short, too large; made here."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from federation.model.media import ImageRule
from msd_daemon.transforms.image_decode import decode_image
from msd_daemon.transforms.media_error import MediaError
from tests.support.media import (
    COLOURS,
    card,
    encode,
    noise,
    png_header,
    png_of_words,
    ycck_jpeg,
)

PLAIN = ImageRule()


def pixels_of(content: bytes, rule: ImageRule = PLAIN) -> np.ndarray:
    pixels = decode_image(content, rule).pixels
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    return pixels


def transparent_palette() -> bytes:
    image = Image.fromarray(card()).quantize(8)
    return encode(image, "PNG", transparency=7)


COLOUR_FILES = {
    "png": lambda: encode(card()),
    "rgba": lambda: encode(Image.fromarray(card()).convert("RGBA")),
    "palette": lambda: encode(Image.fromarray(card()).quantize(8)),
    "palette with transparency": transparent_palette,
    "jpeg": lambda: encode(card(), "JPEG", quality=95),
    "jpeg 4:4:4": lambda: encode(card(), "JPEG", quality=95, subsampling=0),
    "progressive jpeg": lambda: encode(card(), "JPEG", quality=95, progressive=True),
    "cmyk jpeg": lambda: encode(Image.fromarray(card()).convert("CMYK"), "JPEG", quality=95),
    "ycck jpeg": lambda: ycck_jpeg(card()),
    "cmyk tiff": lambda: encode(Image.fromarray(card()).convert("CMYK"), "TIFF"),
    "lab tiff": lambda: encode(lab_card(), "TIFF"),
    "gif": lambda: encode(Image.fromarray(card()), "GIF"),
    "animated gif": lambda: animation("GIF"),
    "animated webp": lambda: animation("WEBP", lossless=True),
    "animated png": lambda: animation("PNG"),
    "webp": lambda: encode(card(), "WEBP", quality=95),
    "lossless webp": lambda: encode(card(), "WEBP", lossless=True),
    "tiff": lambda: encode(card(), "TIFF", compression="tiff_lzw"),
    "bmp": lambda: encode(card(), "BMP"),
    "ppm": lambda: encode(card(), "PPM"),
    "avif": lambda: encode(card(), "AVIF", quality=95),
    "icon": lambda: encode(Image.fromarray(card(96, 96)), "ICO", sizes=[(96, 96)]),
    "mpo": lambda: encode(
        Image.fromarray(card()),
        "MPO",
        save_all=True,
        append_images=[Image.new("RGB", (96, 48))],
        quality=95,
    ),
    "jpeg 2000": lambda: encode(card(), "JPEG2000"),
}


def animation(kind: str, **options) -> bytes:
    frames = [Image.new("RGB", (96, 48), (9, 9, 9))]
    return encode(Image.fromarray(card()), kind, save_all=True, append_images=frames, **options)


def lab_card() -> Image.Image:
    from PIL import ImageCms

    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    return ImageCms.profileToProfile(Image.fromarray(card()), *profiles, outputMode="LAB")


@pytest.mark.parametrize("name", COLOUR_FILES)
def test_the_card_has_its_colours_in_every_colour_model(name: str) -> None:
    pixels = pixels_of(COLOUR_FILES[name]())
    height, width = pixels.shape[:2]
    assert width == 96
    stripes = pixels[height // 2, [16, 48, 80]].astype(int)
    red = stripes[0]
    assert red[0] > 200
    assert (red[1:] < 60).all()
    # Naive CMYK and chroma subsampling move a level or two more than a plain decode.
    assert np.abs(stripes - list(COLOURS.values())).max() <= 6


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}])
@pytest.mark.parametrize("shape", [(48, 96), (427, 640), (33, 65)])
def test_both_jpeg_decoders_give_the_same_card(options: dict, shape: tuple[int, int]) -> None:
    content = encode(card(*shape), "JPEG", quality=90, **options)
    by_pillow = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
    assert np.abs(pixels_of(content) - by_pillow).max() <= 3


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        (Image.new("L", (4, 4), 77), 77),
        (Image.new("1", (4, 4), 1), 255),
        (Image.fromarray(np.full((4, 4), 77 << 8 | 200, np.uint16)), 77),
        (Image.fromarray(np.full((4, 4), 65535, np.uint16)), 255),
        (Image.fromarray(np.full((4, 4), 255, np.uint16)), 0),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_becomes_three_equal_channels(image, wanted: int, kind: str) -> None:
    assert (pixels_of(encode(image, kind)) == wanted).all()


def test_grey_jpeg_becomes_three_equal_channels() -> None:
    pixels = pixels_of(encode(Image.new("L", (40, 30), 77), "JPEG"))
    assert pixels.shape == (30, 40, 3)
    assert (pixels == 77).all()


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (10, 200, 30)])
def test_alpha_lies_on_the_stated_background(background: tuple[int, int, int]) -> None:
    rule = ImageRule(background=background)
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[:, 0] = (200, 100, 0, 0)
    rgba[:, 1] = (200, 100, 0, 255)
    rgba[:, 2] = (200, 100, 0, 128)
    half = [
        round((c * 128 + b * 127) / 255) for c, b in zip((200, 100, 0), background, strict=True)
    ]
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True}), ("TIFF", {})):
        row = pixels_of(encode(Image.fromarray(rgba), kind, **options), rule)[0]
        assert row[0].tolist() == list(background)
        assert row[1].tolist() == [200, 100, 0]
        assert np.abs(row[2].astype(int) - half).max() <= 1
    la = Image.fromarray(rgba).convert("LA")
    assert pixels_of(encode(la), rule)[0, 0].tolist() == list(background)


def test_a_transparent_colour_lies_on_the_background() -> None:
    rule = ImageRule(background=(1, 2, 3))
    words = np.array([[1000, 2000]], np.uint16)
    assert pixels_of(png_of_words(words, key=1000), rule)[0].tolist() == [[1, 2, 3], [7, 7, 7]]
    rgb = np.array([[[5, 6, 7], [8, 9, 10]]], np.uint8)
    content = encode(rgb, "PNG", transparency=(5, 6, 7))
    assert pixels_of(content, rule)[0].tolist() == [[1, 2, 3], [8, 9, 10]]
    grey = encode(Image.fromarray(np.array([[5, 8]], np.uint8)), "PNG", transparency=5)
    assert pixels_of(grey, rule)[0].tolist() == [[1, 2, 3], [8, 8, 8]]


TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}
"""How an upright picture lies in a file of each orientation."""


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(orientation: int, kind: str) -> None:
    upright = noise(40, 64)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    stored = np.ascontiguousarray(TURNS[orientation](upright))
    content = encode(stored, kind, exif=exif, **options)
    decoded = decode_image(content, PLAIN)
    assert (decoded.height, decoded.width) == (40, 64)
    limit = 10 if kind == "JPEG" else 0  # another orientation differs by 60
    assert np.abs(decoded.pixels.astype(int) - upright).mean() <= limit


def test_a_broken_orientation_costs_no_pixels() -> None:
    good = encode(card(), "JPEG", exif=b"Exif\0\0" + b"II*\0\xff\xff\xff\xff")
    assert pixels_of(good).shape == (48, 96, 3)
    exif = Image.Exif()
    exif[0x0112] = 77
    assert pixels_of(encode(card(), "JPEG", exif=exif)).shape == (48, 96, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "AVIF"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_a_file_cut_short_is_refused_never_filled(kind: str, part: float) -> None:
    content = encode(noise(120, 160), kind)
    with pytest.raises(MediaError, match="cannot be decoded") as error:
        decode_image(content[: int(len(content) * part)], PLAIN)
    assert "replace or remove the file" in error.value.message
    assert "0x" not in error.value.message  # addresses would differ from run to run


def test_garbage_behind_the_end_is_ignored() -> None:
    content = encode(card(), "JPEG")
    assert np.array_equal(pixels_of(content + b"garbage" * 99), pixels_of(content))


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"<!DOCTYPE html>", b"\0" * 4096])
def test_what_is_no_image_is_refused(content: bytes) -> None:
    with pytest.raises(MediaError, match=f"of {len(content)} bytes"):
        decode_image(content, PLAIN)


def test_floats_without_a_range_are_refused() -> None:
    with pytest.raises(MediaError, match="32-bit floats"):
        decode_image(encode(Image.new("F", (4, 4), 0.5), "TIFF"), PLAIN)


def test_pixels_are_counted_before_anything_is_decoded() -> None:
    with pytest.raises(
        MediaError, match=r"image that begins 89 50 4e 47, pixels: 900000000"
    ) as error:
        decode_image(png_header(30000, 30000), PLAIN)
    assert "limit is 33554432" in error.value.message
    assert "decode.max_pixels" in error.value.message
    with pytest.raises(MediaError, match="a side has at most 65536"):
        decode_image(png_header(70000, 10), PLAIN)
    small = ImageRule(pixels_max=48 * 96)
    for kind in ("JPEG", "PNG", "GIF", "BMP"):
        assert pixels_of(encode(card(), kind), small).shape == (48, 96, 3)
        with pytest.raises(MediaError, match="pixels"):
            decode_image(encode(card(48, 99), kind), small)


@pytest.mark.parametrize("shape", [(400, 600), (399, 601), (1000, 333)])
def test_a_jpeg_is_decoded_smaller_only_where_the_rule_allows(shape: tuple[int, int]) -> None:
    content = encode(noise(*shape), "JPEG", quality=90)
    wanted = (shape[0] // 5, shape[1] // 5)

    def decoded(gap: int, least: tuple[int, int] = wanted):
        return decode_image(content, ImageRule(draft_gap=gap), lambda *_: least)

    half = decoded(2)
    assert (half.height, half.width) == shape
    assert half.pixels.shape[:2] == (-(-shape[0] // 2), -(-shape[1] // 2))
    assert half.extent == (shape[0] / 2, shape[1] / 2)
    assert decoded(0).pixels.shape[:2] == shape
    assert decoded(2, (shape[0] // 3, shape[1] // 3)).pixels.shape[:2] == shape
    assert decode_image(content, PLAIN).pixels.shape[:2] == shape


def test_decoding_leaves_pillow_as_it_was() -> None:
    before = Image.MAX_IMAGE_PIXELS
    pixels_of(encode(card()))
    with pytest.raises(MediaError):
        decode_image(b"nothing", PLAIN)
    assert before == Image.MAX_IMAGE_PIXELS
