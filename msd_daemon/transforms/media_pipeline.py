"""Media of a job: one function per rule that makes packed units of an item's bytes.

Content is a function of the rule, the bytes and the generator alone, per build of the decoders
(`decoder_versions`). Nothing here starts a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import MediaRule
from msd_daemon.transforms import image_resize
from msd_daemon.transforms.audio_pipeline import AudioPipeline, UserStep
from msd_daemon.transforms.image_pipeline import ImagePipeline
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.media_expression import Expression, compile_expression
from msd_daemon.transforms.media_memory import keep_freed_memory

__all__ = ["MediaError", "MediaItem", "Pipeline", "UserStep", "decoder_versions", "open_pipeline"]

_LIBRARIES = {
    "image": ("simplejpeg", "pillow"),
    "video": ("av",),
    "audio": ("soundfile", "av", "soxr"),
}


class MediaItem(NamedTuple):
    """An item as it stands in a batch."""

    data: npt.NDArray[Any]
    """Shape (units, unit_values), C-contiguous, of the rule's unit_dtype."""
    grid: tuple[int, int, int]
    """Time, height and width in patches; of a sound (frames, 1, 1)."""
    tokens: int
    """Placeholder tokens in the text; begin and end ids are not counted."""


Pipeline = Callable[[bytes, np.random.Generator], MediaItem]


def open_pipeline(rule: MediaRule, call: UserStep | None = None) -> Pipeline:
    """Return the function that makes an item of its bytes.

    It raises MediaError for whatever is no sample: content that cannot be decoded whole, or is over
    a limit of the rule.

    Args:
        rule: Of one modality; it holds that modality's own rule.
        call: The user's step. It gets and returns uint8 (height, width, 3) of an image, (frames,
            height, width, 3) of a video, float32 (samples,) of a sound; exceptions of it pass.

    Raises:
        ValueError: `placeholder_tokens` is no expression.
    """
    keep_freed_memory()
    counted = compile_expression(rule.placeholder_tokens) if rule.placeholder_tokens else None
    if rule.modality == "audio":
        return _audio(AudioPipeline(rule, call), counted)
    pictures = ImagePipeline(rule, call)
    make = pictures.video if rule.modality == "video" else pictures.image
    merge = pictures.patches.merge

    def of_pictures(content: bytes, rng: np.random.Generator) -> MediaItem:
        patches, grid = make(content, rng)
        tokens = grid.patches // merge**2
        return MediaItem(
            patches, (grid.t, grid.h, grid.w), _tokens(counted, tokens, grid, 0, merge)
        )

    return of_pictures


def _audio(pipeline: AudioPipeline, counted: Expression | None) -> Pipeline:
    def of_sound(content: bytes, rng: np.random.Generator) -> MediaItem:
        frames = pipeline.frames(content, rng)
        grid = (len(frames), 1, 1)
        return MediaItem(frames, grid, _tokens(counted, len(frames), grid, len(frames), 1))

    return of_sound


def _tokens(
    counted: Expression | None, own: int, grid: tuple[int, int, int], frames: int, merge: int
) -> int:
    if counted is None:
        return own
    t, h, w = grid
    sizes = {"frames": frames or t, "patches": t * h * w, "t": t, "h": h, "w": w, "merge": merge}
    try:
        return counted(sizes)
    except ValueError as error:
        raise MediaError(f"placeholder tokens: {error}") from error


def decoder_versions(rules: Iterable[MediaRule]) -> str:
    """Return names and versions of the libraries that make the content, for the state (E3)."""
    modalities = {rule.modality for rule in rules}
    names = {name for modality in modalities for name in _LIBRARIES[modality]}
    found = [f"{name} {_version(name)}" for name in sorted(names)]
    if modalities - {"audio"}:
        found.append(f"resize {image_resize.KERNEL}")
    return ", ".join(found)


def _version(name: str) -> str:
    try:
        own = version(name)
    except PackageNotFoundError:
        return "absent"
    if name == "soundfile":
        import soundfile

        return f"{own} (libsndfile {soundfile.__libsndfile_version__})"
    if name == "av":
        import av

        codec = ".".join(map(str, av.library_versions["libavcodec"]))
        return f"{own} (libavcodec {codec})"
    return own
