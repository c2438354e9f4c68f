"""Handed images, sounds and videos, good and broken, against the values of their README files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest

from federation.model.media import (
    AudioRule,
    ImageRule,
    MediaRule,
    MelRule,
    PatchRule,
    ResizeRule,
    VideoRule,
)
from msd_daemon.transforms.audio_decode import decode_audio
from msd_daemon.transforms.image_decode import decode_image
from msd_daemon.transforms.image_resize import Target, resize
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.media_pipeline import open_pipeline
from msd_daemon.transforms.media_preview import preview
from msd_daemon.transforms.video_decode import decode_frames, read_timeline
from tests.support.sources import DATA, needs_data

pytestmark = needs_data

NATIVE = ResizeRule("native", multiple=28, pixels_min=3136, pixels_max=1003520)
QWEN = PatchRule("qwen2_vl", 14, 2, 2)
RULES = {
    "images": MediaRule(
        "image", QWEN.values, "uint8", 1 << 20, 1, image=ImageRule(resize=NATIVE, patches=QWEN)
    ),
    "video": MediaRule(
        "video", QWEN.values, "uint8", 1 << 20, 1, video=VideoRule(resize=NATIVE, patches=QWEN)
    ),
    "audio": MediaRule(
        "audio", 80, "float32", 1 << 20, 1, audio=AudioRule(rate=16000, mel=MelRule())
    ),
}


@cache
def expected(folder: str) -> dict[str, dict[str, Any]]:
    path = DATA / folder / "expected.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def names(folder: str, *endings: str, without: tuple[str, ...] = ()) -> list[str]:
    return [
        name
        for name in expected(folder)
        if name.startswith(endings) and not name.endswith((".txt", ".jsonl", ".json", *without))
    ]


def read(folder: str, name: str) -> bytes:
    return (DATA / folder / name).read_bytes()


# --- images

REFUSED_IMAGES = {
    "monkey12.jpg": "cannot be decoded",  # 12 bits a channel: every 8-bit decoder refuses
    "ultrahdr.jpg": "truncated",  # its scan data is cut out
}


@pytest.mark.parametrize("name", names("images", ""))
def test_good_images(name: str) -> None:
    content = read("images", name)
    if name in REFUSED_IMAGES:
        with pytest.raises(MediaError, match=REFUSED_IMAGES[name]):
            decode_image(content, ImageRule())
        return
    told = expected("images")[name]["tools"]["pillow"]
    decoded = decode_image(content, ImageRule())
    # One file's EXIF text is broken, and its tool had no upright size to tell.
    assert [decoded.width, decoded.height] == told.get("upright", [told["w"], told["h"]])
    assert decoded.pixels.shape == (decoded.height, decoded.width, 3)
    assert decoded.pixels.dtype == np.uint8
    if told["format"] == "JPEG" and told["mode"] == "RGB" and told["orientation"] in (None, 1):
        assert hashlib.sha256(decoded.pixels).hexdigest()[:32] == told["pixels_sha256"]
    item = open_pipeline(RULES["images"])(content, np.random.default_rng(0))
    assert item.tokens * 4 == len(item.data)


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 6, 7, 8])
def test_all_orientations_show_the_same_photo(first: int) -> None:
    shown = []
    for number in (1, first):
        pixels = decode_image(read("images", f"vips_rotation_{number}.jpg"), ImageRule()).pixels
        small = resize(pixels, Target(16, 16), ResizeRule())  # 5 to 8 are smaller prints of it
        shown.append(small.astype(float))
    assert np.abs(shown[0] - shown[1]).mean() < 3
    assert np.abs(shown[0] - shown[1][::-1]).mean() > 25  # what a wrong turn would give


BROKEN_IMAGES: dict[str, str | tuple[int, int]] = {
    "derived/html_error_page.jpg": "of 101 bytes .* cannot be decoded",
    "derived/rocket_bitrot.jpg": (640, 427),
    "derived/rocket_cut50.jpg": "truncated",
    "derived/rocket_trailing_garbage.jpg": (640, 427),
    "images/Bad_clrsUsed.bmp": "Palette size",
    "images/Bad_smile-incorrect-image-length.ico": (32, 32),
    "images/Bad_width.bmp": "12884901882, the limit is 33554432",
    "images/background_outside_palette.gif": (1, 1),
    "images/bmp_b_reallybig.bmp": "6000000000000, the limit is 33554432",
    "images/bmp_b_shortfile.bmp": "truncated",
    "images/broken.png": "of 80 bytes .* cannot be decoded",
    "images/broken_data_stream.png": "PNG image .* cannot be decoded",
    "images/crash-0e16d3bfb83be87356d026d66919deaefca44dac.tif": "TIFF image .* cannot be decoded",
    "images/decompression_bomb.gif": "4364696535, the limit is 33554432",
    "images/decompression_bomb.ico": "4294836225, the limit is 33554432",
    "images/decompression_bomb_extents.gif": (100, 100),
    "images/hopper_bad_exif.jpg": (500, 500),
    "images/invalid-exif.jpg": (200, 200),
    "images/no_palette.gif": (1, 1),
    "images/png_decompression_dos.png": "Decompressed data too large",
    "images/ski_truncated.jpg": "Truncated",
    "images/sugarshack_no_data.mpo": (640, 480),
    "images/truncated_app14.jpg": (100, 100),
    "images/truncated_end_chunk.png": "Truncated",
    "images/truncated_image.png": "truncated",
    "images/truncated_jpeg.jpg": "truncated",
    "images/unknown_compression_method.png": "cannot be decoded",
    "images/vips_17000x17000.avif": "of 1340 bytes .* cannot be decoded",
    "images/vips_invalid_multiframe.gif": (10, 9),
    "images/vips_looks-like-svg.webp": (256, 256),
    "images/vips_truncated.gif": "truncated",
    "images/vips_truncated.jpg": "truncated",
    "images/zero_byte.jpg": "image of 0 bytes",
    "images/zero_width.gif": "cannot be decoded",
}


@pytest.mark.parametrize("name", BROKEN_IMAGES)
def test_broken_images(name: str) -> None:
    outcome = BROKEN_IMAGES[name]
    if isinstance(outcome, tuple):
        decoded = decode_image(read("broken", name), ImageRule())
        assert (decoded.width, decoded.height) == outcome
        return
    with pytest.raises(MediaError, match=outcome) as error:
        decode_image(read("broken", name), ImageRule())
    assert "0x" not in error.value.message


def test_every_broken_file_has_its_outcome_here() -> None:
    found = set(names("broken", "images/", "audio/", "video/"))
    known = set(BROKEN_IMAGES) | set(BROKEN_SOUNDS) | set(BROKEN_VIDEOS)
    assert found <= known


# --- sounds

OTHER_SOUNDS = {"goforward.raw": 44580}


@pytest.mark.parametrize("name", names("audio", ""))
def test_good_sounds(name: str) -> None:
    tools = expected("audio")[name]["tools"] or {}
    rule, wanted, rate = AudioRule(), None, None
    if name in OTHER_SOUNDS:
        rule, wanted, rate = (
            AudioRule(raw_format="s16le", raw_rate=16000),
            OTHER_SOUNDS[name],
            16000,
        )
    elif "frames" in tools["soundfile"]:
        wanted, rate = tools["soundfile"]["frames"], tools["soundfile"]["sr"]
    else:
        stream = tools["pyav"]["streams"][0]
        wanted, rate = stream["samples"], stream["rate"]
    sound = decode_audio(read("audio", name), rule)
    assert (len(sound.samples), sound.rate) == (wanted, rate)
    assert np.abs(sound.samples).max() > 0.01
    if not rule.raw_format:
        item = open_pipeline(RULES["audio"])(read("audio", name), np.random.default_rng(0))
        assert len(item.data) == round(wanted * 16000 / rate) // 160


BROKEN_SOUNDS: dict[str, str | int] = {
    "audio/flac_faulty_01.flac": 101999,
    "audio/flac_faulty_03.flac": 89903,
    "audio/flac_faulty_04.flac": 97391,  # libsndfile refuses, FFmpeg takes the mono that it is
    "audio/flac_faulty_05.flac": 39842,
    "audio/flac_faulty_06.flac": "libsndfile: .*; FFmpeg: ",
    "audio/flac_faulty_10.flac": 119279,
    "audio/flac_faulty_11.flac": "FFmpeg: it holds no sample",
    "audio/test1_empty.wav": 0,
    "derived/front_center_cut.wav": 29978,
    "derived/front_center_streamed_header.wav": 68545,
    "derived/test3_middle.mp3": 165888,  # begins in mid-frame: libsndfile does not know it
}


@pytest.mark.parametrize("name", BROKEN_SOUNDS)
def test_broken_sounds(name: str) -> None:
    outcome, content = BROKEN_SOUNDS[name], read("broken", name)
    if isinstance(outcome, int):
        assert len(decode_audio(content, AudioRule()).samples) == outcome
    else:
        with pytest.raises(MediaError, match=outcome) as error:
            decode_audio(content, AudioRule())
        assert "0x" not in error.value.message


# --- videos

EMPTY_VIDEOS = {"bipbop_nonfragment_header.mp4"}
SIZES = {"video_90.mov": (568, 320), "video_0.mov": (320, 568), "test_video.mp4": (1, 1)}


@pytest.mark.parametrize("name", names("video", ""))
def test_good_videos(name: str) -> None:
    content = read("video", name)
    (stream, *_) = [
        one for one in expected("video")[name]["tools"]["pyav"]["streams"] if one["type"] == "video"
    ]
    if name in EMPTY_VIDEOS:
        assert stream["frames"] == 0
        with pytest.raises(MediaError, match="holds no frame"):
            read_timeline(content, VideoRule())
        return
    timeline = read_timeline(content, VideoRule())
    assert len(timeline.pts) == stream["frames"]
    assert len(set(np.diff(timeline.pts).tolist())) == stream["distinct_pts_steps"]
    every = VideoRule(sample="count", count=stream["frames"])
    found = [(times, frame.shape) for times, frame in decode_frames(content, every)]
    assert len(found) == stream["frames"]
    assert {times for times, _ in found} == {1}
    size = SIZES.get(name, (stream["h"], stream["w"]))
    assert {shape for _, shape in found} == {(*size, 3)}
    item = open_pipeline(RULES["video"])(content, np.random.default_rng(0))
    frames = max(1, int(np.ceil(timeline.seconds * 2 - 1e-6)))
    assert item.grid[0] == -(-frames // 2)


def test_a_video_without_a_duration_ends_with_its_last_frame() -> None:
    timeline = read_timeline(read("video", "no_duration.webm"), VideoRule())
    assert timeline.seconds == pytest.approx(4.938)
    steps = np.diff(timeline.pts)
    assert len(set(steps.tolist())) == 11
    taken = sum(times for times, _ in decode_frames(read("video", "no_duration.webm"), VideoRule()))
    assert taken == 10


def test_frame_times_are_those_of_the_handed_list() -> None:
    told = json.loads(read("video", "nasa_13013.mp4.stream0.all_frames_info.json"))
    timeline = read_timeline(read("video", "nasa_13013.mp4"), VideoRule())
    seconds = [float(frame["pts_time"]) for frame in told]
    assert np.abs(timeline.pts * timeline.unit_s - seconds).max() < 1e-5
    assert timeline.is_key.sum() == 2


BROKEN_VIDEOS: dict[str, str] = {
    "derived/bbb_cut.mp4": "video of 200000 bytes .* cannot be decoded",
    "video/chunk_out_of_range.mp4": "cannot be decoded",
    "video/corrupted.mp4": "cannot be decoded",
    "video/no_timescale.mp4": "frame 0 is damaged|cannot be decoded",
    "video/test_case_1185230.mp4": "cannot be decoded|cut short",
    "video/zero_empty_stsc.mp4": "cut short",
}


@pytest.mark.parametrize("name", BROKEN_VIDEOS)
def test_broken_videos(name: str) -> None:
    every = VideoRule(sample="count", count=500)
    with pytest.raises(MediaError, match=BROKEN_VIDEOS[name]):
        list(decode_frames(read("broken", name), every))


# --- all of them


@pytest.mark.parametrize(
    ("folder", "name"),
    [("images", "vips_rotation_6.jpg"), ("audio", "bell.oga"), ("video", "white.mp4")],
)
def test_previews(folder: str, name: str) -> None:
    picture = preview(read(folder, name), RULES[folder])
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert picture.shape[0] * picture.shape[1] <= 1 << 20


_PEAK = """
import resource, sys
from federation.model.media import ImageRule, VideoRule, AudioRule
from msd_daemon.transforms.image_decode import decode_image
from msd_daemon.transforms.audio_decode import decode_audio
from msd_daemon.transforms.video_decode import decode_frames
from msd_daemon.transforms.media_error import MediaError
import PIL.Image, simplejpeg, av, soundfile
folder = sys.argv[1]
def run(decode, name):
    content = open(f"{folder}/{name}", "rb").read()
    try: decode(content)
    except MediaError: pass
run(lambda c: decode_image(c, ImageRule()), "images/hopper_bad_exif.jpg")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[2:]:
    if name.startswith(("images", "derived/rocket")):
        run(lambda c: decode_image(c, ImageRule()), name)
    elif name.endswith(".mp4"):
        run(lambda c: list(decode_frames(c, VideoRule())), name)
    else:
        run(lambda c: decode_audio(c, AudioRule()), name)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_broken_files_take_little_memory() -> None:
    listed = [*BROKEN_IMAGES, *BROKEN_SOUNDS, *BROKEN_VIDEOS]
    command = [sys.executable, "-c", _PEAK, str(DATA / "broken"), *listed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 100 * 1024  # KiB
