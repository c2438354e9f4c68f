"""Pictures for people: an image, key frames of a video on one sheet, the spectrogram of a sound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.media import AudioRule, ImageRule, MediaRule, MelRule, ResizeRule, VideoRule
from msd_daemon.transforms.audio_mel import log_mel, open_mel
from msd_daemon.transforms.audio_pipeline import prepare_samples
from msd_daemon.transforms.image_decode import decode_image
from msd_daemon.transforms.image_resize import resize, target_size
from msd_daemon.transforms.video_decode import decode_frames

Pixels = npt.NDArray[np.uint8]

SHEET_FRAMES = 12
SHEET_COLUMNS = 4
TILE = ResizeRule(policy="max_pixels", pixels_max=240 * 135)
PICTURE = ResizeRule(policy="max_pixels", pixels_max=1024 * 768)
SPECTROGRAM_FRAMES_MAX = 2000
_NATURAL_SPAN = 14.0
"""60 dB."""
_WHISPER_SPAN = 2.0
"""All that its logarithm keeps."""
_RATE_SHOWN = 16_000
"""Of raw waves whose rate is that of their files."""

_RNG = np.random.default_rng(0)


def preview(content: bytes, rule: MediaRule) -> Pixels:
    """Return a picture of an item, at most about 1024 x 768. Shape (height, width, 3).

    Raises:
        MediaError: It cannot be decoded, or is over a limit.
    """
    if rule.modality == "audio":
        return preview_audio(content, rule.audio or AudioRule())
    if rule.modality == "video":
        return preview_video(content, rule.video or VideoRule())
    return preview_image(content, rule.image or ImageRule())


def preview_image(content: bytes, rule: ImageRule) -> Pixels:
    """Return the image upright, made smaller where it is large."""
    pixels = decode_image(content, rule).pixels
    return resize(pixels, target_size(PICTURE, pixels.shape[0], pixels.shape[1], _RNG), PICTURE)


def preview_video(content: bytes, rule: VideoRule) -> Pixels:
    """Return key frames side by side, row by row."""
    keys = replace(rule, sample="keyframes", frames_max=SHEET_FRAMES)
    tiles: list[Pixels] = []
    target = None
    for times, frame in decode_frames(content, keys):
        target = target or target_size(TILE, frame.shape[0], frame.shape[1], _RNG)
        tiles += [resize(frame, target, TILE)] * min(times, 1)
    height, width = tiles[0].shape[:2]
    columns = min(SHEET_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    sheet = np.zeros((rows * height, columns * width, 3), np.uint8)
    for at, tile in enumerate(tiles):
        top, left = at // columns * height, at % columns * width
        sheet[top : top + height, left : left + width] = tile
    return sheet


def preview_audio(content: bytes, rule: AudioRule) -> Pixels:
    """Return a log-mel spectrogram: time to the right, low tones below, loud ones bright."""
    samples, rate = prepare_samples(content, rule)
    if not len(samples):
        return np.zeros((1, 1, 3), np.uint8)
    shown = replace(rule.mel or MelRule(), log="natural")
    return spectrogram(log_mel(samples, open_mel(shown, rate)), _NATURAL_SPAN)


def preview_frames(frames: npt.NDArray[Any], rule: AudioRule) -> Pixels:
    """Return the spectrogram of frames as they stand in a batch.

    Args:
        frames: Log-mel frames, or frames of the raw wave. Shape (frames, values).
        rule: What they were made by.
    """
    if rule.mel is not None:
        span = _WHISPER_SPAN if rule.mel.log == "whisper" else _NATURAL_SPAN
        return spectrogram(frames, span)
    wave = np.ascontiguousarray(frames, np.float32).reshape(-1)
    shown = MelRule(log="natural")
    return spectrogram(log_mel(wave, open_mel(shown, rule.rate or _RATE_SHOWN)), _NATURAL_SPAN)


def spectrogram(frames: npt.NDArray[Any], span: float) -> Pixels:
    """Return log-mel frames as a picture, at most SPECTROGRAM_FRAMES_MAX wide.

    Args:
        frames: Shape (frames, bins).
        span: What lies below the loudest by so much is black.
    """
    if not len(frames):
        return np.zeros((1, 1, 3), np.uint8)
    frames = frames[:: -(-len(frames) // SPECTROGRAM_FRAMES_MAX)].astype(np.float32)
    level = np.clip((frames - (float(frames.max()) - span)) / span, 0, 1)
    grey = (level.T[::-1] * 255).round().astype(np.uint8)
    return np.ascontiguousarray(np.repeat(grey[:, :, None], 3, axis=2))
