"""`where` on rows, on columns and in plain Python is one and the same, statistics too."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.chunk import RecordStatus
from msd_daemon.sources.parquet_file import arrow_modules
from msd_daemon.sources.where import compile_where
from msd_daemon.sources.where_arrow import column_filter
from tests.support.records import read_rows

SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("s", pa.int8()),
        ("f", pa.float64()),
        ("g", pa.float32()),
        ("t", pa.string()),
        ("b", pa.bool_()),
        ("m", pa.struct([("x", pa.int32()), ("y", pa.large_string())])),
        ("n", pa.list_(pa.int64())),
    ]
)
INTS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 0.5, 2.5]), st.floats(allow_nan=True))
TEXTS = st.one_of(st.sampled_from(["", "a", "ab", "é", "\U0001f600"]), st.text(max_size=3))
ROWS = st.fixed_dictionaries(
    {
        "i": st.none() | INTS,
        "s": st.none() | st.integers(-128, 127),
        "f": st.none() | FLOATS,
        "g": st.none() | st.floats(width=32, allow_nan=True),
        "t": st.none() | TEXTS,
        "b": st.none() | st.booleans(),
        "m": st.none()
        | st.fixed_dictionaries({"x": st.none() | st.integers(-9, 9), "y": st.none() | TEXTS}),
        "n": st.none() | st.lists(st.integers(-2, 2), max_size=3),
    }
)
NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(-(2**65), 2**65), FLOATS.filter(lambda x: x == x)
)


def shown(value: object) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "1e999" if value > 0 else "-1e999"
    return repr(value)


def comparison(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    operators = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    return st.builds(
        lambda operator, value, flip: (
            f"{shown(value)} {operator} {name}" if flip else f"{name} {operator} {shown(value)}"
        ),
        operators,
        values,
        st.booleans(),
    )


LISTED_TEXTS = st.lists(TEXTS, min_size=1, max_size=4)
LEAVES = st.one_of(
    *(comparison(name, NUMBERS) for name in ("i", "s", "f", "g", "m.x", "len(t)", "len(n)")),
    comparison("t", TEXTS),
    comparison("m.y", TEXTS),
    st.builds(lambda value: f"b == {value}", st.booleans()),
    st.just("b"),
    st.sampled_from([f"{name} is None" for name in "isfgtbmn"] + ["m.x is not None", "zz is None"]),
    st.builds(lambda values: f"t in {tuple(values)!r}", LISTED_TEXTS),
    st.builds(lambda values: f"t not in {values!r}", LISTED_TEXTS),
    st.builds(
        lambda name, values: f"{name} in [{', '.join(map(shown, values))}]",
        st.sampled_from(["i", "s", "f"]),
        st.lists(NUMBERS, min_size=1, max_size=4),
    ),
    st.builds(lambda text: f"t.startswith({text!r})", TEXTS),
    st.builds(lambda text: f"endswith(t, {text!r})", TEXTS),
    st.builds(lambda text: f"lower(t) == {text!r}", TEXTS),
    comparison("i + s", NUMBERS),
    comparison("number(i)", NUMBERS),
)


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds(lambda part: f"not ({part})", parts),
        st.builds(lambda a, b: f"({a}) and ({b})", parts, parts),
        st.builds(lambda a, b: f"({a}) or ({b})", parts, parts),
    )


EXPRESSIONS = st.recursive(LEAVES, joined, max_leaves=5)


def plain_python(text: str, row: dict[str, Any]) -> bool:
    """Return what Python's own eval gives, with null made of its own kind."""

    class Null:
        def _false(self, *_: object) -> Any:
            return False

        __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _false  # type: ignore[assignment]
        __bool__ = _false
        __hash__ = None  # type: ignore[assignment]

        def _null(self, *_: object) -> Any:
            return self

        __add__ = __radd__ = _null

    null = Null()

    def wrap(value: Any) -> Any:
        return null if value is None else value

    class Nested:
        def __init__(self, value: dict[str, Any] | None) -> None:
            self._value = value

        def __getattr__(self, name: str) -> Any:
            return wrap((self._value or {}).get(name))

    def call(function: Any) -> Any:
        return lambda *values: null if any(v is null for v in values) else function(*values)

    names: dict[str, Any] = {key: wrap(value) for key, value in row.items()}
    names |= {
        "m": Nested(row["m"]),
        "len": call(len),
        "lower": call(str.lower),
        "number": call(int),
        "zz": null,
    }
    names["endswith"] = call(str.endswith)
    names["startswith"] = call(str.startswith)
    text = text.replace("t.startswith(", "startswith(t, ")
    for name in (*(f"{key}" for key in "isfgtbn"), "m.x", "zz"):
        text = text.replace(f"{name} is None", f"isnull({name})")
        text = text.replace(f"{name} is not None", f"not isnull({name})")
    text = text.replace("m is None", "mnull")
    names |= {"isnull": lambda value: value is null, "mnull": row["m"] is None}
    if row["t"] is None:
        text = text.replace("t not in", "[] in")
    return bool(eval(text, {"__builtins__": {}}, names))


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS, st.lists(ROWS, min_size=1, max_size=6))
def test_rows_columns_and_python_agree(text: str, rows: list[dict[str, Any]]) -> None:
    where = compile_where(text)
    expected = [where(row) for row in rows]
    arrow, _ = arrow_modules()
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    condition = column_filter(where, arrow, SCHEMA)
    mask = condition.mask(batch).tolist()
    rest = condition.rest
    assert [
        m and (rest is None or rest(row)) for m, row in zip(mask, rows, strict=True)
    ] == expected
    assert [plain_python(text, row) for row in rows] == expected


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, st.lists(ROWS, min_size=1, max_size=12))
def test_parquet_keeps_the_same_rows(text: str, rows: list[dict[str, Any]]) -> None:
    where = compile_where(text)
    table = pa.Table.from_pylist(
        [{**row, "k": n} for n, row in enumerate(rows)], SCHEMA.append(pa.field("k", pa.int64()))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.parquet")
        pq.write_table(table, path, row_group_size=3)
        records = read_rows("parquet", path, ("k",), where=text)
    assert [record.status == RecordStatus.OK for record in records] == [where(r) for r in rows]
    kept = [record.fields["k"] for record in records if record.fields is not None]
    assert kept == [n for n, row in enumerate(rows) if where(row)]
