"""Records with fields as tokens, marks and media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from federation.model.chunk import MARK_SAMPLE, MARK_UNTRAINED, RecordStatus
from federation.model.job import FieldRule, SourceSpec, TokenizerSpec
from federation.model.media import MediaRule
from federation.model.recipe import ChatRule, ExcludeRule, SampleRecipe
from msd_client.contract.errors import TransformError
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT
from msd_daemon.sources.encoded import EncodedRecords
from msd_daemon.sources.record import RawRecord
from msd_daemon.sources.sample_encoder import SampleEncoder, SampleTools
from msd_daemon.sources.sample_parts import composer_of
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.tokenizer import BytesTokenizer

BOS, EOS, PAD, BEGIN, END = 257, 256, 300, 301, 302
TOKENIZER = BytesTokenizer(TokenizerSpec("bytes", vocabulary_count=400, bos_id=BOS, eos_id=EOS))
RULE = MediaRule("image", 2, "uint8", 8, PAD, BEGIN, END)


class Item(NamedTuple):
    data: Any
    grid: tuple[int, int, int]
    tokens: int


def decode(content: bytes, rng: np.random.Generator) -> Item:
    """Stand in for a decoder: as many units as the first byte says, half as many tokens."""
    if content == b"bad":
        raise MediaError("no image")
    units = content[0]
    return Item(np.full((units, 2), content[-1], np.uint8), (1, units, 1), max(1, units // 2))


def encoder(
    recipe: SampleRecipe, *, fields: tuple[FieldRule, ...] = (), row_tokens: int = 64, **tools: Any
) -> SampleEncoder:
    spec = SourceSpec("s", "mds", "none", "seekable", (), "", recipe=recipe)
    made = SampleTools(composer_of(spec), decoders=(decode,), **tools)
    return SampleEncoder(spec, TOKENIZER, made, (RULE,), row_tokens, fields, "/d/s.mds")


def records(*fields: Mapping[str, Any]) -> list[RawRecord]:
    return [RawRecord(place, b"", fields=line, fields_bytes=9) for place, line in enumerate(fields)]


def shown(encoded: EncodedRecords, number: int) -> list[str | int]:
    begin, end = encoded.offsets[number : number + 2]
    return [
        f"-{int(token) & ~UNTRAINED_BIT}" if token & UNTRAINED_BIT else int(token)
        for token in encoded.tokens[begin:end].tolist()
    ]


def test_an_image_and_its_caption() -> None:
    one = encoder(SampleRecipe(image_field="image")).encode(
        records({"image": b"\x04z", "text": "hi"})
    )
    assert shown(one, 0) == [257, "-301", "-300", "-300", "-302", 104, 105, 256]
    assert one.tokens.dtype == np.int32
    assert one.marks is not None
    assert one.marks.counts.tolist() == [3]
    assert one.marks.table.tolist() == [
        [MARK_UNTRAINED, 1, 1, 0],
        [0, 2, 2, 4],
        [MARK_UNTRAINED, 4, 1, 0],
    ]
    assert one.media[0].counts.tolist() == [1]
    assert one.media[0].items.tolist() == [[2, 2, 4, 1, 4, 1]]
    assert one.media[0].data[0].tolist() == [[122, 122]] * 4


def test_each_fate_of_a_record_has_its_own_status() -> None:
    made = encoder(
        SampleRecipe(image_field="image", exclude=ExcludeRule("", "", "content")),
        where=lambda view: view["q"] > 0,
        exclude=lambda key: key == b"forbidden",
    )
    good = {"image": b"\x02a", "text": "x", "q": 1}
    found = made.encode(
        records(
            good,
            good | {"q": 0},
            good | {"text": "forbidden"},
            good | {"image": b"bad"},
            good | {"image": b"\x09a"},
            good | {"image": None},
            good | {"text": b"\xff"},
        )
    )
    assert found.status.tolist() == [
        RecordStatus.OK,
        RecordStatus.FILTERED,
        RecordStatus.EXCLUDED,
        RecordStatus.UNDECODABLE,
        RecordStatus.TOO_LARGE,
        RecordStatus.FIELD_MISSING,
        RecordStatus.BAD_ENCODING,
    ]
    assert [number for number, _ in found.faults] == [3, 4, 5, 6]
    assert found.faults[0][1].text == "/d/s.mds: record at record 3: no image"
    keyed = [RawRecord(7, b"", key="bild-é".encode(), fields=good | {"image": b"bad"})]
    ((_, told),) = made.encode(keyed).faults
    assert told.text == "/d/s.mds: record 'bild-é' at record 7: no image"
    assert "9 units" in found.faults[1][1].text
    assert found.media[0].counts.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert found.lengths[1:].tolist() == [0] * 6


def test_texts_are_taken_by_their_own_record_whatever_becomes_of_others() -> None:
    found = encoder(SampleRecipe(image_field="image"), row_tokens=2).encode(
        records(
            {"image": b"\x08a", "text": "lost"},
            {"image": b"\x02a", "text": "kept"},
        )
    )
    assert found.status.tolist() == [RecordStatus.TOO_LARGE, RecordStatus.OK]
    assert bytes(found.tokens[found.tokens < 256].astype(np.uint8)) == b"kept"


def test_a_text_that_spells_a_placeholder_is_a_fault() -> None:
    rule = replace(RULE, placeholder_id=120)  # the byte "x"
    made = replace(encoder(SampleRecipe(image_field="image")), media=(rule,))
    found = made.encode(
        records({"image": b"\x02a", "text": "an x"}, {"image": b"\x02a", "text": "none"})
    )
    assert found.status.tolist() == [RecordStatus.FIELD_MISSING, RecordStatus.OK]
    assert "spells the token of image (120)" in found.faults[0][1].text


def test_a_transform_gives_none_one_or_many() -> None:
    def transform(sample: Mapping[str, Any], key: int) -> list[Mapping[str, Any]]:
        if sample["text"] == "error":
            raise TransformError("user code", cause="raised")
        return [{"text": word} for word in sample["text"].split()]

    made = encoder(SampleRecipe(where="x"), transform=transform)
    found = made.encode(records({"text": "a bc"}, {"text": " "}, {"text": "error"}, {"text": "d"}))
    assert found.status.tolist() == [
        RecordStatus.OK,
        RecordStatus.TRANSFORMED_AWAY,
        RecordStatus.TRANSFORM_FAILED,
        RecordStatus.OK,
    ]
    assert shown(found, 0) == [257, 97, 256, 257, 98, 99, 256]
    assert found.marks is not None
    assert found.marks.table.tolist() == [[MARK_SAMPLE, 3, 0, 0]]
    assert found.tokens.dtype == np.uint16


def test_random_keys_differ_by_record_and_block_and_not_by_batch() -> None:
    seen: list[int] = []

    def transform(sample: Mapping[str, Any], key: int) -> list[Mapping[str, Any]]:
        seen.append(key)
        return [sample]

    made = encoder(SampleRecipe(where="x"), transform=transform)
    two = records({"text": "a"}, {"text": "b"})
    made.at("/p", "row", 5).encode(two)
    for record in two:
        made.at("/p", "row", 5).encode([record])
    made.at("/p", "row", 6).encode(two)
    assert seen[:2] == seen[2:4]
    assert len(set(seen)) == 4


def test_a_chat_trains_answers_alone_and_spreads_its_image() -> None:
    def chat(view: Any) -> tuple[Any, Any]:
        ids = np.array([10, PAD, 11, 12, 13], np.int64)
        trained = np.array([0, 0, 0, view["trained"], view["trained"]], np.bool_)
        return ids, trained

    recipe = SampleRecipe(chat=ChatRule(), image_field="image")
    made = encoder(recipe, chat=chat)
    found = made.encode(
        records(
            {"image": b"\x04z", "trained": True},
            {"image": b"\x04z", "trained": False},
            {"image": [b"\x04z", b"\x04z"], "trained": True},
        )
    )
    assert shown(found, 0) == ["-10", "-300", "-300", "-11", 12, 13]
    assert found.status.tolist() == [
        RecordStatus.OK,
        RecordStatus.UNTRAINED,
        RecordStatus.FIELD_MISSING,
    ]
    assert found.marks is not None
    assert found.marks.table.tolist() == [
        [MARK_UNTRAINED, 0, 1, 0],
        [0, 1, 2, 4],
        [MARK_UNTRAINED, 3, 1, 0],
    ]


def test_user_fields_of_samples() -> None:
    fields = (
        FieldRule("adv", "adv", "token", fill=-1),
        FieldRule("score", "score", "segment"),
    )
    made = encoder(SampleRecipe(where="x"), fields=fields)
    found = made.encode(
        records(
            {"text": "ab", "adv": [1, 2], "score": 0.5},
            {"text": "ab", "adv": [1], "score": 0.5},
            {"text": "c", "adv": [3], "score": 0.25},
        )
    )
    assert found.status.tolist() == [0, RecordStatus.FIELD_MISSING, 0]
    assert found.columns[0].array.tolist() == [-1, 1, 2, -1, -1, 3, -1]
    assert found.columns[1].array.tolist() == [0.5, 0.0, 0.25]


def test_no_record_at_all_has_columns_of_the_right_kinds() -> None:
    found = encoder(SampleRecipe(image_field="image")).encode([])
    assert len(found) == 0
    assert found.media[0].items.shape == (0, 6)


@pytest.mark.parametrize("part", ["held_out", "train"])
def test_hold_out_by_key_splits_the_records(part: str) -> None:
    made = encoder(SampleRecipe(where="x"))
    spec = replace(made.spec, hold_out=0.5, part=part, key_field="id")  # type: ignore[arg-type]
    lines = [{"id": f"k{n}", "text": "t"} for n in range(64)]
    status = replace(made, spec=spec).encode(records(*lines)).status
    assert set(status.tolist()) == {RecordStatus.OK, RecordStatus.HELD_OUT}
    other = replace(made.spec, hold_out=0.5, part="all", key_field="id")
    assert not replace(made, spec=other).encode(records(*lines)).status.any()


def test_counts_of_filters_are_the_same_in_both_parts() -> None:
    """Parquet asks `where` before a record is made, so no format may ask hold-out first."""
    made = encoder(SampleRecipe(where="x"), where=lambda view: view["n"] % 3 > 0)
    lines = [{"id": f"k{n}", "text": "t", "n": n} for n in range(60)]
    for part in ("train", "held_out"):
        spec = replace(made.spec, hold_out=0.5, part=part, key_field="id")  # type: ignore[arg-type]
        status = replace(made, spec=spec).encode(records(*lines)).status.tolist()
        assert status.count(RecordStatus.FILTERED) == 20
        assert status[0::3] == [RecordStatus.FILTERED] * 20
