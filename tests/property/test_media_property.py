"""Damaged media never give anything but an item or a MediaError, whatever bytes are changed."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.model.media import (
    AudioRule,
    ImageRule,
    MediaRule,
    MelRule,
    PatchRule,
    ResizeRule,
    VideoRule,
)
from msd_daemon.transforms.image_resize import target_size
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.media_pipeline import open_pipeline
from tests.support.media import encode, noise, tone, video, wav

RESIZE = ResizeRule("max_pixels", multiple=16, pixels_max=128 * 128)
IMAGE = MediaRule("image", 768, "uint8", 64, 1, image=ImageRule(pixels_max=1 << 20, resize=RESIZE))
VIDEO = MediaRule(
    "video", 1536, "uint8", 256, 1,
    video=VideoRule(pixels_max=1 << 20, resize=RESIZE, patches=PatchRule(temporal=2)),
)  # fmt: skip
AUDIO = MediaRule(
    "audio", 80, "float32", 500, 1,
    audio=AudioRule(rate=16000, samples_max=1 << 20, mel=MelRule()),
)  # fmt: skip
OPEN = {rule.modality: (rule, open_pipeline(rule)) for rule in (IMAGE, VIDEO, AUDIO)}


def sound(kind: str, subtype: str) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, tone(0.2), 16000, format=kind, subtype=subtype)
    return out.getvalue()


FILES = {
    "jpeg": ("image", encode(noise(64, 80), "JPEG")),
    "progressive": ("image", encode(noise(64, 80), "JPEG", progressive=True)),
    "png": ("image", encode(noise(40, 40))),
    "gif": ("image", encode(noise(40, 40), "GIF")),
    "webp": ("image", encode(noise(64, 80), "WEBP")),
    "tiff": ("image", encode(noise(40, 40), "TIFF", compression="tiff_lzw")),
    "bmp": ("image", encode(noise(40, 40), "BMP")),
    "avif": ("image", encode(noise(64, 80), "AVIF")),
    "wav": ("audio", wav(tone(0.2))),
    "flac": ("audio", sound("FLAC", "PCM_16")),
    "vorbis": ("audio", sound("OGG", "VORBIS")),
    "mp3": ("audio", sound("MP3", "MPEG_LAYER_III")),
    "mp4": ("video", video([0, 80, 160, 240], size=(32, 48))),
}


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damage_gives_an_item_or_a_media_error(name: str, data: st.DataObject) -> None:
    modality, whole = FILES[name]
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    if data.draw(st.booleans()):
        content = content[:cut]
    rule, make = OPEN[modality]
    try:
        item = make(bytes(content), np.random.default_rng(0))
    except MediaError as error:
        assert error.message
        assert "; " in error.message
        assert "0x" not in error.message
        return
    assert item.data.shape[1] == rule.unit_values
    assert len(item.data) == np.prod(item.grid) <= rule.row_units_max
    assert item.data.dtype == rule.unit_dtype
    again = make(bytes(content), np.random.default_rng(1))
    assert again.data.tobytes() == item.data.tobytes()


@given(
    height=st.integers(1, 65536),
    width=st.integers(1, 65536),
    policy=st.sampled_from(["multiple", "max_pixels", "native"]),
    multiple=st.sampled_from([1, 14, 16, 28, 32]),
    limit=st.integers(32 * 32, 1 << 22),
)
def test_sizes_are_multiples_within_the_limit(
    height: int, width: int, policy: str, multiple: int, limit: int
) -> None:
    rule = ResizeRule(policy, multiple=multiple, pixels_min=multiple**2, pixels_max=limit)
    try:
        target = target_size(rule, height, width, np.random.default_rng(0))
    except MediaError:
        assert policy != "max_pixels" or max(height, width) > 60000
        return
    assert target.height % multiple == target.width % multiple == 0
    assert target.height >= multiple
    assert target.width >= multiple
    if policy == "max_pixels":
        assert target.height * target.width <= limit
