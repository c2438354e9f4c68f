"""Images, sounds and videos of a job: how they are decoded, and what they take of a row.

Every limit that decides whether an item is a sample stands here, in the job, never in a daemon's
configuration (DESIGN.md P2). `msd_daemon.config.media_section` makes these rules from a job file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from federation.model.recipe import UserCall
from msd_client.contract.media_fields import Modality

UnitDtype = Literal["uint8", "float16", "float32"]
Layout = Literal["raster", "qwen2_vl", "navit"]
ResizePolicy = Literal["none", "fixed", "short_side", "max_pixels", "multiple", "native"]
Crop = Literal["none", "center", "random"]
PixelFilter = Literal["bicubic", "bilinear", "lanczos"]

CHANNELS = 3
SIDE_PIXELS_MAX = 1 << 16
"""No picture is wider or higher, before and after the resize."""


@dataclass(frozen=True)
class ResizeRule:
    """The size that a picture gets; `height`, `width` and `side` are of `fixed` and `short_side`."""

    policy: ResizePolicy = "none"
    height: int = 0
    width: int = 0
    side: int = 0
    """`short_side`: the shorter side gets so many pixels."""
    crop: Crop = "none"
    """`short_side`: a square of `side` is cut out."""
    multiple: int = 1
    """Both sides become multiples of it (`multiple`, `max_pixels`, `native`)."""
    pixels_min: int = 0
    pixels_max: int = 0
    filter: PixelFilter = "bicubic"


@dataclass(frozen=True)
class PatchRule:
    """How upright RGB pixels become patches."""

    layout: Layout = "raster"
    patch: int = 16
    temporal: int = 1
    """Frames of a patch; an image is repeated so often."""
    merge: int = 1
    """Patches per side that the encoder merges into one token."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Of pixels / 255, by channel; not used where patches are uint8."""

    @property
    def values(self) -> int:
        """Values of a patch."""
        return CHANNELS * self.temporal * self.patch * self.patch

    @property
    def side(self) -> int:
        """Pixels that both sides of a picture are multiples of."""
        return self.patch * self.merge


@dataclass(frozen=True)
class ImageRule:
    """Decode, resize and patches of an image."""

    pixels_max: int = 1 << 25
    """A larger picture is refused before it is decoded."""
    background: tuple[int, ...] = (255, 255, 255)
    """What transparent pixels lie on."""
    draft_gap: int = 2
    """A JPEG may be decoded at 1/2, 1/4 or 1/8 where that leaves at least so many times the size
    that it is resized to; 0: never."""
    resize: ResizeRule = ResizeRule()
    patches: PatchRule = PatchRule()


@dataclass(frozen=True)
class VideoRule:
    """Decode, choice of frames, resize and patches of a video."""

    sample: Literal["fps", "count", "keyframes"] = "fps"
    fps: float = 2.0
    count: int = 0
    """`count`: frames, evenly from the first to the last."""
    frames_max: int = 768
    """Most frames taken; more (`fps`, `keyframes`) are thinned out evenly."""
    seconds_max: float = 3600.0
    source_frames_max: int = 200_000
    """Most frames that the file may hold."""
    pixels_max: int = 1 << 24
    """Of a frame as it lies in the file."""
    resize: ResizeRule = ResizeRule()
    patches: PatchRule = PatchRule(temporal=2)


@dataclass(frozen=True)
class MelRule:
    """Log-mel frames; see docs/media.md for the exact definition."""

    bins: int = 80
    hop_ms: float = 10.0
    window_ms: float = 25.0
    fft: int = 0
    """Points of the transform; 0: the window's samples."""
    hertz_min: float = 0.0
    hertz_max: float = 0.0
    """0: half of the rate."""
    scale: Literal["slaney", "htk"] = "slaney"
    log: Literal["whisper", "natural"] = "whisper"


@dataclass(frozen=True)
class AudioRule:
    """Decode, channels, rate, window and frames of a sound."""

    raw_format: Literal["", "s16le", "s32le", "f32le", "u8", "mulaw", "alaw"] = ""
    """Headerless samples of this format; empty: the format is told by the content."""
    raw_rate: int = 0
    raw_channels: int = 1
    channels: Literal["mean", "first", "refuse"] = "mean"
    """How several channels become one; `refuse`: only mono is taken."""
    rate: int = 0
    """Samples per second after resampling; 0: as in the file."""
    seconds_max: float = 3600.0
    samples_max: int = 1 << 27
    """Of all channels together, as decoded."""
    window_s: float = 0.0
    """0: no window."""
    window: Literal["cut", "pad", "fit", "refuse"] = "cut"
    """What happens at `window_s`: longer is cut; shorter is padded with silence; both; or longer is
    refused."""
    mel: MelRule | None = None
    frame_samples: int = 0
    """Without `mel`: samples of a frame of the raw wave; the last one is padded with zeros."""


@dataclass(frozen=True)
class MediaRule:
    """One modality of a job."""

    modality: Modality
    unit_values: int
    """Values of a unit: of a patch (image, video) or a frame (audio)."""
    unit_dtype: UnitDtype
    row_units_max: int
    """Most units of a row; packing obeys it, so that slots have a known size."""
    placeholder_id: int
    begin_id: int | None = None
    end_id: int | None = None
    placeholder_tokens: str = ""
    """Expression that gives the placeholder tokens of an item; empty: the layout's own count."""
    image: ImageRule | None = None
    audio: AudioRule | None = None
    video: VideoRule | None = None
    step: UserCall | None = None
    """The user's own step, between resize (resample) and patches (frames)."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.unit_values * int(np.dtype(self.unit_dtype).itemsize)

    def microbatch_bytes(self, rows: int) -> int:
        """Return the most bytes that the units of so many rows take."""
        return self.row_units_max * rows * self.unit_bytes

    @property
    def merge(self) -> int:
        """Patches per side of a token; 1 for sounds."""
        rule = self.image or self.video
        return 1 if rule is None else rule.patches.merge
