"""Keys of a source that say how its records become samples, as a user writes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from msd_daemon.config.section import Section, Text
from msd_daemon.config.transform_file import Transform

TokenName = Annotated[int | str, Field()]
"""A token of the tokenizer, or its id."""


class InterleaveFile(Section):
    """Documents of texts and images in turn."""

    text: Text
    """Field of the texts."""
    image: Text
    """Field of the images."""
    layout: Literal["obelics", "mmc4"] = "obelics"
    """obelics: two lists of one length, one of both is null at each place; mmc4: a list of texts,
    and images that name the text they stand before."""
    missing: Literal["fault", "leave_out"] = "fault"
    """An image whose file is not there: its document is a fault, or goes without it."""


class FimFile(Section):
    """Fill-in-the-middle."""

    rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    """Share of the documents."""
    prefix: TokenName
    suffix: TokenName
    middle: TokenName
    spm_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Share of those in the order suffix, prefix, middle."""


class ExcludeFile(Section):
    """Records that are left out: those whose key, or whose content's hash, is in a list."""

    keys: Text | None = None
    """File, glob or URL of keys, one a line; or of parquet."""
    hashes: Text | None = None
    """File, glob or URL of sha256 of texts in hex, one a line."""
    column: str = ""
    """Of parquet files; default: their only one."""

    @model_validator(mode="after")
    def _check_one(self) -> ExcludeFile:
        if (self.keys is None) == (self.hashes is None):
            raise ValueError("gives keys and hashes, or neither; give one of them")
        return self


class ChatFile(Section):
    """How messages become text, and which of them are trained."""

    template: Text | None = None
    """File of the Jinja template; default: that of the tokenizer's folder."""
    train_on: Literal["assistant", "last", "all"] = "assistant"


def _as_exclude(value: object) -> object:
    return {"keys": value} if isinstance(value, str) else value


class GroupFieldFile(Section):
    """Neighbouring records of a shard that have one value of a field."""

    field: Text


Exclude = Annotated[
    ExcludeFile, BeforeValidator(_as_exclude, json_schema_input_type=str | ExcludeFile)
]


class RecipeFile(Section):
    """Keys that a source, or `defaults`, may have beside where its text is."""

    where: Text | None = None
    """Expression over fields, `q > .6 and lang == "en"`: other records are left out."""
    exclude: Exclude | None = None
    template: Text | None = None
    """Joins fields into one text: `{question}\\n{answer}`."""
    messages: Text | None = None
    """Field of the messages of a chat."""
    tools: Text | None = None
    """Field of the tools that a chat may call."""
    interleave: InterleaveFile | None = None
    image: Text | None = None
    """Field of the image, or images: bytes, a path, a map of both, a list; `jpg;png` of a tar."""
    video: Text | None = None
    audio: Text | None = None
    media_root: Text | None = None
    """Folder or URL that paths of media start from; default: the shard's own folder."""
    fim: FimFile | None = None
    transform: Transform | None = None
    """Your own function on each record: `fn(sample, rng) -> sample | list | None`."""
    group: Literal["record"] | GroupFieldFile | None = None
    """Samples that stay together in one row: all that `transform` makes of a record (`record`), or
    those of neighbouring records of one value of a field, `{field: prompt_id}`."""
