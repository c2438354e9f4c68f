"""Texts and media of a record in the order in which the model reads them."""

from __future__ import annotations

import pytest

from federation.model.job import SourceSpec
from federation.model.recipe import InterleaveRule, SampleRecipe
from msd_daemon.sources.field_view import FieldView
from msd_daemon.sources.record import MediaPath
from msd_daemon.sources.record_fault import RecordFault
from msd_daemon.sources.sample_parts import MediaPart, Part, chat_media, composer_of


def compose(recipe: SampleRecipe, fields: dict[str, object], text: str = "text") -> list[Part]:
    spec = SourceSpec("s", "jsonl", "none", "seekable", (), "", text_field=text, recipe=recipe)
    return composer_of(spec)(FieldView(fields))


A, B = MediaPart("image", b"a"), MediaPart("image", b"b")


def test_images_stand_before_a_text_that_does_not_say_where() -> None:
    recipe = SampleRecipe(image_field="image")
    assert compose(recipe, {"image": [b"a", b"b"], "text": "x"}) == [A, B, "x"]


def test_images_stand_where_the_text_says() -> None:
    recipe = SampleRecipe(image_field="image")
    fields: dict[str, object] = {"image": [b"a", b"b"], "text": "x<image>y<image>"}
    assert compose(recipe, fields) == ["x", A, "y", B]


def test_placeholders_and_images_must_be_as_many() -> None:
    with pytest.raises(RecordFault, match="1 <image>, the record 2"):
        compose(SampleRecipe(image_field="image"), {"image": [b"a", b"b"], "text": "x<image>"})


def test_a_placeholder_of_a_modality_that_the_source_has_not_is_text() -> None:
    fields: dict[str, object] = {"image": b"a", "text": "<audio>"}
    assert compose(SampleRecipe(image_field="image"), fields) == [A, "<audio>"]


def test_a_map_of_bytes_and_path_gives_what_it_has() -> None:
    recipe = SampleRecipe(image_field="image")
    with_bytes = {"image": {"bytes": b"a", "path": "p.jpg"}, "text": "x"}
    assert compose(recipe, with_bytes) == [A, "x"]
    without = {"image": {"bytes": None, "path": "p.jpg"}, "text": "x"}
    assert compose(recipe, without) == [MediaPart("image", MediaPath("p.jpg")), "x"]


def test_template_joins_fields() -> None:
    recipe = SampleRecipe(template="Q: {q}\nA: {a}")
    assert compose(recipe, {"q": "1+1", "a": 2}) == ["Q: 1+1\nA: 2"]


def test_obelics_has_one_of_both_at_each_place() -> None:
    recipe = SampleRecipe(interleave=InterleaveRule("texts", "images", missing="leave_out"))
    fields: dict[str, object] = {
        "texts": ["a", None, "b", "c"],
        "images": [None, "i.png", None, None],
    }
    image = MediaPart("image", MediaPath("i.png"), is_optional=True)
    assert compose(recipe, fields) == ["a", image, "b\n\nc"]
    with pytest.raises(RecordFault, match="place 0 has both"):
        compose(recipe, {"texts": ["a"], "images": ["i"]})
    with pytest.raises(RecordFault, match="2 places"):
        compose(recipe, {"texts": ["a", "b"], "images": [None]})


def test_mmc4_images_stand_before_the_text_they_name() -> None:
    recipe = SampleRecipe(interleave=InterleaveRule("text_list", "image_info", "mmc4"))
    fields: dict[str, object] = {
        "text_list": ["a", "b", "c"],
        "image_info": [
            {"image_name": "2.png", "matched_text_index": 2},
            {"image_name": "0.png", "matched_text_index": 0},
        ],
    }
    first, last = (MediaPart("image", MediaPath(name)) for name in ("0.png", "2.png"))
    assert compose(recipe, fields) == [first, "a b", last, "c"]
    with pytest.raises(RecordFault, match="names no text"):
        compose(recipe, {"text_list": [], "image_info": [{"image_name": "x"}]})


@pytest.mark.parametrize("fields", [{}, {"images": None}, {"images": []}])
def test_a_chat_may_have_no_image(fields: dict[str, object]) -> None:
    recipe = SampleRecipe(image_field="images")
    spec = SourceSpec("s", "jsonl", "none", "seekable", (), "", recipe=recipe)
    assert chat_media(FieldView(fields), spec) == []


def test_images_of_a_chat_are_found_by_pattern_too() -> None:
    recipe = SampleRecipe(image_field="*.jpg")
    spec = SourceSpec("s", "webdataset", "none", "streaming", (), "", recipe=recipe)
    assert chat_media(FieldView({"0.jpg": b"a", "1.jpg": b"b"}), spec) == [A, B]
