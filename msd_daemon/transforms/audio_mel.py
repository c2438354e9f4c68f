"""Log-mel frames of one channel, in numpy.

Frames are centred (the wave is mirrored by half a transform at both ends), the window is a periodic
Hann, the spectrum is power. `slaney` filters are scaled to equal area, `htk` ones have peaks of 1.
`whisper`: log10 of at least 1e-10, at most 8 below the sound's highest, (x + 4) / 4, and the last
frame is left out; so samples // hop frames. `natural`: ln of at least 1e-10; 1 + samples // hop.

Sums over a filter's points are made in one order: a matrix product of numpy's (BLAS) adds up in one
that depends on threads and processor, and frames are to be the same whoever makes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import MelRule

FLOOR = 1e-10
WHISPER_RANGE = 8.0
BLOCK_FRAMES = 512
"""Frames of a transform call; bounds what is in memory at once."""

_SLANEY_HERTZ, _SLANEY_MEL = 1000.0, 15.0
_SLANEY_STEP, _SLANEY_LOG = 200.0 / 3, np.log(6.4) / 27.0

Array = npt.NDArray[Any]


class MelBank(NamedTuple):
    """What a rule comes to at a rate."""

    hop: int
    """Samples from frame to frame."""
    fft: int
    window: npt.NDArray[np.float64]
    """Shape (fft,); a shorter window stands in the middle."""
    filters: tuple[tuple[int, npt.NDArray[np.float32]], ...]
    """Of each bin: the first point of the spectrum that counts, and the weights from there on."""
    log: str


def mel_samples(rule: MelRule, rate: int) -> tuple[int, int, int]:
    """Return hop, window and transform of a rule in samples."""
    hop = max(1, round(rule.hop_ms * rate / 1000))
    window = max(2, round(rule.window_ms * rate / 1000))
    return hop, window, max(rule.fft, window)


def open_mel(rule: MelRule, rate: int) -> MelBank:
    """Return the window and the filters of a rule at a rate in samples per second."""
    hop, window, fft = mel_samples(rule, rate)
    placed = np.zeros(fft)
    start = (fft - window) // 2
    placed[start : start + window] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    return MelBank(hop, fft, placed, _filters(rule, rate, fft), rule.log)


def _filters(rule: MelRule, rate: int, fft: int) -> tuple[tuple[int, npt.NDArray[np.float32]], ...]:
    highest = rule.hertz_max or rate / 2
    ends = _to_mel(np.array([rule.hertz_min, highest]), rule.scale)
    edges = _to_hertz(np.linspace(ends[0], ends[1], rule.bins + 2), rule.scale)
    hertz = np.arange(fft // 2 + 1)[:, None] * (rate / fft)
    below, centre, above = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (hertz - below) / (centre - below), (above - hertz) / (above - centre)
    filters = np.maximum(0.0, np.minimum(rising, falling))
    if rule.scale == "slaney":
        filters *= 2.0 / (above - below)
    return tuple(_band(column) for column in filters.T.astype(np.float32))


def _band(column: npt.NDArray[np.float32]) -> tuple[int, npt.NDArray[np.float32]]:
    """Return the stretch of a filter that is not 0; of one that is 0 everywhere, one point."""
    points = np.flatnonzero(column)
    first, last = (int(points[0]), int(points[-1])) if len(points) else (0, 0)
    return first, column[first : last + 1].copy()


def _to_mel(hertz: Array, scale: str) -> Array:
    if scale == "htk":
        return 2595.0 * np.log10(1.0 + hertz / 700.0)
    above = _SLANEY_MEL + np.log(np.maximum(hertz, _SLANEY_HERTZ) / _SLANEY_HERTZ) / _SLANEY_LOG
    return np.where(hertz < _SLANEY_HERTZ, hertz / _SLANEY_STEP, above)


def _to_hertz(mel: Array, scale: str) -> Array:
    if scale == "htk":
        return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    above = _SLANEY_HERTZ * np.exp(_SLANEY_LOG * (np.maximum(mel, _SLANEY_MEL) - _SLANEY_MEL))
    return np.where(mel < _SLANEY_MEL, mel * _SLANEY_STEP, above)


def frame_count(bank: MelBank, samples: int) -> int:
    """Return how many frames a sound of so many samples has; one without samples has none."""
    if not samples:
        return 0
    return samples // bank.hop + (bank.log == "natural")


def log_mel(samples: npt.NDArray[np.float32], bank: MelBank) -> npt.NDArray[np.float32]:
    """Return the frames of a sound. Shape (frames, bins)."""
    count = frame_count(bank, len(samples))
    found = np.empty((count, len(bank.filters)), np.float32)
    if not count:
        return found
    wave = np.pad(samples, bank.fft // 2 + 1, mode="reflect")[1:]
    windows = np.lib.stride_tricks.sliding_window_view(wave, bank.fft)[:: bank.hop]
    for at in range(0, count, BLOCK_FRAMES):
        spectrum = np.fft.rfft(windows[at : min(at + BLOCK_FRAMES, count)] * bank.window)
        power = np.ascontiguousarray((spectrum.real**2 + spectrum.imag**2).T, np.float32)
        for number, (first, weights) in enumerate(bank.filters):
            points = power[first : first + len(weights)]
            found[at : at + BLOCK_FRAMES, number] = np.einsum("i,ij->j", weights, points)
    np.maximum(found, np.float32(FLOOR), out=found)
    if bank.log == "natural":
        return np.log(found, out=found)
    np.log10(found, out=found)
    np.maximum(found, found.max() - np.float32(WHISPER_RANGE), out=found)
    return (found + np.float32(4)) / np.float32(4)
