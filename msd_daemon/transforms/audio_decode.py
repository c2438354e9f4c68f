"""Sound bytes become one channel of float32 samples; the format is told by the content.

libsndfile reads what it can (WAV, FLAC, Ogg, Opus, MP3, AIFF, AU, NIST SPHERE); what it refuses goes
to FFmpeg (MP4, WebM, AAC, FLAC in Ogg, odd FLAC). The order is fixed, as the two count the samples of
lossy files differently. Samples come in blocks, so that a header that lies costs no memory.
"""

from __future__ import annotations

import functools
import io
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import AudioRule
from msd_daemon.transforms.media_error import MediaError, over_limit, undecodable

Samples = npt.NDArray[np.float32]

BLOCK_FRAMES = 1 << 16
CHANNELS_MAX = 256

_RAW_KINDS = {
    "s16le": ("<i2", 1 / (1 << 15)),
    "s32le": ("<i4", 1 / (1 << 31)),
    "f32le": ("<f4", 1.0),
    "u8": ("u1", 1 / (1 << 7)),
}


class Sound(NamedTuple):
    """A decoded sound."""

    samples: Samples
    """Shape (samples,), about -1 to 1."""
    rate: int
    """Samples per second."""
    channels: int
    """Of the file."""
    decoder: str
    """`libsndfile`, `ffmpeg` or `raw`."""


class _Refused(Exception):  # noqa: N818 - no error of the record yet: the next decoder is asked
    """A decoder does not read this content."""


class _Collector:
    """Mixes blocks to one channel and counts them against the rule's limits."""

    def __init__(self, rule: AudioRule, name: str, seconds_wanted: float | None) -> None:
        self.rule, self.name, self.seconds_wanted = rule, name, seconds_wanted
        self.blocks: list[Samples] = []
        self.frames = self.values = 0

    def add(self, block: npt.NDArray[Any], rate: int) -> bool:
        """Take a block of shape (frames, channels), floats; False where no more is wanted."""
        frames, channels = block.shape
        self.frames += frames
        self.values += frames * channels
        if self.values > self.rule.samples_max:
            raise over_limit(
                f"{self.name}, samples of all channels",
                f"more than {self.values - 1}",
                self.rule.samples_max,
                "decode.max_samples",
            )
        if self.frames > self.rule.seconds_max * rate:
            raise over_limit(
                f"{self.name}, seconds",
                f"more than {self.rule.seconds_max:g}",
                f"{self.rule.seconds_max:g}",
                "decode.max_seconds",
            )
        if channels > 1 and self.rule.channels == "refuse":
            raise MediaError(
                f"{self.name} has {channels} channels, the job takes mono; mix it, or set "
                "decode.channels to mean or first"
            )
        if channels == 1 or self.rule.channels == "first":
            self.blocks.append(np.ascontiguousarray(block[:, 0], np.float32))
        else:
            self.blocks.append(block.mean(axis=1, dtype=np.float32))
        return self.seconds_wanted is None or self.frames < self.seconds_wanted * rate

    def sound(self, rate: int, channels: int, decoder: str) -> Sound:
        """Return all that was taken."""
        samples = np.concatenate([np.zeros(0, np.float32), *self.blocks])
        if not np.isfinite(samples).all():
            raise MediaError(f"{self.name} holds samples that are no numbers; replace the file")
        return Sound(samples, rate, channels, decoder)


def decode_audio(content: bytes, rule: AudioRule, seconds_wanted: float | None = None) -> Sound:
    """Return a sound as one channel, as long as its decoder gives it.

    Args:
        content: The whole file.
        rule: Format of headerless content, limits, and what becomes of several channels.
        seconds_wanted: At least so much from the beginning is given, the rest may be left undecoded.

    Raises:
        MediaError: No decoder reads it to its end, or it is over a limit.
    """
    if rule.raw_format:
        return _decode_raw(content, rule, seconds_wanted)
    if not content:
        raise MediaError("sound of 0 bytes; replace or remove the file")
    try:
        return _decode_by_libsndfile(content, rule, seconds_wanted)
    except _Refused as error:
        first = str(error)
    try:
        return _decode_by_ffmpeg(content, rule, seconds_wanted)
    except _Refused as error:
        raise undecodable("sound", content, f"libsndfile: {first}; FFmpeg: {error}") from error


def _decode_raw(content: bytes, rule: AudioRule, seconds_wanted: float | None) -> Sound:
    name = f"raw {rule.raw_format} sound"
    if rule.raw_format in ("mulaw", "alaw"):
        values = _g711_table(rule.raw_format)[np.frombuffer(content, np.uint8)]
    else:
        dtype, factor = _RAW_KINDS[rule.raw_format]
        if len(content) % np.dtype(dtype).itemsize:
            raise undecodable(name, content, "the last sample is cut")
        values = np.frombuffer(content, dtype).astype(np.float32)
        values = ((values - 128) if rule.raw_format == "u8" else values) * np.float32(factor)
    if len(values) % rule.raw_channels:
        raise undecodable(name, content, f"the last of its {rule.raw_channels} channels is cut")
    found = _Collector(rule, name, seconds_wanted)
    found.add(values.reshape(-1, rule.raw_channels), rule.raw_rate)
    return found.sound(rule.raw_rate, rule.raw_channels, "raw")


@functools.cache
def _g711_table(name: str) -> Samples:
    """Return the value of each byte, G.711. Shape (256,)."""
    byte = np.arange(256)
    if name == "mulaw":
        code = ~byte & 0xFF
        size = ((((code & 0x0F) << 3) + 0x84) << ((code >> 4) & 7)) - 0x84
        value = np.where(code & 0x80, -size, size)
    else:
        code = byte ^ 0x55
        exponent, mantissa = (code >> 4) & 7, (code & 0x0F) << 4
        size = np.where(
            exponent == 0, mantissa + 8, (mantissa + 0x108) << np.maximum(exponent - 1, 0)
        )
        value = np.where(code & 0x80, size, -size)
    return (value / (1 << 15)).astype(np.float32)


def _decode_by_libsndfile(content: bytes, rule: AudioRule, seconds_wanted: float | None) -> Sound:
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            # Between blocks soundfile seeks to where it stands, which some damaged files and MP3
            # that begin in mid-frame do not survive.
            file.seekable = lambda: False
            rate, channels = int(file.samplerate), int(file.channels)
            _check_header(rate, channels)
            found = _Collector(rule, f"{file.format} sound", seconds_wanted)
            while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
                if not found.add(block, rate):
                    break
            return found.sound(rate, channels, "libsndfile")
    except (MediaError, _Refused):
        raise
    except Exception as error:  # a decoder on hostile bytes raises anything
        raise _Refused(_said(error)) from error


def _decode_by_ffmpeg(content: bytes, rule: AudioRule, seconds_wanted: float | None) -> Sound:
    from msd_daemon.transforms.media_container import open_container, single_thread

    try:
        with open_container(content) as container:
            if not container.streams.audio:
                raise _Refused("no audio stream")
            stream = container.streams.audio[0]
            single_thread(stream)
            name = f"{container.format.name} sound ({stream.codec.name})"
            found = _Collector(rule, name, seconds_wanted)
            rate = channels = 0
            for frame in container.decode(stream):
                rate, channels = rate or frame.sample_rate, channels or len(frame.layout.channels)
                _check_header(rate, channels)
                if frame.sample_rate != rate:
                    raise _Refused(f"its rate changes from {rate} to {frame.sample_rate}")
                if not found.add(_frame_values(frame), rate):
                    break
    except (MediaError, _Refused):
        raise
    except Exception as error:  # a decoder on hostile bytes raises anything
        raise _Refused(_said(error)) from error
    if not found.frames:
        raise _Refused("it holds no sample")
    return found.sound(rate, channels, "ffmpeg")


def _frame_values(frame: Any) -> Samples:
    """Return an FFmpeg frame as floats. Shape (samples, channels)."""
    values: npt.NDArray[Any] = frame.to_ndarray()
    values = values.T if frame.format.is_planar else values.reshape(-1, len(frame.layout.channels))
    floats = values.astype(np.float32)
    if values.dtype.kind == "f":
        return floats
    half = np.float32(1 << (values.dtype.itemsize * 8 - 1))
    return (floats - half) / half if values.dtype.kind == "u" else floats / half


def _check_header(rate: int, channels: int) -> None:
    if not (0 < rate <= 1 << 24 and 0 < channels <= CHANNELS_MAX):
        raise _Refused(f"its header says {channels} channels at {rate} samples per second")


def _said(error: BaseException) -> str:
    """Return what a decoder said without addresses, which differ from run to run."""
    text = str(error)
    if "<_io" in text:
        text = text.partition(">: ")[2] or type(error).__name__
    return text
