"""What a sample is made of: texts and media in the order in which the model reads them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from federation.model.job import SourceSpec
from federation.model.recipe import InterleaveRule, SampleRecipe
from msd_client.contract.media_fields import Modality
from msd_daemon.sources.field_numbers import UnfitValueError, kind_of
from msd_daemon.sources.field_view import FieldView, as_text
from msd_daemon.sources.json_text import FIELD_JOIN
from msd_daemon.sources.record import MediaPath
from msd_daemon.sources.record_fault import missing

PLACEHOLDERS: dict[str, Modality] = {"<image>": "image", "<video>": "video", "<audio>": "audio"}
"""Where a text says so its media stand there, else before it."""
_TEXT_JOIN = {"obelics": "\n\n", "mmc4": " "}
_IMAGE_KEYS = ("bytes", "path", "image_name", "image", "url")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image, sound or video."""

    modality: Modality
    content: bytes | MediaPath
    is_optional: bool = False
    """True where the sample goes without it if its file is not there."""


Part = str | MediaPart
Composer = Callable[[FieldView], list[Part]]


def composer_of(spec: SourceSpec) -> Composer:
    """Return the function that tells what a record's sample is made of; chats are not its matter.

    The function raises RecordFault where fields are not as the recipe has them.
    """
    recipe = spec.recipe or SampleRecipe()
    if recipe.interleave is not None:
        rule = recipe.interleave
        return lambda view: _interleaved(view, rule)
    text_of = _text_reader(spec, recipe)
    wanted = _media_fields(recipe)
    if not wanted:
        return lambda view: [text_of(view)]

    def compose(view: FieldView) -> list[Part]:
        found = {
            modality: [media_part(value, modality, name) for value in view.media(name)]
            for modality, name in wanted
        }
        return _placed(text_of(view), found)

    return compose


def chat_media(view: FieldView, spec: SourceSpec) -> list[MediaPart]:
    """Return the media of a chat, whose template has a placeholder for each; it may have none.

    Raises:
        RecordFault: A field is not as the recipe has it.
    """
    recipe = spec.recipe or SampleRecipe()
    return [
        media_part(value, modality, name)
        for modality, name in _media_fields(recipe)
        for value in view.optional_media(name)
    ]


def _media_fields(recipe: SampleRecipe) -> list[tuple[Modality, str]]:
    fields: list[tuple[Modality, str]] = [
        ("image", recipe.image_field),
        ("video", recipe.video_field),
        ("audio", recipe.audio_field),
    ]
    return [(modality, name) for modality, name in fields if name]


def media_part(value: object, modality: Modality, name: str) -> MediaPart:
    """Return the part of a value: bytes, a path, or a map that holds one of them.

    Raises:
        RecordFault: It is none of these.
    """
    if isinstance(value, Mapping):
        for key in _IMAGE_KEYS:
            if value.get(key) is not None:
                value = value[key]
                break
    if isinstance(value, (bytes, bytearray, memoryview)):
        return MediaPart(modality, bytes(value))
    if isinstance(value, MediaPath):
        return MediaPart(modality, value)
    if isinstance(value, str) and value:
        return MediaPart(modality, MediaPath(value))
    raise missing(f"field {name!r} is {kind_of(value)}, not bytes or a path of {modality}")


def _text_reader(spec: SourceSpec, recipe: SampleRecipe) -> Callable[[FieldView], str]:
    if recipe.template:
        from msd_daemon.transforms.template import compile_template

        template = compile_template(recipe.template)

        def render(view: FieldView) -> str:
            try:
                return template.render(view)
            except UnfitValueError as error:
                raise missing(str(error)) from None

        return render
    names = spec.text_field.split(FIELD_JOIN)
    return lambda view: "\n".join(view.text(name) for name in names)


def _placed(text: str, found: dict[Modality, list[MediaPart]]) -> list[Part]:
    """Put media where the text has their placeholders, those it has none for before it."""
    named = [(at, mark) for mark in PLACEHOLDERS for at in _places(text, mark, found)]
    parts: list[Part] = [
        part
        for modality, media in found.items()
        if not any(PLACEHOLDERS[mark] == modality for _, mark in named)
        for part in media
    ]
    waiting = {modality: iter(media) for modality, media in found.items()}
    cuts = [(0, 0), *((at, at + len(mark)) for at, mark in sorted(named)), (len(text), len(text))]
    for (_, begin), (end, after) in pairwise(cuts):
        if end > begin:
            parts.append(text[begin:end])
        if after > end:
            parts.append(next(waiting[PLACEHOLDERS[text[end:after]]]))
    return parts


def _places(text: str, mark: str, found: dict[Modality, list[MediaPart]]) -> list[int]:
    media = found.get(PLACEHOLDERS[mark])
    if media is None or mark not in text:
        return []
    places = []
    at = text.find(mark)
    while at >= 0:
        places.append(at)
        at = text.find(mark, at + len(mark))
    if len(places) != len(media):
        raise missing(f"the text has {len(places)} {mark}, the record {len(media)} of them")
    return places


def _interleaved(view: FieldView, rule: InterleaveRule) -> list[Part]:
    texts, images = _listed(view, rule.texts_field), _listed(view, rule.images_field)
    parts = (
        _obelics(texts, images, rule) if rule.layout == "obelics" else _mmc4(texts, images, rule)
    )
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += _TEXT_JOIN[rule.layout] + part
        else:
            joined.append(part)
    return joined


def _obelics(texts: list[Any], images: list[Any], rule: InterleaveRule) -> list[Part]:
    if len(texts) != len(images):
        raise missing(
            f"{rule.texts_field!r} has {len(texts)} places, {rule.images_field!r} {len(images)}"
        )
    parts: list[Part] = []
    for place, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            seen = "neither" if text is None else "both"
            raise missing(
                f"place {place} has {seen} of {rule.texts_field!r} and {rule.images_field!r}"
            )
        if text is None:
            parts.append(_image(image, rule))
        else:
            parts.append(as_text(text, rule.texts_field))
    return parts


def _mmc4(texts: list[Any], images: list[Any], rule: InterleaveRule) -> list[Part]:
    before: dict[int, list[Part]] = {}
    for image in images:
        place = image.get("matched_text_index") if isinstance(image, Mapping) else None
        if not isinstance(place, int) or not 0 <= place < len(texts):
            raise missing(f"an image of {rule.images_field!r} names no text of the record")
        before.setdefault(place, []).append(_image(image, rule))
    parts: list[Part] = []
    for place, text in enumerate(texts):
        parts += before.get(place, [])
        parts.append(as_text(text, rule.texts_field))
    return parts


def _image(value: object, rule: InterleaveRule) -> MediaPart:
    part = media_part(value, "image", rule.images_field)
    return MediaPart("image", part.content, is_optional=rule.missing == "leave_out")


def _listed(view: FieldView, name: str) -> list[Any]:
    value = view.get(name)
    if not isinstance(value, (list, tuple)):
        raise missing(f"field {name!r} is {kind_of(value)}, not a list")
    return list(value)
