"""From sound bytes to frames: decode, resample, window, the user's step, mel or raw frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.media import AudioRule
from msd_daemon.transforms.audio_decode import Samples, decode_audio
from msd_daemon.transforms.audio_mel import MelBank, log_mel, open_mel
from msd_daemon.transforms.media_error import MediaError, over_limit

UserStep = Callable[[npt.NDArray[Any], np.random.Generator], npt.NDArray[Any]]

RESAMPLE_QUALITY = "HQ"


def prepare_samples(content: bytes, rule: AudioRule) -> tuple[Samples, int]:
    """Return one channel at the rule's rate inside its window, and the rate.

    Raises:
        MediaError: It cannot be decoded, or is over a limit.
    """
    sound = decode_audio(content, rule)
    samples, rate = sound.samples, sound.rate
    if rule.rate and rate != rule.rate:
        samples, rate = resample(samples, rate, rule.rate), rule.rate
    return fit_window(samples, rate, rule), rate


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    """Return a sound at another rate: samples * wanted / rate of them, rounded."""
    if not len(samples):
        return samples
    import soxr

    return np.asarray(soxr.resample(samples, rate, wanted, quality=RESAMPLE_QUALITY), np.float32)


def fit_window(samples: Samples, rate: int, rule: AudioRule) -> Samples:
    """Return a sound cut or padded to the rule's window.

    Raises:
        MediaError: It is longer, and the rule refuses that.
    """
    if not rule.window_s:
        return samples
    length = round(rule.window_s * rate)
    if len(samples) > length and rule.window == "refuse":
        raise over_limit(
            "sound, seconds", f"{len(samples) / rate:g}", f"{rule.window_s:g}", "window.seconds"
        )
    if rule.window in ("cut", "fit"):
        samples = samples[:length]
    if rule.window in ("pad", "fit") and len(samples) < length:
        samples = np.pad(samples, (0, length - len(samples)))
    return samples


class AudioPipeline:
    """Makes frames of sounds by one rule."""

    def __init__(self, rule: AudioRule, dtype: str, call: UserStep | None, name: str) -> None:
        self.rule, self.dtype, self.call, self.name = rule, np.dtype(dtype), call, name
        self.banks: dict[int, MelBank] = {}

    def frames(self, content: bytes, rng: np.random.Generator) -> npt.NDArray[Any]:
        """Return the frames of a sound. Shape (frames, values), C-contiguous, of the dtype.

        Raises:
            MediaError: It is no sample, or the user's step gave what is no sound.
        """
        samples, rate = prepare_samples(content, self.rule)
        if self.call is not None:
            samples = self._checked(self.call(samples, rng))
        if self.rule.mel is None:
            size = self.rule.frame_samples
            padded = np.pad(samples, (0, -len(samples) % size))
            return np.ascontiguousarray(padded.reshape(-1, size), self.dtype)
        frames = log_mel(samples, self._bank(rate))
        return np.ascontiguousarray(frames, self.dtype)

    def _bank(self, rate: int) -> MelBank:
        bank = self.banks.get(rate)
        if bank is None:
            assert self.rule.mel is not None
            # A rule without a rate meets few of them; hostile headers must not fill memory.
            if len(self.banks) >= 16:
                self.banks.clear()
            bank = self.banks[rate] = open_mel(self.rule.mel, rate)
        return bank

    def _checked(self, samples: Any) -> Samples:
        is_sound = isinstance(samples, np.ndarray) and samples.ndim == 1
        if not is_sound or samples.dtype.kind != "f" or not np.isfinite(samples).all():
            raise MediaError(
                f"{self.name} gave {describe(samples)} for a sound; return finite float32 of shape "
                "(samples,)"
            )
        return np.ascontiguousarray(samples, np.float32)


def describe(value: object) -> str:
    """Return dtype and shape of what a user's step gave."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__
