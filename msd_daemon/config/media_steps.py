"""Steps of `image:`, `video:` and `audio:` as a user writes them; every unknown key is refused.

A step is a map with the step's name as a key, or the bare name: `image: [decode, {resize: native,
max_pixels: 1003520}, {patchify: qwen2_vl}]`. Which step stands where is checked in `media_section`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from federation.model.media import SIDE_PIXELS_MAX, Crop, Layout, PixelFilter, UnitDtype
from msd_daemon.config.section import Count, Section, Text
from msd_daemon.config.transform_file import CallName
from msd_daemon.transforms.media_expression import NAMES, compile_expression

Side = Annotated[Count, Field(le=SIDE_PIXELS_MAX)]
Pixels = Annotated[Count, Field(le=1 << 30)]
Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Rate = Annotated[Count, Field(le=1 << 20)]
Byte = Annotated[int, Field(ge=0, le=255)]
Factor = Annotated[float, Field(gt=-1e3, lt=1e3, allow_inf_nan=False)]

_COLOURS = {"white": [255, 255, 255], "black": [0, 0, 0], "grey": [128, 128, 128]}


def _as_colour(value: object) -> object:
    return _COLOURS.get(value, value) if isinstance(value, str) else value


def _check_spread(values: list[float]) -> list[float]:
    if any(value <= 0 for value in values):
        raise ValueError("a deviation is not above 0; write positive numbers")
    return values


Three = Annotated[list[Factor], Field(min_length=3, max_length=3)]


class ImageDecodeFile(Section):
    """How an image is decoded, and which ones are refused."""

    max_pixels: Pixels = 1 << 25
    """A larger one is refused before it is decoded."""
    background: Annotated[
        list[Byte],
        BeforeValidator(_as_colour, json_schema_input_type=str | list[int]),
        Field(min_length=3, max_length=3),
    ] = Field(default_factory=lambda: [255, 255, 255])
    """What transparent pixels lie on: white, black, grey or [red, green, blue]."""
    draft_gap: Annotated[int, Field(ge=0, le=8)] = 2
    """A JPEG may be decoded at 1/2, 1/4 or 1/8 that is at least so many times the size it is resized
    to; 0: never."""


class VideoDecodeFile(Section):
    """Which videos are refused."""

    max_pixels: Pixels = 1 << 24
    """Of a frame."""
    max_seconds: Seconds = 3600.0
    max_source_frames: Count = 200_000


class RawFile(Section):
    """Sounds without a header."""

    format: Literal["s16le", "s32le", "f32le", "u8", "mulaw", "alaw"]
    rate: Rate
    channels: Annotated[Count, Field(le=256)] = 1


class AudioDecodeFile(Section):
    """How a sound is decoded, and which ones are refused."""

    raw: RawFile | None = None
    """Format of headerless sounds; default: told by the content."""
    channels: Literal["mean", "first", "refuse"] = "mean"
    """How several channels become one."""
    max_seconds: Seconds = 3600.0
    max_samples: Annotated[Count, Field(le=1 << 34)] = 1 << 27
    """Of all channels together."""


class MelFile(Section):
    """Log-mel frames."""

    bins: Annotated[Count, Field(le=1024)] = 80
    hop_ms: Annotated[float, Field(gt=0, le=1000)] = 10.0
    window_ms: Annotated[float, Field(gt=0, le=1000)] = 25.0
    fft: Annotated[Count, Field(le=1 << 16)] | None = None
    """Points of the transform; default: the window's samples."""
    fmin: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    fmax: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Default: half of the rate."""
    scale: Literal["slaney", "htk"] = "slaney"
    log: Literal["whisper", "natural"] = "whisper"
    dtype: Literal["float16", "float32"] = "float32"


class FramesFile(Section):
    """Frames of the raw wave."""

    samples: Annotated[Count, Field(le=1 << 20)]
    dtype: Literal["float16", "float32"] = "float32"


class DecodeImage(Section):
    """`decode`, or a map of its keys under `decode`."""

    decode: ImageDecodeFile = ImageDecodeFile()


class DecodeVideo(Section):
    """`decode`, or a map of its keys under `decode`."""

    decode: VideoDecodeFile = VideoDecodeFile()


class DecodeAudio(Section):
    """`decode`, or a map of its keys under `decode`."""

    decode: AudioDecodeFile = AudioDecodeFile()


class SampleFrames(Section):
    """Which frames of a video are taken."""

    sample: Literal["fps", "count", "keyframes"] = "fps"
    fps: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    count: Annotated[Count, Field(le=1 << 16)] | None = None
    max_frames: Annotated[Count, Field(le=1 << 16)] = 768
    """More are thinned out evenly."""


class Resize(Section):
    """The size that a picture gets."""

    resize: Literal["none", "fixed", "short_side", "max_pixels", "multiple", "native"]
    height: Side | None = None
    width: Side | None = None
    side: Side | None = None
    crop: Crop = "none"
    multiple: Annotated[Count, Field(le=4096)] | None = None
    """Default: patch * merge."""
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    filter: PixelFilter = "bicubic"


class Call(Section):
    """The user's own step: `fn(array, rng) -> array`."""

    call: CallName
    python: Text | None = None
    """Its interpreter; default: the daemon's."""


class Patchify(Section):
    """The last step of images and videos."""

    patchify: Layout
    patch: Annotated[Count, Field(le=1024)] | None = None
    """Pixels per side; default 14 (qwen2_vl), 16."""
    temporal: Annotated[Count, Field(le=64)] | None = None
    """Frames of a patch; default 2 (qwen2_vl), 1."""
    merge: Annotated[Count, Field(le=64)] | None = None
    """Patches per side of a token; default 2 (qwen2_vl), 1."""
    dtype: UnitDtype = "uint8"
    """uint8: pixels as they are, to be normalised on the device; else normalised here."""
    mean: Three | None = None
    std: Annotated[Three, AfterValidator(_check_spread)] | None = None
    """Defaults: CLIP's (qwen2_vl), 0.5."""


class Resample(Section):
    """The rate that a sound gets."""

    resample: Rate


class Window(Section):
    """A longest, or a fixed, length of a sound."""

    window: Seconds
    mode: Literal["cut", "pad", "fit", "refuse"] = "cut"
    """Longer is cut; shorter is padded with silence; both; or longer is refused."""


class Mel(Section):
    """The last step of sounds: log-mel frames."""

    mel: MelFile = MelFile()


class Frames(Section):
    """The last step of sounds: frames of the raw wave."""

    frames: FramesFile


def _as_step(names: tuple[str, ...]) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, str):
            value = {value: {}}
        if isinstance(value, dict) and len(set(names) & set(value)) == 1:
            return value
        raise ValueError(f"is no step; write one of {', '.join(names)}")

    return check


def _name_in(names: tuple[str, ...]) -> Callable[[Any], str | None]:
    def name_of(value: Any) -> str | None:
        if isinstance(value, dict):
            return next((name for name in names if name in value), None)
        return next((name for name in names if name in type(value).model_fields), None)

    return name_of


_IMAGE = ("decode", "resize", "call", "patchify")
_VIDEO = ("decode", "sample", "resize", "call", "patchify")
_AUDIO = ("decode", "resample", "window", "call", "mel", "frames")

ImageStep = Annotated[
    Annotated[DecodeImage, Tag("decode")]
    | Annotated[Resize, Tag("resize")]
    | Annotated[Call, Tag("call")]
    | Annotated[Patchify, Tag("patchify")],
    Discriminator(_name_in(_IMAGE)),
    BeforeValidator(_as_step(_IMAGE)),
]
VideoStep = Annotated[
    Annotated[DecodeVideo, Tag("decode")]
    | Annotated[SampleFrames, Tag("sample")]
    | Annotated[Resize, Tag("resize")]
    | Annotated[Call, Tag("call")]
    | Annotated[Patchify, Tag("patchify")],
    Discriminator(_name_in(_VIDEO)),
    BeforeValidator(_as_step(_VIDEO)),
]
AudioStep = Annotated[
    Annotated[DecodeAudio, Tag("decode")]
    | Annotated[Resample, Tag("resample")]
    | Annotated[Window, Tag("window")]
    | Annotated[Call, Tag("call")]
    | Annotated[Mel, Tag("mel")]
    | Annotated[Frames, Tag("frames")],
    Discriminator(_name_in(_AUDIO)),
    BeforeValidator(_as_step(_AUDIO)),
]

ImageSteps = Annotated[list[ImageStep], Field(min_length=1, max_length=16)]
VideoSteps = Annotated[list[VideoStep], Field(min_length=1, max_length=16)]
AudioSteps = Annotated[list[AudioStep], Field(min_length=1, max_length=16)]


def _check_token(value: object) -> object:
    is_valid = (isinstance(value, int) and 0 <= value < 1 << 31) or (
        isinstance(value, str) and 0 < len(value) <= 256
    )
    if isinstance(value, bool) or not is_valid:
        raise ValueError("neither a token nor an id; write '<|token|>' or an id")
    return value


def _check_expression(text: str) -> str:
    compile_expression(text)
    return text


def is_expression(text: str) -> bool:
    """Return whether a text is an expression over sizes, and so no token."""
    try:
        compile_expression(text)
    except ValueError:
        return False
    return any(name in text for name in NAMES)


def _as_placeholder(value: object) -> object:
    if isinstance(value, str) and is_expression(value):
        return {"tokens": value}
    return {"token": value} if isinstance(value, (str, int)) else value


Token = Annotated[int | str, BeforeValidator(_check_token, json_schema_input_type=int | str)]


class PlaceholderFile(Section):
    """What stands in the text for an item: a token or id, an expression, or a map of these keys."""

    token: Token | None = None
    """Repeated, as the item's tokens are filled in by the model; default: well-known names."""
    begin: Token | None = None
    end: Token | None = None
    """Stand once before and behind; default: none where `token` is given."""
    tokens: Annotated[str, AfterValidator(_check_expression)] | None = None
    """How many: an expression over frames, patches, t, h, w and merge; default: the layout's own."""


Placeholder = Annotated[
    PlaceholderFile,
    BeforeValidator(_as_placeholder, json_schema_input_type=int | str | PlaceholderFile),
]
Placeholders = dict[Literal["image", "video", "audio"], Placeholder]
