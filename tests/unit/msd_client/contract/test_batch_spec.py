"""The fields of a microbatch: places, sizes, stages, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.context_parallel import CP_LAYOUTS
from msd_client.contract.errors import ConfigError, MeshMismatchError
from msd_client.contract.field_table import FIELD_TABLE, field_table
from msd_client.contract.ring_layout import TocField, encode_table
from msd_client.contract.slot_fields import LARGE_FIELD_BYTES
from msd_client.contract.user_fields import USER_FIELD_NAME_BYTES_MAX, USER_FIELDS_MAX, UserField

MICROBATCH_TOKENS_MAX = 1 << 25
"""A slot with all fields has room for these at the widest."""
DOCS = Path(__file__).parents[4] / "docs" / "fields.md"
USERS = (
    UserField("advantage", "token", "float32", 0.0),
    UserField("quality", "segment", "float64", -1.0),
    UserField("group", "row", "int64", -1),
)


@st.composite
def specs(draw: st.DrawFn) -> BatchSpec:
    cp_count = draw(st.sampled_from([1, 2, 4, 8]))
    multiple = draw(st.sampled_from([1, 2 * cp_count, 16 * cp_count]))
    layout = draw(st.sampled_from(CP_LAYOUTS))
    if multiple == 1 and cp_count > 1 and layout == "zigzag_document":
        multiple = 2 * cp_count
    ignore = draw(st.sampled_from(["label", "loss_mask"]))
    has_weights = ignore == "loss_mask" or draw(st.booleans())
    rows, unit = draw(st.integers(1, 64)), 2 * cp_count * multiple
    factor_max = min(2_000, MICROBATCH_TOKENS_MAX // (rows * unit))
    return BatchSpec.for_rule(
        rows=rows,
        row_tokens=unit * draw(st.integers(1, factor_max)),
        row_segments_max=draw(st.integers(1, 300)),
        token_dtype=draw(st.sampled_from(["int32", "int64"])),
        label_dtype=draw(st.sampled_from(["int32", "int64"])),
        labels=draw(st.sampled_from(["shifted", "aligned"])),
        documents=draw(st.sampled_from(["separate", "joined"])),
        ignore=ignore,
        pad_id=9,
        segment_multiple=multiple,
        boundaries=draw(st.sampled_from(["exact", "constant"])),
        cp_count=cp_count,
        cp_layout=layout,
        stage=draw(st.sampled_from(["all", "first", "middle", "last"])),
        is_mtp=draw(st.booleans()),
        source_weights=(1.0, 0.5, 0.0) if has_weights else (),
        user_fields=draw(st.sampled_from([(), USERS])),
    )


@given(specs())
def test_fields_are_aligned_disjoint_and_survive_the_wire(spec: BatchSpec) -> None:
    end = 0
    for field in spec.fields:
        assert field.offset_bytes >= end
        assert field.offset_bytes % (4096 if field.nbytes_max >= LARGE_FIELD_BYTES else 128) == 0
        assert field.nbytes_max == np.dtype(field.dtype).itemsize * np.prod(field.shape_max)
        end = field.offset_bytes + field.nbytes_max
    assert spec.payload_bytes_max == end
    assert BatchSpec.decode(spec.encode()) == spec
    extents = [field.extent for field in spec.fields]
    assert extents == sorted(extents, key=lambda extent: extent != "token"), "token fields first"


@given(specs(), st.integers(1, 50))
def test_another_row_length_changes_nothing_but_sizes(spec: BatchSpec, factor: int) -> None:
    row_tokens = 2 * spec.cp_count * spec.segment_multiple * factor
    assume(spec.rows * row_tokens <= MICROBATCH_TOKENS_MAX)
    other = spec.at(row_tokens)
    assert other.at(spec.row_tokens) == spec
    assert spec.at(spec.row_tokens) is spec
    assert other.row_tokens == row_tokens
    assert [f.name for f in other.fields] == [f.name for f in spec.fields]
    token_fields = [f for f in other.fields if f.extent == "token"]
    assert all(np.prod(f.shape_max) == spec.rows * row_tokens for f in token_fields)


def test_a_full_row_needs_no_room_for_padding() -> None:
    assert BatchSpec.for_rule(rows=2, row_tokens=4, row_segments_max=99).segments_max == 8
    assert BatchSpec.for_rule(rows=2, row_tokens=40, row_segments_max=3).segments_max == 8
    padded = BatchSpec.for_rule(rows=2, row_tokens=40, row_segments_max=99, segment_multiple=8)
    assert padded.segments_max == 10


BOUNDARY_FIELDS = ["cu_seqlens", "cu_seqlens_padded", "segment_source", "quality", "group"]


@pytest.mark.parametrize(
    ("stage", "is_mtp", "token_fields"),
    [
        ("all", False, ["tokens", "labels", "position_ids", "loss_weights", "advantage"]),
        ("first", True, ["tokens", "position_ids", "advantage"]),
        ("middle", True, []),
        ("last", False, ["labels", "position_ids", "loss_weights", "advantage"]),
        ("last", True, ["tokens", "labels", "position_ids", "loss_weights", "advantage"]),
    ],
)
def test_stages_have_what_they_read_and_no_more(
    stage: str, is_mtp: bool, token_fields: list[str]
) -> None:
    spec = BatchSpec.for_rule(
        rows=2,
        row_tokens=8,
        row_segments_max=4,
        segment_multiple=4,
        stage=stage,
        is_mtp=is_mtp,
        source_weights=(1.0, 0.5),
        user_fields=USERS,
    )
    assert [field.name for field in spec.fields] == token_fields + BOUNDARY_FIELDS
    if stage == "middle":
        assert spec.payload_bytes_max < 128 * 5


def test_context_parallel_fields_lie_rank_by_rank() -> None:
    spec = BatchSpec.for_rule(rows=3, row_tokens=16, row_segments_max=4, cp_count=4)
    assert spec.field("tokens").shape_max == (4, 3, 4)
    assert spec.scratch_bytes == 3 * 16 * (4 + 8 + 4)
    assert spec.field("cu_seqlens").shape_max == (3 * 5 + 1,)
    assert BatchSpec.for_rule(rows=3, row_tokens=16, row_segments_max=4).scratch_bytes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"row_tokens": 0}, "row_tokens is 0"),
        ({"row_segments_max": 0}, "row_segments_max is 0"),
        ({"token_dtype": "float32"}, "token_dtype 'float32'"),
        ({"label_dtype": "int16"}, "label_dtype 'int16'"),
        ({"labels": "left"}, "labels 'left'"),
        ({"documents": "glued"}, "documents 'glued'"),
        ({"ignore": "zero"}, "ignore 'zero'"),
        ({"boundaries": "loose"}, "boundaries 'loose'"),
        ({"cp_layout": "spiral"}, "cp_layout 'spiral'"),
        ({"stage": "second"}, "stage 'second'"),
        ({"segment_multiple": 0}, "segment_multiple is 0"),
        ({"segment_multiple": 3}, "no multiple of segment_multiple 3"),
        ({"cp_count": 0}, "cp_count is 0"),
        ({"ignore": "loss_mask"}, "loss weight of every source"),
        ({"source_weights": (1.0, -1.0)}, "loss weight -1.0 of source 1"),
        ({"source_weights": (float("nan"),)}, "loss weight nan"),
        ({"source_weights": (float("inf"),)}, "loss weight inf"),
        ({"source_weights": (1e-50,)}, "loss weight 1e-50 of source 0 is neither 0 nor within"),
        ({"rows": 1 << 16, "row_tokens": 1 << 16}, "int32 range"),
        ({"rows": 1 << 10, "row_tokens": 1 << 20, "token_dtype": "int64"}, "of a slot"),
        ({"user_fields": (UserField("tokens", "token", "int32", 0),)}, "'tokens' is taken"),
        ({"user_fields": (USERS[0], USERS[0])}, "'advantage' is taken"),
        ({"user_fields": (UserField("a b", "token", "int32", 0),)}, "'a b' is taken or no"),
        ({"user_fields": (UserField("a", "token", "int8", 0),)}, "dtype 'int8'"),
        ({"user_fields": (UserField("a", "word", "int32", 0),)}, "per 'word'"),
        ({"user_fields": (UserField("a", "row", "int32", 0.5),)}, "fill 0.5"),
        ({"user_fields": (UserField("a", "row", "int32", 1e10),)}, "fill 10000000000"),
        ({"user_fields": (UserField("a" * 65, "row", "int32", 0),)}, "longer than 64 bytes"),
        (
            {"user_fields": tuple(UserField(f"f{k}", "row", "int32", 0) for k in range(25))},
            "25 user fields, at most 24",
        ),
    ],
)
def test_impossible_rules_are_refused(change: dict[str, object], message: str) -> None:
    rule: dict[str, object] = {"rows": 1, "row_tokens": 8, "row_segments_max": 4}
    with pytest.raises(ConfigError, match=message):
        BatchSpec.for_rule(**(rule | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cp_count": 3}, "row_tokens 32 is no multiple"),
        ({"cp_count": 32}, "row_tokens 32 is no multiple of it: .* multiple of 64 or lower cp"),
        ({"cp_count": 5, "cp_layout": "contiguous"}, "into 5 parts, row_tokens 32"),
        ({"cp_count": 2, "cp_layout": "zigzag_document"}, "segment_multiple 1 is no multiple"),
        (
            {"cp_count": 8, "cp_layout": "zigzag_document", "segment_multiple": 8},
            "segment_multiple to a multiple of 16",
        ),
    ],
)
def test_a_degree_that_cannot_cut_the_rows_is_refused_with_the_numbers(
    change: dict[str, object], message: str
) -> None:
    rule: dict[str, object] = {"rows": 1, "row_tokens": 32, "row_segments_max": 4}
    with pytest.raises(MeshMismatchError, match=message):
        BatchSpec.for_rule(**(rule | change))
    assert BatchSpec.for_rule(**(rule | change | {"cp_count": 1})).cp_count == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", "2"),
        ("rows", 0),
        ("rows", True),
        ("row_segments_max", 0),
        ("row_segments_max", 1),
        ("labels", "left"),
        ("labels", None),
        ("is_mtp", 1),
        ("source_weights", 1.0),
        ("source_weights", ["1"]),
        ("user_fields", [{"name": "a"}]),
        ("user_fields", [["a", "row", "int32", 0.0]]),
        ("payload_bytes_max", 7),
    ],
)
def test_a_spec_that_does_not_add_up_is_refused(key: str, value: object) -> None:
    plain = BatchSpec.for_rule(
        rows=2, row_tokens=8, row_segments_max=99, source_weights=(1.0,), user_fields=USERS
    ).encode()
    if key == "row_segments_max" and value == 1:
        plain["rows"] = 64  # other sums than the sender's
    plain[key] = value
    with pytest.raises(ConfigError):
        BatchSpec.decode(plain)


@pytest.mark.parametrize("plain", [None, [], {}, {"rows": 1}])
def test_what_is_no_spec_is_refused(plain: object) -> None:
    with pytest.raises(ConfigError, match="expected the keys"):
        BatchSpec.decode(plain)


@pytest.mark.parametrize("name", ["stage", "user_fields", "payload_bytes_max"])
def test_a_spec_with_a_key_too_few_or_too_many_is_refused(name: str) -> None:
    plain = BatchSpec.for_rule(rows=2, row_tokens=8, row_segments_max=4).encode()
    with pytest.raises(ConfigError, match="expected the keys"):
        BatchSpec.decode({key: value for key, value in plain.items() if key != name})
    with pytest.raises(ConfigError, match="expected the keys"):
        BatchSpec.decode(plain | {"fields": []})


def test_the_largest_field_table_fits_its_page() -> None:
    name = "x" * (USER_FIELD_NAME_BYTES_MAX - 2)
    users = tuple(
        UserField(f"{name}{k:02}", "token", "float64", 0.0) for k in range(USER_FIELDS_MAX)
    )
    spec = BatchSpec.for_rule(
        rows=1 << 4,
        row_tokens=1 << 16,
        row_segments_max=1 << 15,
        segment_multiple=16,
        cp_count=8,
        source_weights=(1.0,),
        user_fields=users,
    )
    big = 1 << 40
    table = [TocField(f.name, f.dtype, f.shape_max, big, big) for f in spec.fields]
    scalars = {line.name: big for line in FIELD_TABLE if line.dtype == "int"}
    encode_table(table, scalars)


def test_the_table_for_people_names_every_field_of_a_slot() -> None:
    spec = BatchSpec.for_rule(
        rows=2, row_tokens=8, row_segments_max=4, segment_multiple=2, source_weights=(1.0,)
    )
    table = field_table()
    assert {field.name for field in spec.fields} <= {line.name for line in FIELD_TABLE}
    assert all(f"| `{line.name}` |" in table for line in FIELD_TABLE)


def test_the_manual_has_this_table() -> None:
    text = DOCS.read_text()
    assert field_table() in text, "make it again: see the first lines of docs/fields.md"
    assert text.count("\n|") == field_table().count("\n"), "and no other one"
