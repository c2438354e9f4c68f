"""From sound bytes to frames: decode, resample, window, the user's step, mel or raw frames."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.media import AudioRule, MediaRule
from msd_daemon.transforms.audio_decode import Samples, decode_audio
from msd_daemon.transforms.audio_mel import MelBank, frame_count, log_mel, open_mel
from msd_daemon.transforms.media_error import MediaError, over_limit

UserStep = Callable[[npt.NDArray[Any], np.random.Generator], npt.NDArray[Any]]

RESAMPLE_QUALITY = "HQ"
RESAMPLE_REACH_S = 0.5


def prepare_samples(
    content: bytes, rule: AudioRule, check: Callable[[int, int], None] | None = None
) -> tuple[Samples, int]:
    """Return one channel at the rule's rate inside its window, and the rate.

    Args:
        content: The whole file.
        rule: Rate and window.
        check: Is told how many samples at which rate there will be, before they are made; raises.

    Raises:
        MediaError: It cannot be decoded, or is over a limit.
    """
    is_cut = rule.window_s > 0 and rule.window in ("cut", "fit")
    # What lies further behind than the resampler reaches is neither decoded nor resampled.
    needed_s = rule.window_s + RESAMPLE_REACH_S if is_cut else None
    sound = decode_audio(content, rule, needed_s)
    samples, rate = sound.samples, sound.rate
    wanted = rule.rate or rate
    longest = round(rule.window_s * wanted)
    if needed_s is not None:
        samples = samples[: math.ceil(needed_s * rate)]
    if check is not None:
        length = round(len(samples) * wanted / rate)
        check(min(length, longest) if is_cut else length, wanted)
    if rate != wanted:
        samples = resample(samples, rate, wanted)
    return fit_window(samples, wanted, rule), wanted


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

    def __init__(self, rule: MediaRule, call: UserStep | None) -> None:
        assert rule.audio is not None
        self.rule: AudioRule = rule.audio
        self.dtype, self.frames_max, self.call = np.dtype(rule.unit_dtype), rule.row_units_max, call
        self.name = rule.step.call if rule.step else "the user step"
        self.banks: dict[int, MelBank] = {}

    def frames(self, content: bytes, rng: np.random.Generator) -> npt.NDArray[Any]:
        """Return the frames of a sound. Shape (frames, values), C-contiguous, of the dtype.

        Raises:
            MediaError: It is no sample, or the user's step gave what is no sound.
        """
        check = self._check_length if self.call is None else None  # the step may shorten it
        samples, rate = prepare_samples(content, self.rule, check)
        if self.call is not None:
            samples = self._checked(self.call(samples, rng))
            self._check_length(len(samples), rate)
        if self.rule.mel is None:
            size = self.rule.frame_samples
            padded = np.pad(samples, (0, -len(samples) % size))
            return np.ascontiguousarray(padded.reshape(-1, size), self.dtype)
        frames = log_mel(samples, self._bank(rate))
        return np.ascontiguousarray(frames, self.dtype)

    def _check_length(self, samples: int, rate: int) -> None:
        if self.rule.mel is None:
            count = -(-samples // self.rule.frame_samples)
        else:
            count = frame_count(self._bank(rate), samples)
        if count > self.frames_max:
            limit = f"{self.frames_max} of a row"
            raise over_limit("sound, frames", count, limit, "batch.microbatch_frames")

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
