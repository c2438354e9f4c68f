"""The fields of a microbatch: places, sizes, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.contract.batch_spec import (
    FIELD_TABLE,
    LARGE_FIELD_BYTES,
    BatchSpec,
    field_table,
)
from msd_client.contract.errors import ConfigError


@given(
    st.integers(1, 64),
    st.integers(1, 20_000),
    st.integers(1, 300),
    st.sampled_from(["int32", "int64"]),
    st.sampled_from(["int32", "int64"]),
)
def test_fields_are_aligned_disjoint_and_survive_the_wire(
    rows: int, row_tokens: int, per_row: int, token_dtype: str, label_dtype: str
) -> None:
    spec = BatchSpec.for_rule(
        rows=rows,
        row_tokens=row_tokens,
        row_segments_max=per_row,
        token_dtype=token_dtype,
        label_dtype=label_dtype,
        labels="aligned",
        documents="joined",
        pad_id=9,
    )
    end = 0
    for field in spec.fields:
        assert field.offset_bytes >= end
        assert field.offset_bytes % (4096 if field.nbytes_max >= LARGE_FIELD_BYTES else 128) == 0
        end = field.offset_bytes + field.nbytes_max
    assert spec.payload_bytes_max == end
    assert BatchSpec.decode(spec.encode()) == spec


def test_a_full_row_needs_no_room_for_padding() -> None:
    assert BatchSpec.for_rule(rows=2, row_tokens=4, row_segments_max=99).segments_max == 8
    assert BatchSpec.for_rule(rows=2, row_tokens=40, row_segments_max=3).segments_max == 8


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"row_tokens": 0},
        {"row_segments_max": 0},
        {"token_dtype": "float32"},
        {"label_dtype": "int16"},
        {"labels": "left"},
        {"documents": "glued"},
        {"rows": 1 << 16, "row_tokens": 1 << 16},
        {"rows": 1 << 10, "row_tokens": 1 << 20, "token_dtype": "int64"},
    ],
)
def test_impossible_rules_are_refused(change: dict[str, object]) -> None:
    rule: dict[str, object] = {"rows": 1, "row_tokens": 8, "row_segments_max": 4}
    with pytest.raises(ConfigError):
        BatchSpec.for_rule(**(rule | change))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", "2"),
        ("rows", 0),
        ("rows", True),
        ("segments_max", 3),
        ("segments_max", 0),
        ("labels", "left"),
        ("payload_bytes_max", 7),
    ],
)
def test_a_spec_that_does_not_add_up_is_refused(key: str, value: object) -> None:
    plain = BatchSpec.for_rule(rows=2, row_tokens=8, row_segments_max=4).encode()
    plain[key] = value
    with pytest.raises(ConfigError):
        BatchSpec.decode(plain)


@pytest.mark.parametrize("plain", [None, [], {}, {"rows": 1}])
def test_what_is_no_spec_is_refused(plain: object) -> None:
    with pytest.raises(ConfigError, match="expected the keys"):
        BatchSpec.decode(plain)


def test_the_table_for_people_names_every_field_of_a_slot() -> None:
    spec = BatchSpec.for_rule(rows=2, row_tokens=8, row_segments_max=4)
    table = field_table()
    assert {field.name for field in spec.fields} <= {line.name for line in FIELD_TABLE}
    assert all(f"| `{line.name}` |" in table for line in FIELD_TABLE)
