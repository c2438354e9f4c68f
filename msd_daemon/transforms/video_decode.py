"""Video bytes become chosen frames, upright, in RGB.

Two passes: the packets alone say which frames there are and when they are shown (variable rates and
files without a duration come out right), then frames are decoded up to the last one that is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import SIDE_PIXELS_MAX, VideoRule
from msd_daemon.transforms.media_container import open_container, single_thread
from msd_daemon.transforms.media_error import MediaError, over_limit, undecodable

Pixels = npt.NDArray[np.uint8]

PTS_SLACK_S = 1e-6
"""A frame shown this much after a wanted time still counts as shown at it."""


class Timeline(NamedTuple):
    """When the frames of a video are shown."""

    pts: npt.NDArray[np.int64]
    """Ascending, in units of `unit_s`. Shape (frames,)."""
    is_key: npt.NDArray[np.bool_]
    unit_s: float
    seconds: float
    """From the first frame to the end of the last."""


def read_timeline(content: bytes, rule: VideoRule) -> Timeline:
    """Return the times of all frames; nothing is decoded.

    Raises:
        MediaError: It is no video, is cut short, or is over a limit.
    """
    try:
        with open_container(content) as container:
            return _read_packets(container, rule)
    except MediaError:
        raise
    except Exception as error:  # a demuxer on hostile bytes raises anything
        raise undecodable("video", content, error) from error


def _read_packets(container: Any, rule: VideoRule) -> Timeline:
    stream = _video_stream(container)
    name = _name(container, stream)
    pts: list[int] = []
    keys: list[bool] = []
    duration = 0
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if packet.is_corrupt:
            raise MediaError(f"{name} is cut short in frame {len(pts)}; replace or remove the file")
        shown = packet.dts if packet.pts is None else packet.pts
        pts.append(len(pts) if shown is None else shown)
        keys.append(packet.is_keyframe)
        duration = packet.duration or duration
        if len(pts) > rule.source_frames_max:
            raise over_limit(
                f"{name}, frames",
                f"more than {rule.source_frames_max}",
                rule.source_frames_max,
                "decode.max_source_frames",
            )
    if not pts:
        raise MediaError(f"{name} holds no frame; remove the file")
    order = np.argsort(np.array(pts, np.int64), kind="stable")
    times, is_key = np.array(pts, np.int64)[order], np.array(keys)[order]
    unit_s = float(stream.time_base or 1)
    if not duration and len(times) > 1:
        duration = round(int(times[-1] - times[0]) / (len(times) - 1))
    seconds = (int(times[-1]) - int(times[0]) + duration) * unit_s
    if seconds > rule.seconds_max:
        raise over_limit(
            f"{name}, seconds", f"{seconds:g}", f"{rule.seconds_max:g}", "decode.max_seconds"
        )
    return Timeline(times, is_key, unit_s, seconds)


def choose_frames(timeline: Timeline, rule: VideoRule) -> npt.NDArray[np.int64]:
    """Return the indices of the frames that are taken, ascending.

    fps: the frame that is shown at 0, 1 / fps, 2 / fps ... seconds after the first one. count:
    evenly from the first to the last, rounded half to even, repeated where there are fewer.
    keyframes: those that decode alone.
    """
    frames = len(timeline.pts)
    if rule.sample == "count":
        return np.linspace(0, frames - 1, rule.count).round().astype(np.int64)
    if rule.sample == "keyframes":
        taken = np.flatnonzero(timeline.is_key)
    else:
        count = max(1, int(np.ceil(timeline.seconds * rule.fps - PTS_SLACK_S)))
        # More would be thinned out again; a low rate of a long file is no reason for a long list.
        ticks = np.arange(min(count, 1 << 20))
        wanted = (ticks / rule.fps + PTS_SLACK_S) / timeline.unit_s
        taken = np.searchsorted(timeline.pts - timeline.pts[0], wanted, side="right") - 1
    if not len(taken):
        raise MediaError("video has no key frame; use sample fps, or remove the file")
    if len(taken) > rule.frames_max:
        taken = taken[np.linspace(0, len(taken) - 1, rule.frames_max).round().astype(np.int64)]
    return taken.astype(np.int64)


def decode_frames(content: bytes, rule: VideoRule) -> Iterator[tuple[int, Pixels]]:
    """Yield how often each chosen frame is taken, and the frame. Shape (height, width, 3).

    Raises:
        MediaError: It cannot be decoded up to the last chosen frame, or is over a limit.
    """
    timeline = read_timeline(content, rule)
    chosen = choose_frames(timeline, rule)
    try:
        with open_container(content) as container:
            stream = _video_stream(container)
            single_thread(stream, {"max_pixels": str(rule.pixels_max)})
            if rule.sample == "keyframes":
                stream.codec_context.skip_frame = "NONKEY"
            yield from _decode(container, stream, timeline.pts[chosen], rule)
    except MediaError:
        raise
    except Exception as error:  # a decoder on hostile bytes raises anything
        raise undecodable("video", content, error) from error


def _decode(
    container: Any, stream: Any, wanted: npt.NDArray[np.int64], rule: VideoRule
) -> Iterator[tuple[int, Pixels]]:
    name = _name(container, stream)
    _check_frame(name, stream.codec_context.height, stream.codec_context.width, rule)
    done = 0
    last = None
    for decoded, frame in enumerate(container.decode(stream)):
        if frame.is_corrupt:
            raise MediaError(f"{name}: frame {decoded} is damaged; replace or remove the file")
        _check_frame(name, frame.height, frame.width, rule)
        shown = decoded if frame.pts is None else frame.pts
        last = frame
        times = int(np.searchsorted(wanted, shown, side="right")) - done
        if times > 0:
            done += times
            yield times, _upright(frame)
            if done == len(wanted):
                return
    if last is None:
        raise MediaError(f"{name} holds no frame that decodes; remove the file")
    # Some streams hold packets that are never shown, at the end too.
    yield len(wanted) - done, _upright(last)


def _upright(frame: Any) -> Pixels:
    """Return RGB pixels, turned as the display matrix says; odd angles are left."""
    pixels = frame.reformat(format="rgb24", threads=1).to_ndarray()
    quarters = round(frame.rotation / 90) % 4 if frame.rotation % 90 == 0 else 0
    return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels


def _check_frame(name: str, height: int, width: int, rule: VideoRule) -> None:
    if height * width > rule.pixels_max or max(height, width) > SIDE_PIXELS_MAX:
        raise over_limit(
            f"{name} of {width}x{height}, pixels of a frame",
            height * width,
            rule.pixels_max,
            "decode.max_pixels",
        )


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise MediaError(f"{container.format.name} file has no video stream; remove it")
    return container.streams.video[0]


def _name(container: Any, stream: Any) -> str:
    return f"{container.format.name} video ({stream.codec.name})"
