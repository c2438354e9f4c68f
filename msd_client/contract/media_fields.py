"""Fields of images, videos and sounds in a microbatch: names, extents, most entries. Pure.

Items are packed one after the other, in the order of (row, column); their units (patches, frames)
lie side by side, whatever item they are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from msd_client.contract.errors import ConfigError

Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")
MediaExtent = Literal["unit", "item", "item_bound", "place", "local_item", "local_bound", "peer"]

UNIT_DTYPES = ("uint8", "float16", "float32")
_INDEX_FIELDS = ("cu_seqlens", "places", "cu_places", "segments")
_ROUTE_FIELDS = ("cu_sends", "send_counts", "recv_counts", "recv_places")


@dataclass(frozen=True)
class MediaField:
    """One modality that batches carry."""

    modality: Modality
    unit_values: int
    """Values of a unit: of a patch (image, video) or a frame (audio)."""
    unit_dtype: str
    """numpy name: uint8, float16, float32."""
    row_units_max: int
    """Most units of a row."""
    merge: int = 1
    """Patches on a side of a grid that make one placeholder token; M-RoPE ids go by it."""

    @property
    def has_grids(self) -> bool:
        """True where items have a grid of patches."""
        return self.modality != "audio"


class MediaArray(NamedTuple):
    """An array of a modality."""

    name: str
    dtype: str
    extent: MediaExtent
    """Its first dimension counts units, items, items + 1, or placeholder tokens. Where media may be
    encoded anywhere, items are those encoded here, local ones those of the text here, and peers
    data-parallel groups."""
    shape_max: tuple[int, ...]
    modality: str


def units_name(modality: str) -> str:
    """Return the name of the field that holds a modality's units."""
    return "audio_frames" if modality == "audio" else f"{modality}_patches"


def field_names(modality: str) -> tuple[str, ...]:
    """Return the names of all arrays of a modality."""
    grids = () if modality == "audio" else ("grids",)
    rest = tuple(f"{modality}_{name}" for name in (*grids, *_INDEX_FIELDS))
    return (units_name(modality), *rest)


def route_names(modality: str) -> tuple[str, ...]:
    """Return the names of the arrays that embeddings of a modality are routed by."""
    return tuple(f"{modality}_{name}" for name in _ROUTE_FIELDS)


def longest_name(modality: str) -> str:
    """Return the name of the number that says how many units a modality's longest item has."""
    return f"{modality}_max_seqlen"


HOST_NAMES = frozenset(
    f"{modality}_{name}" for modality in MODALITIES for name in ("send_counts", "recv_counts")
)
"""Numbers that a collective is called with: they stay in host memory, whatever device a batch is on."""
MEDIA_NAMES = frozenset(
    name for modality in MODALITIES for name in (*field_names(modality), *route_names(modality))
)
MODALITY_OF: dict[str, Modality] = {
    name: modality
    for modality in MODALITIES
    for name in (*field_names(modality), *route_names(modality), longest_name(modality))
}
"""Modality of each name that a batch has of media, numbers included."""


def media_arrays(
    media: tuple[MediaField, ...], rows: int, row_tokens: int, encode_dp_count: int = 0
) -> list[MediaArray]:
    """Return the arrays of a microbatch, those of units last: they alone are large.

    Args:
        media: Modalities of the job.
        rows: Rows of a microbatch.
        row_tokens: Places of a row.
        encode_dp_count: Data-parallel groups that may encode its media; 0: they are encoded where
            their text is, and there are no routes.
    """
    index: list[MediaArray] = []
    units: list[MediaArray] = []
    for rule in media:
        name = rule.modality
        # An item takes a unit and a placeholder token at least.
        local = items = rows * min(rule.row_units_max, row_tokens)
        if encode_dp_count:
            items = rows * rule.row_units_max  # their placeholder tokens lie elsewhere
        if rule.has_grids:
            index.append(MediaArray(f"{name}_grids", "int32", "item", (items, 3), name))
        index += [
            MediaArray(f"{name}_cu_seqlens", "int32", "item_bound", (items + 1,), name),
            MediaArray(f"{name}_places", "int32", "place", (rows * row_tokens,), name),
            MediaArray(f"{name}_cu_places", "int32", "local_bound", (local + 1,), name),
            MediaArray(f"{name}_segments", "int32", "local_item", (local,), name),
        ]
        if encode_dp_count:
            index += [
                MediaArray(f"{name}_cu_sends", "int32", "item_bound", (items + 1,), name),
                MediaArray(f"{name}_send_counts", "int32", "peer", (encode_dp_count,), name),
                MediaArray(f"{name}_recv_counts", "int32", "peer", (encode_dp_count,), name),
                MediaArray(f"{name}_recv_places", "int32", "place", (rows * row_tokens,), name),
            ]
        shape = (rows * rule.row_units_max, rule.unit_values)
        units.append(MediaArray(units_name(name), rule.unit_dtype, "unit", shape, name))
    return index + units


def check_media(media: tuple[MediaField, ...], rows: int) -> None:
    """Refuse media that no slot can hold.

    Raises:
        ConfigError: A number, dtype or modality is out of range, or a modality stands twice.
    """
    seen: set[str] = set()
    for rule in media:
        if rule.modality not in MODALITIES or rule.modality in seen:
            raise ConfigError(f"batch spec: media {rule.modality!r} is unknown or stands twice")
        seen.add(rule.modality)
        if rule.unit_dtype not in UNIT_DTYPES:
            raise ConfigError(
                f"batch spec: units of {rule.modality} have dtype {rule.unit_dtype!r}, none of "
                f"{', '.join(UNIT_DTYPES)}"
            )
        for key in ("unit_values", "row_units_max", "merge"):
            value = getattr(rule, key)
            if value < 1:
                raise ConfigError(
                    f"batch spec: {key} of {rule.modality} is {value}, must be at least 1"
                )
        if rows * rule.row_units_max > np.iinfo(np.int32).max:
            raise ConfigError(
                f"batch spec: {rows} rows x {rule.row_units_max} units of {rule.modality} exceed "
                f"the int32 range of {rule.modality}_cu_seqlens: lower batch.microbatch_rows"
            )
