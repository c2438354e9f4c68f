"""Which fields of its records a source needs, so that a format reads no others."""

from __future__ import annotations

from federation.model.job import FieldRule, SourceSpec
from federation.model.recipe import SampleRecipe
from msd_client.contract.media_fields import Modality
from msd_daemon.sources.field_view import ALTERNATIVE
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.json_text import FIELD_JOIN


def modalities_of(recipe: SampleRecipe) -> frozenset[Modality]:
    """Return which media a recipe's samples may hold."""
    found: set[Modality] = set()
    if recipe.image_field or recipe.interleave is not None:
        found.add("image")
    if recipe.video_field:
        found.add("video")
    if recipe.audio_field:
        found.add("audio")
    return frozenset(found)


def wanted_fields(spec: SourceSpec, fields: tuple[FieldRule, ...]) -> Columns:
    """Return the names of the fields, None where all are wanted.

    A user's transform gets whole records, and so does a hash of their content.
    """
    recipe = spec.recipe or SampleRecipe()
    is_held_by_content = spec.hold_out > 0 and not spec.group_field
    is_by_content = (is_held_by_content or recipe.exclude is not None) and not spec.key_field
    if recipe.transform is not None or is_by_content:
        return None
    names = [*_content_fields(spec, recipe), *(rule.from_field for rule in fields)]
    if recipe.where:
        from msd_daemon.sources.where import where_columns

        names += where_columns(recipe.where)
    if spec.key_field:
        names.append(spec.key_field)
    if spec.group_field:
        names.append(spec.group_field)
    if any("*" in name for name in names):
        return None
    return tuple(dict.fromkeys(name for joined in names for name in joined.split(ALTERNATIVE)))


def _content_fields(spec: SourceSpec, recipe: SampleRecipe) -> list[str]:
    if recipe.chat is not None:
        names = [recipe.chat.messages_field, recipe.chat.tools_field]
    elif recipe.interleave is not None:
        names = [recipe.interleave.texts_field, recipe.interleave.images_field]
    elif spec.tokens_field:
        names = [spec.tokens_field]
    elif recipe.template:
        from msd_daemon.transforms.template import compile_template

        names = list(compile_template(recipe.template).fields)
    else:
        names = spec.text_field.split(FIELD_JOIN)
    names += [recipe.image_field, recipe.audio_field, recipe.video_field]
    return [name for name in names if name]
