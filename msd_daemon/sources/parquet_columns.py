"""Which columns of a parquet source are read, of which types, and what is in a batch of them.

Lists come as offsets and values, whole columns at a time; a fault belongs to its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.job import FieldRule, SourceSpec
from msd_daemon.shm.field_layout import ValueArray, value_dtype
from msd_daemon.sources.field_numbers import fit_numbers, shown, unknown_id
from msd_daemon.sources.json_text import FIELD_JOIN

COLUMNS_SHOWN_MAX = 12


class ColumnKind(Enum):
    """What a column has to hold; the value says it to people."""

    TEXT = "text"
    IDS = "lists of token ids"
    KEY = "text or integers"
    NUMBER = "numbers"
    INTEGER = "integers"
    NUMBERS = "lists of numbers"
    INTEGERS = "lists of integers"


@dataclass(frozen=True)
class WantedColumn:
    """A column that a job reads."""

    name: str
    kind: ColumnKind


def wanted_columns(spec: SourceSpec, fields: tuple[FieldRule, ...]) -> list[WantedColumn]:
    """Return the columns that a source's records are made of."""
    if spec.tokens_field:
        wanted = [WantedColumn(spec.tokens_field, ColumnKind.IDS)]
    else:
        names = spec.text_field.split(FIELD_JOIN)
        wanted = [WantedColumn(name, ColumnKind.TEXT) for name in names]
    if spec.key_field and spec.hold_out > 0:
        wanted.append(WantedColumn(spec.key_field, ColumnKind.KEY))
    return wanted + [WantedColumn(rule.from_field, field_kind(rule)) for rule in fields]


def field_kind(rule: FieldRule) -> ColumnKind:
    """Return what the column of a user field has to hold."""
    is_integer = value_dtype(rule).kind == "i"
    if rule.per == "token":
        return ColumnKind.INTEGERS if is_integer else ColumnKind.NUMBERS
    return ColumnKind.INTEGER if is_integer else ColumnKind.NUMBER


def column_fault(arrow: Any, schema: Any, wanted: Iterable[WantedColumn]) -> str:
    """Return what is wrong with the first column that is not there as wanted, else nothing.

    Args:
        arrow: The module pyarrow.
        schema: Of the file.
        wanted: The columns.
    """
    for column in wanted:
        places = schema.get_all_field_indices(column.name)
        if len(places) != 1:
            have = ", ".join(schema.names[:COLUMNS_SHOWN_MAX])
            return f"column {column.name!r} is there {len(places)} times; columns: {have}"
        kind = schema.field(places[0]).type
        if not _holds(arrow.types, kind, column.kind):
            return f"column {column.name!r} holds {kind}, not {column.kind.value}"
    return ""


def _holds(types: Any, kind: Any, wanted: ColumnKind) -> bool:
    if wanted in (ColumnKind.IDS, ColumnKind.NUMBERS, ColumnKind.INTEGERS):
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            return False
        kind = kind.value_type
    if wanted in (ColumnKind.TEXT, ColumnKind.KEY):
        if types.is_dictionary(kind):
            kind = kind.value_type
        return _is_text(types, kind) or (wanted is ColumnKind.KEY and types.is_integer(kind))
    is_integer: bool = types.is_integer(kind)
    takes_floats = wanted in (ColumnKind.NUMBER, ColumnKind.NUMBERS)
    return is_integer or (takes_floats and types.is_floating(kind))


def _is_text(types: Any, kind: Any) -> bool:
    checks = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
    )
    return any(check(kind) for check in checks)


def text_values(arrow: Any, column: Any) -> list[bytes | None]:
    """Return the bytes of a column of texts; an integer is its digits."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_integer(column.type):
        column = column.cast(arrow.large_string())
    # As bytes, since pyarrow would stop at the first row that is not UTF-8.
    values: list[bytes | None] = column.cast(arrow.large_binary()).to_pylist()
    return values


@dataclass
class NumberRows:
    """Numbers of a batch: of each row a run of them, and what is wrong with a row."""

    counts: npt.NDArray[np.int64]
    """Shape (rows,); 0 where the row is null."""
    values: ValueArray
    """Of all rows in order. Shape (sum of counts,)."""
    is_null: npt.NDArray[np.bool_]
    """Shape (rows,)."""
    faults: dict[int, str] = field(default_factory=dict)
    """By row; its values are there all the same."""

    def offsets(self) -> npt.NDArray[np.int64]:
        """Return the first value of each row, and their number at the end. Shape (rows + 1,)."""
        offsets = np.zeros(len(self.counts) + 1, dtype=np.int64)
        np.cumsum(self.counts, out=offsets[1:])
        return offsets


def field_rows(arrow: Any, column: Any, rule: FieldRule) -> NumberRows:
    """Return the values of a user field, as its dtype.

    Args:
        arrow: The module pyarrow.
        column: The column's array, of a type that `column_fault` let pass.
        rule: The field.
    """
    is_listed = rule.per == "token"
    rows, is_missing = _read_rows(arrow, column, is_listed=is_listed)
    values = rows.values
    fitted, is_unfit = fit_numbers(values, value_dtype(rule))
    rows.values = fitted
    name = rule.from_field
    for row, place, at in _firsts(rows, is_unfit | is_missing):
        value = None if is_missing[at] else values[at].item()
        where = f" at {place}" if is_listed else ""
        rows.faults[row] = f"column {name!r} holds {shown(value)}{where}, no {rule.dtype}"
    rows.faults |= _null_faults(rows, name)
    return rows


def id_rows(arrow: Any, column: Any, name: str, vocabulary_count: int) -> NumberRows:
    """Return the ids of a column of lists, in its own integer type.

    Args:
        arrow: The module pyarrow.
        column: The column's array, of a type that `column_fault` let pass.
        name: Of the column.
        vocabulary_count: Ids are below it.
    """
    rows, is_missing = _read_rows(arrow, column, is_listed=True)
    values = rows.values
    is_inside = not len(values) or (int(values.min()) >= 0 and int(values.max()) < vocabulary_count)
    if not is_inside or is_missing.any():
        is_bad = is_missing | (values < 0) | (values >= vocabulary_count)
        for row, place, at in _firsts(rows, is_bad):
            value = None if is_missing[at] else values[at].item()
            rows.faults[row] = f"column {name!r} {unknown_id(value, place, vocabulary_count)}"
    rows.faults |= _null_faults(rows, name)
    return rows


def _read_rows(
    arrow: Any, column: Any, *, is_listed: bool
) -> tuple[NumberRows, npt.NDArray[np.bool_]]:
    """Return a column's numbers, nulls as 0, and which single values of lists are null."""
    is_null = _nulls(column)
    if not is_listed:
        values = column.fill_null(0) if column.null_count else column
        rows = NumberRows(
            np.ones(len(column), dtype=np.int64), values.to_numpy(zero_copy_only=False), is_null
        )
        return rows, np.zeros(len(column), dtype=np.bool_)
    counts = _list_counts(arrow, column)
    counts[is_null] = 0
    flat = column.flatten()  # leaves out what lies under null rows
    is_missing = _nulls(flat)
    if flat.null_count:
        flat = flat.fill_null(0)
    return NumberRows(counts, flat.to_numpy(zero_copy_only=False), is_null), is_missing


def _nulls(column: Any) -> npt.NDArray[np.bool_]:
    if not column.null_count:
        return np.zeros(len(column), dtype=np.bool_)
    nulls: npt.NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _list_counts(arrow: Any, column: Any) -> npt.NDArray[np.int64]:
    if arrow.types.is_fixed_size_list(column.type):
        return np.full(len(column), column.type.list_size, dtype=np.int64)
    counts: npt.NDArray[np.int64] = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return counts


def _firsts(rows: NumberRows, is_bad: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield the first bad value of each row: (row, place in the row, place among all)."""
    bad = np.flatnonzero(is_bad)
    if not len(bad):
        return
    offsets = rows.offsets()
    found, first = np.unique(np.searchsorted(offsets, bad, side="right") - 1, return_index=True)
    for row, at in zip(found.tolist(), bad[first].tolist(), strict=True):
        yield row, at - int(offsets[row]), at


def _null_faults(rows: NumberRows, name: str) -> dict[int, str]:
    return {int(row): f"column {name!r} is null" for row in np.flatnonzero(rows.is_null)}
