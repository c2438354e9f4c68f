"""What readers of fields share: which names are wanted, which values are paths of media."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from federation.model.job import SourceSpec
from msd_daemon.sources.field_view import ALTERNATIVE
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.record import MediaPath

NEMO_AUDIO_FIELD = "audio_filepath"
_PATTERN = "*"


def is_wanted(name: str, columns: Columns) -> bool:
    """Tell whether a field is asked for; `a.b` asks for a part of field `a`."""
    if columns is None:
        return True
    inside = name + "."
    return any(column == name or column.startswith(inside) for column in columns)


def media_names(spec: SourceSpec) -> frozenset[str]:
    """Return the names of the fields whose texts are paths of media.

    The field that names a record stays the text that it is.
    """
    named: list[str] = [NEMO_AUDIO_FIELD] if spec.format == "nemo_manifest" else []
    recipe = spec.recipe
    if recipe is not None:
        named += [recipe.image_field, recipe.audio_field, recipe.video_field]
        if recipe.interleave is not None and recipe.interleave.layout == "obelics":
            named.append(recipe.interleave.images_field)
    names = {name for joined in named for name in joined.split(ALTERNATIVE)}
    return frozenset(name for name in names - {"", spec.key_field} if _PATTERN not in name)


def wrap_media(fields: dict[str, Any], names: Iterable[str]) -> None:
    """Make texts, and lists of texts, of some fields paths of media."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, str):
            fields[name] = MediaPath(value)
        elif isinstance(value, list):
            fields[name] = [MediaPath(one) if isinstance(one, str) else one for one in value]


def is_encodable(value: object) -> bool:
    """Tell whether no text inside a JSON value has a lone surrogate."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return True
