"""Fields of a record by the names that recipes give them."""

from __future__ import annotations

import pytest

from federation.model.chunk import RecordStatus
from msd_daemon.sources.field_view import FieldView
from msd_daemon.sources.record_fault import RecordFault


def test_nested_names_members_and_alternatives() -> None:
    view = FieldView(
        {
            "__key__": "a",
            "json": b'{"caption": "hi", "meta": {"lang": "en"}, "n": 3}',
            "txt": "h\u00e9".encode(),
            "png": b"\x89PNG",
            "a.b": 1,
            "a": {"b": 2, "c": 3},
        }
    )
    assert view["json.caption"] == "hi"
    assert view["json.meta.lang"] == "en"
    assert view["json"]["n"] == 3
    assert view.text("txt") == "h\u00e9"
    assert view.text("caption;json.caption") == "hi"
    assert view["a.b"] == 1
    assert view["a.c"] == 3
    assert view.media("jpg;png") == [b"\x89PNG"]
    assert "json.nothing" not in view
    assert view.get("a.b.c") is None


def test_many_media_come_in_the_order_of_their_numbers() -> None:
    view = FieldView({f"{n}.jpg": bytes([n]) for n in (10, 2, 1)} | {"2.png": b"p"})
    assert view.media("*.jpg") == [b"\x01", b"\x02", b"\x0a"]
    assert FieldView({"image": [b"a", None, b"b"]}).media("image") == [b"a", b"b"]


@pytest.mark.parametrize(
    ("fields", "name", "status", "told"),
    [
        ({"txt": b"\xe6A"}, "txt", RecordStatus.BAD_ENCODING, "not UTF-8 at byte 0"),
        ({"text": "\ud800x"}, "text", RecordStatus.BAD_ENCODING, "lone surrogate"),
        ({"json": b"{"}, "json.caption", RecordStatus.BAD_SYNTAX, "member 'json'"),
        ({"text": 3}, "text", RecordStatus.FIELD_MISSING, "is a int, not a string"),
        ({"text": None}, "text", RecordStatus.FIELD_MISSING, "is null"),
        ({}, "text", RecordStatus.FIELD_MISSING, "is absent"),
    ],
)
def test_what_is_no_text_is_a_fault_by_name(
    fields: dict[str, object], name: str, status: RecordStatus, told: str
) -> None:
    with pytest.raises(RecordFault) as caught:
        FieldView(fields).text(name)
    assert caught.value.status == status
    assert told in caught.value.message


def test_media_that_are_not_there_are_a_fault() -> None:
    with pytest.raises(RecordFault) as caught:
        FieldView({"image": None}).media("image")
    assert caught.value.status == RecordStatus.FIELD_MISSING
