"""Frames of videos that are made here: times, choice, rotation, limits."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from federation.model.media import VideoRule
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.video_decode import (
    Timeline,
    choose_frames,
    decode_frames,
    read_timeline,
)
from tests.support.media import encode, noise, video, wav

LEVELS = [0, 40, 80, 120, 160, 200, 240]
PLAIN = VideoRule()


def taken(content: bytes, rule: VideoRule) -> list[int]:
    """Return the grey levels of the frames that are taken, to the nearest of LEVELS."""
    found = []
    for times, frame in decode_frames(content, rule):
        assert frame.dtype == np.uint8
        level = float(frame.mean())
        found += [min(LEVELS, key=lambda one: abs(one - level))] * times
    return found


def test_frames_are_counted_and_timed_by_their_pts() -> None:
    timeline = read_timeline(video(LEVELS, [0, 100, 250, 700, 1500, 1540, 1580]), PLAIN)
    times = (timeline.pts - timeline.pts[0]) * timeline.unit_s
    assert np.allclose(times, [0, 0.1, 0.25, 0.7, 1.5, 1.54, 1.58])
    assert timeline.seconds == pytest.approx(1.62)


def test_fps_takes_the_frame_that_is_shown() -> None:
    content = video(LEVELS, [0, 100, 250, 700, 1500, 1540, 1580])
    # at 0, 250, 500 ... 1500 ms
    assert taken(content, VideoRule(fps=4)) == [0, 80, 80, 120, 120, 120, 160]
    assert taken(content, VideoRule(fps=1)) == [0, 120]
    assert taken(content, VideoRule(fps=0.1)) == [0]


def test_a_plain_rate_gives_every_frame_once() -> None:
    assert taken(video(LEVELS), VideoRule(fps=25)) == LEVELS
    assert taken(video(LEVELS), VideoRule(fps=12.5)) == LEVELS[::2]


def test_count_goes_evenly_from_the_first_to_the_last() -> None:
    content = video(LEVELS, [0, 10, 20, 30, 40, 50, 5000])
    rule = VideoRule(sample="count")
    assert taken(content, replace(rule, count=3)) == [0, 120, 240]
    assert taken(content, replace(rule, count=7)) == LEVELS
    assert taken(content, replace(rule, count=1)) == [0]
    assert taken(video([0, 240]), replace(rule, count=5)) == [0, 0, 0, 240, 240]


def test_keyframes_are_those_that_decode_alone() -> None:
    content = video(LEVELS, key_every=3)
    timeline = read_timeline(content, PLAIN)
    assert timeline.is_key.tolist() == [True, False, False, True, False, False, True]
    assert taken(content, VideoRule(sample="keyframes")) == [0, 120, 240]


def test_too_many_frames_are_thinned_out_evenly() -> None:
    assert taken(video(LEVELS), VideoRule(fps=25, frames_max=3)) == [0, 120, 240]
    assert taken(video(LEVELS, key_every=1), VideoRule(sample="keyframes", frames_max=2)) == [
        0,
        240,
    ]


def test_a_video_without_key_frames_is_told() -> None:
    timeline = Timeline(np.arange(3), np.zeros(3, bool), 0.04, 0.12)
    with pytest.raises(MediaError, match="no key frame"):
        choose_frames(timeline, VideoRule(sample="keyframes"))


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_the_display_matrix_is_applied(rotation: int) -> None:
    _, plain = next(decode_frames(pattern(0), PLAIN))
    _, turned = next(decode_frames(pattern(rotation), PLAIN))
    assert np.array_equal(turned, np.rot90(plain, -rotation // 90))


def pattern(rotation: int) -> bytes:
    import av

    from tests.support.media import _rotated

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        frame = av.VideoFrame.from_ndarray(noise(32, 48), "rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return _rotated(out.getvalue(), rotation) if rotation else out.getvalue()


def test_limits_are_told_with_their_keys() -> None:
    content = video(LEVELS)
    cases = [
        (
            VideoRule(pixels_max=1000),
            r"of 48x32, pixels of a frame: 1536, the limit is 1000",
            "max_pixels",
        ),
        (VideoRule(seconds_max=0.2), r"seconds: 0\.28, the limit is 0\.2", "max_seconds"),
        (VideoRule(source_frames_max=6), r"frames: more than 6", "max_source_frames"),
    ]
    for rule, message, key in cases:
        with pytest.raises(MediaError, match=message) as error:
            list(decode_frames(content, rule))
        assert f"decode.{key}" in error.value.message


def test_a_file_cut_short_is_refused() -> None:
    content = video(LEVELS)
    with pytest.raises(MediaError, match=r"no video stream|cut short"):
        list(decode_frames(content[: len(content) // 2], PLAIN))


def test_a_damaged_frame_is_refused() -> None:
    content = bytearray(video(LEVELS))
    start = content.index(b"mdat")
    content[start + 40 : start + 400] = b"\xaa" * 360
    with pytest.raises(MediaError):
        list(decode_frames(bytes(content), PLAIN))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no video",
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        wav(np.zeros(100)),
        encode(noise(16, 16), "PNG"),
    ],
)
def test_what_is_no_video_is_refused(content: bytes) -> None:
    with pytest.raises(MediaError):
        list(decode_frames(content, PLAIN))
