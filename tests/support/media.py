"""Pictures, sounds and videos that tests make themselves."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import Any

import av
import numpy as np
from PIL import Image

PATCH = 16
COLOURS = {"red": (230, 20, 30), "green": (20, 200, 40), "blue": (30, 40, 220)}
"""Of the test card's three stripes, from the left."""


def card(height: int = 48, width: int = 96) -> np.ndarray:
    """Return the three-colour test card. Shape (height, width, 3)."""
    pixels = np.zeros((height, width, 3), np.uint8)
    third = width // 3
    for at, colour in enumerate(COLOURS.values()):
        pixels[:, at * third : (at + 1) * third] = colour
    return pixels


def encode(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return smooth noise, which a JPEG keeps. Shape (height, width, 3)."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def png_of_words(words: np.ndarray, key: int | None = None) -> bytes:
    """Return a 16-bit grey PNG, with a transparent value where `key` is given."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    height, width = words.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in words)
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 0, 0, 0, 0))]
    if key is not None:
        parts.append(chunk(b"tRNS", struct.pack(">H", key)))
    parts += [chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_header(width: int, height: int) -> bytes:
    """Return a small PNG whose header claims so many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def ycck_jpeg(pixels: np.ndarray) -> bytes:
    """Return an Adobe CMYK JPEG (values inverted in the file) whose marker says YCCK.

    Pillow writes what it is given inverted, with a marker that says CMYK. A YCCK file holds YCbCr of
    the inverted of its own first three values, which are inverted themselves: of plain CMY.
    """
    cmyk = np.asarray(Image.fromarray(pixels).convert("CMYK"))
    ycc = np.asarray(Image.fromarray(cmyk[..., :3].copy()).convert("YCbCr"))
    planes = np.concatenate([255 - ycc, cmyk[..., 3:]], axis=2)
    mixed = Image.merge("CMYK", [Image.fromarray(planes[..., i].copy()) for i in range(4)])
    data = bytearray(encode(mixed, "JPEG", quality=95))
    at = data.index(b"Adobe")
    data[at + 11] = 2
    return bytes(data)


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    """Return 16-bit PCM of floats of shape (samples,) or (samples, channels)."""
    values = np.atleast_2d(samples.T).T
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(values.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((values * 32767).round().astype("<i2").tobytes())
    return out.getvalue()


def tone(seconds: float, hertz: float = 440.0, rate: int = 16000) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def video(
    levels: list[int],
    times_ms: list[int] | None = None,
    size: tuple[int, int] = (32, 48),
    rotation: int = 0,
    key_every: int = 250,
) -> bytes:
    """Return an MP4 of one-colour frames: frame i is grey of levels[i], shown at times_ms[i]."""
    from fractions import Fraction

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        stream.codec_context.gop_size = key_every
        stream.codec_context.max_b_frames = 0
        stream.bit_rate = 2_000_000
        stream.options = {"sc_threshold": "1000000000"}  # no key frames of its own
        for i, level in enumerate(levels):
            frame = av.VideoFrame.from_ndarray(np.full((*size, 3), level, np.uint8), "rgb24")
            frame.pts = times_ms[i] if times_ms else i * 40
            frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = out.getvalue()
    return _rotated(data, rotation) if rotation else data


def _rotated(data: bytes, degrees: int) -> bytes:
    """Return an MP4 whose first track is shown turned clockwise: its tkhd matrix is replaced."""
    a, b, c, d = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    at = data.index(b"tkhd") + 4 + 40
    matrix = [a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30]
    return data[:at] + struct.pack(">9i", *matrix) + data[at + 36 :]
