"""Log-mel frames against an independent plain form in float64."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from federation.model.media import MelRule
from msd_daemon.transforms.audio_mel import frame_count, log_mel, open_mel
from tests.support.media import tone

TOLERANCE = 2e-4
"""In whisper's units (log10 / 4) and in ln; float32 sums against float64."""


def hertz_of_mel(mel: float, scale: str) -> float:
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def mel_of_hertz(hertz: float, scale: str) -> float:
    if scale == "htk":
        return 2595 * math.log10(1 + hertz / 700)
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def plain_filters(rule: MelRule, rate: int, fft: int) -> np.ndarray:
    low = mel_of_hertz(rule.hertz_min, rule.scale)
    high = mel_of_hertz(rule.hertz_max or rate / 2, rule.scale)
    edges = [
        hertz_of_mel(low + (high - low) * i / (rule.bins + 1), rule.scale)
        for i in range(rule.bins + 2)
    ]
    filters = np.zeros((rule.bins, fft // 2 + 1))
    for m in range(rule.bins):
        below, centre, above = edges[m : m + 3]
        for k in range(fft // 2 + 1):
            hertz = k * rate / fft
            value = min((hertz - below) / (centre - below), (above - hertz) / (above - centre))
            area = 2 / (above - below) if rule.scale == "slaney" else 1
            filters[m, k] = max(0.0, value) * area
    return filters


def plain_mel(samples: np.ndarray, rule: MelRule, rate: int) -> np.ndarray:
    """The definition of docs/media.md, one frame and one sum at a time, in float64."""
    hop, size = round(rule.hop_ms * rate / 1000), round(rule.window_ms * rate / 1000)
    fft = max(rule.fft, size)
    window = np.zeros(fft)
    for i in range(size):
        window[(fft - size) // 2 + i] = 0.5 - 0.5 * math.cos(2 * math.pi * i / size)
    half, last = fft // 2, len(samples) - 1
    mirrored = np.array(
        [
            samples[abs(i) if i <= last else 2 * last - i]
            for i in range(-half, len(samples) + half + 1)
        ],
        dtype=np.float64,
    )
    angle = -2j * math.pi * np.outer(np.arange(fft // 2 + 1), np.arange(fft)) / fft
    transform = np.exp(angle)
    filters = plain_filters(rule, rate, fft)
    count = len(samples) // hop + (rule.log == "natural")
    frames = np.zeros((count, rule.bins))
    for f in range(count):
        power = np.abs(transform @ (mirrored[f * hop : f * hop + fft] * window)) ** 2
        frames[f] = np.maximum(filters @ power, 1e-10)
    if rule.log == "natural":
        return np.log(frames)
    frames = np.log10(frames)
    return (np.maximum(frames, frames.max() - 8) + 4) / 4


RULES = [
    MelRule(),
    MelRule(bins=128),
    MelRule(log="natural"),
    MelRule(scale="htk", log="natural", bins=64),
    MelRule(fft=512, log="natural"),
    MelRule(hertz_min=20, hertz_max=7600),
    MelRule(hop_ms=12.5, window_ms=50),
    MelRule(window_ms=20.0625),  # an odd number of samples
]


def sounds() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        (tone(0.3) + 0.01 * rng.standard_normal(4800)).astype(np.float32),
        rng.standard_normal(4001).astype(np.float32),
        np.zeros(3000, np.float32),
        rng.standard_normal(799).astype(np.float32),
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sound", range(4))
def test_frames_equal_the_plain_form(rule: MelRule, sound: int) -> None:
    samples = sounds()[sound]
    bank = open_mel(rule, 16000)
    found = log_mel(samples, bank)
    wanted = plain_mel(samples, rule, 16000)
    assert found.dtype == np.float32
    assert found.shape == wanted.shape == (frame_count(bank, len(samples)), rule.bins)
    assert np.abs(found - wanted).max() < TOLERANCE


def test_thirty_seconds_are_three_thousand_whisper_frames() -> None:
    bank = open_mel(MelRule(bins=128), 16000)
    assert (bank.hop, bank.fft, len(bank.filters)) == (160, 400, 128)
    assert frame_count(bank, 480_000) == 3000
    assert frame_count(open_mel(MelRule(log="natural"), 16000), 480_000) == 3001
    frames = log_mel(tone(30.0).astype(np.float32), bank)
    assert frames.shape == (3000, 128)
    # A block of frames is no part of the content.
    assert np.array_equal(frames[:400], log_mel(tone(30.0).astype(np.float32), bank)[:400])


def test_short_sounds_have_few_frames_or_none() -> None:
    bank = open_mel(MelRule(), 16000)
    for count, frames in ((0, 0), (1, 0), (159, 0), (160, 1), (200, 1), (320, 2)):
        assert log_mel(np.ones(count, np.float32), bank).shape == (frames, 80)
    assert log_mel(np.ones(1, np.float32), open_mel(MelRule(log="natural"), 16000)).shape == (1, 80)


def test_filters_overlap_in_pairs() -> None:
    filters = np.zeros((201, 20), np.float32)
    for number, (first, weights) in enumerate(
        open_mel(MelRule(scale="htk", bins=20), 16000).filters
    ):
        filters[first : first + len(weights), number] = weights
    peaks = filters.argmax(axis=0)
    assert all(a < b for a, b in pairwise(peaks.tolist()))
    assert (np.count_nonzero(filters, axis=1) <= 2).all()


_DIGEST = """
import hashlib
import numpy as np
from federation.model.media import MelRule
from msd_daemon.transforms.audio_mel import log_mel, open_mel
samples = np.random.default_rng(0).standard_normal(160_000).astype(np.float32)
print(hashlib.sha256(log_mel(samples, open_mel(MelRule(bins=128), 16000))).hexdigest())
"""


def test_threads_of_numpy_change_no_bit() -> None:
    """Numpy's matrix products add up in another order where the environment gives more threads."""
    digests = set()
    for threads in ("1", "2", "8"):
        environ = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST], env=environ, capture_output=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["librosa", "torchaudio"])
def test_frames_equal_a_library_of_the_field(name: str) -> None:
    pytest.importorskip(name)
    samples = sounds()[0]
    found = log_mel(samples, open_mel(MelRule(log="natural"), 16000))
    if name == "librosa":
        librosa = importlib.import_module(name)
        power = librosa.feature.melspectrogram(
            y=samples, sr=16000, n_fft=400, hop_length=160, n_mels=80, pad_mode="reflect"
        ).T
    else:
        torch = importlib.import_module("torch")
        transforms = importlib.import_module("torchaudio.transforms")
        power = (
            transforms.MelSpectrogram(
                16000, 400, hop_length=160, n_mels=80, norm="slaney", mel_scale="slaney"
            )(torch.from_numpy(samples))
            .numpy()
            .T
        )
    assert np.abs(found - np.log(np.maximum(power, 1e-10))).max() < 1e-2
