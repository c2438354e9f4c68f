"""Media in a batch spec: names, places, sizes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.contract.batch_spec import MASKED_IDS_MAX, BatchSpec
from msd_client.contract.errors import ConfigError
from msd_client.contract.field_table import FIELD_TABLE, MEDIA_LINES
from msd_client.contract.media_fields import MEDIA_NAMES, MODALITIES, MediaField, longest_name
from msd_client.contract.ring_layout import TocField, encode_table
from msd_client.contract.slot_fields import TABLE_BYTES_MAX
from msd_client.contract.user_fields import BUILT_IN_NAMES, UserField

IMAGE = MediaField("image", 1176, "uint8", 4096, 2)
VIDEO = MediaField("video", 12, "float32", 100)
AUDIO = MediaField("audio", 128, "float16", 3000)


def rule(**change: Any) -> BatchSpec:
    plain: dict[str, Any] = {"rows": 2, "row_tokens": 64, "row_segments_max": 4, "media": (IMAGE,)}
    return BatchSpec.for_rule(**(plain | change))


def test_a_modality_has_its_arrays_those_of_units_last() -> None:
    spec = rule(media=(IMAGE, AUDIO))
    shapes = {field.name: (field.dtype, field.shape_max) for field in spec.fields if field.modality}
    assert shapes == {
        "image_grids": ("int32", (128, 3)),
        "image_cu_seqlens": ("int32", (129,)),
        "image_places": ("int32", (128,)),
        "image_cu_places": ("int32", (129,)),
        "image_segments": ("int32", (128,)),
        "audio_cu_seqlens": ("int32", (129,)),
        "audio_places": ("int32", (128,)),
        "audio_cu_places": ("int32", (129,)),
        "audio_segments": ("int32", (128,)),
        "image_patches": ("uint8", (8192, 1176)),
        "audio_frames": ("float16", (6000, 128)),
    }
    assert [field.name for field in spec.fields][-2:] == ["image_patches", "audio_frames"]
    units = rule(row_tokens=8192).field("image_segments").shape_max
    assert units == (2 * 4096,), "an item takes a unit at least"
    assert spec.has_masks
    assert not rule(media=()).has_masks


@given(
    st.permutations([IMAGE, VIDEO, AUDIO]),
    st.integers(0, 3),
    st.sampled_from(["all", "first", "middle", "last"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["plain", "mrope"]),
)
def test_specs_survive_the_wire_with_disjoint_aligned_fields(
    media: list[MediaField], count: int, stage: Any, cp_count: int, positions: Any
) -> None:
    spec = rule(
        media=tuple(media[:count]), stage=stage, cp_count=cp_count, positions=positions, rows=3
    )
    assert BatchSpec.decode(spec.encode()) == spec
    assert spec.at(128).at(64) == spec
    end = 0
    for field in spec.fields:
        assert field.offset_bytes >= end
        assert field.offset_bytes % 128 == 0
        assert field.nbytes_max == np.dtype(field.dtype).itemsize * np.prod(field.shape_max)
        end = field.offset_bytes + field.nbytes_max
    assert spec.payload_bytes_max == end
    names = [field.name for field in spec.fields]
    has_media = stage in ("all", "first") and count > 0
    assert any(name in MEDIA_NAMES for name in names) == has_media
    assert ("mrope_position_ids" in names) == (positions == "mrope")


def test_the_ids_of_three_axes_lie_rank_by_rank() -> None:
    spec = rule(positions="mrope")
    assert spec.field("mrope_position_ids").shape_max == (3, 2, 64)
    spec = rule(positions="mrope", cp_count=4)
    assert spec.field("mrope_position_ids").shape_max == (4, 3, 2, 16)
    assert spec.scratch_bytes == 128 * (4 + 8 + 4 + 12)


@pytest.mark.parametrize(
    ("stage", "weights", "places_bytes"),
    [("all", (), 0), ("first", (), 4), ("middle", (1.0,), 8), ("last", (1.0,), 0)],
)
def test_stages_without_labels_count_them_in_a_scratch(
    stage: Any, weights: tuple[float, ...], places_bytes: int
) -> None:
    spec = rule(stage=stage, source_weights=weights)
    assert spec.scratch_bytes == 128 * places_bytes
    assert rule(media=(), stage=stage, source_weights=weights).scratch_bytes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"media": (IMAGE, IMAGE)}, "'image' is unknown or stands twice"),
        ({"media": (MediaField("smell", 1, "uint8", 1),)}, "'smell' is unknown"),
        ({"media": (MediaField("image", 0, "uint8", 1),)}, "unit_values of image is 0"),
        ({"media": (MediaField("image", 1, "uint8", 0),)}, "row_units_max of image is 0"),
        ({"media": (MediaField("image", 1, "uint8", 1, 0),)}, "merge of image is 0"),
        ({"media": (MediaField("image", 1, "int8", 1),)}, "dtype 'int8'"),
        ({"media": (MediaField("image", 1, "uint8", 1 << 30),)}, "int32 range of image_cu_seqlens"),
        (
            {"media": (MediaField("image", 4, "uint8", 1 << 29),)},
            "or the patches and frames of a row",
        ),
        ({"positions": "rope"}, "positions 'rope'"),
        ({"ignore_label": MASKED_IDS_MAX}, "not below 1073741824"),
        ({"pad_id": MASKED_IDS_MAX}, "not below 1073741824"),
        (
            {"user_fields": (UserField("video_places", "row", "int32", 0),)},
            "'video_places' is taken",
        ),
        ({"user_fields": (UserField("audio_max_seqlen", "row", "int32", 0),)}, "is taken"),
        ({"user_fields": (UserField("mrope_position_ids", "row", "int32", 0),)}, "is taken"),
    ],
)
def test_impossible_media_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule(**change)


def test_a_table_that_names_too_much_is_refused_with_the_remedy() -> None:
    users = tuple(UserField(f"{'x' * 62}{k:02}", "token", "float64", 0.0) for k in range(24))
    with pytest.raises(ConfigError, match=r"shorten the names of user fields") as caught:
        rule(media=(IMAGE, VIDEO, AUDIO), user_fields=users, positions="mrope", cp_count=8)
    assert caught.value.attributes["available_bytes"] == TABLE_BYTES_MAX


@pytest.mark.parametrize("count", range(25))
def test_a_table_that_is_not_refused_fits_its_page(count: int) -> None:
    users = tuple(UserField(f"{'x' * 62}{k:02}", "token", "float64", 0.0) for k in range(count))
    media = (IMAGE, VIDEO, AUDIO)
    try:
        spec = rule(
            media=media, user_fields=users, positions="mrope", cp_count=8, source_weights=(1.0,)
        )
    except ConfigError:
        return
    big = 1 << 40
    table = [
        TocField(f.name, f.dtype, tuple((1 << 31) - 1 for _ in f.shape_max), big, big)
        for f in spec.fields
    ]
    scalars = {line.name: big for line in FIELD_TABLE if line.dtype == "int"}
    encode_table(table, scalars | {longest_name(name): big for name in MODALITIES})


def test_names_of_media_are_reserved_and_those_of_images_documented() -> None:
    assert MEDIA_NAMES <= BUILT_IN_NAMES
    documented = {line.name for line in MEDIA_LINES}
    assert documented == {
        *(name for name in MEDIA_NAMES if name.startswith("image")),
        "image_max_seqlen",
    }
