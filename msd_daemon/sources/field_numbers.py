"""Numbers of user fields: what a record gives, as the dtype that the job asks for, or a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.job import FieldRule
from msd_daemon.shm.field_layout import ValueArray, value_dtype
from msd_daemon.sources.record import FieldValue

SHOWN_CHARACTERS_MAX = 40
ID_COUNT_MAX = (1 << 31) - 1
"""Where no tokenizer tells how many ids there are: what chunks can hold."""


class UnfitValueError(ValueError):
    """A record's value is not what a field, a key or a list of ids takes; says what it is."""


def shown(value: object) -> str:
    """Return a value for people, cut."""
    text = repr(value)
    if len(text) > SHOWN_CHARACTERS_MAX:
        text = text[: SHOWN_CHARACTERS_MAX - 4] + " ..."
    return text


def kind_of(value: object) -> str:
    """Return what a JSON value is, for people."""
    return "null" if value is None else f"a {type(value).__name__}"


def fit_numbers(
    values: npt.NDArray[Any], dtype: np.dtype[Any]
) -> tuple[ValueArray, npt.NDArray[np.bool_]]:
    """Return values as a dtype, and which of them it cannot hold: not finite, out of range.

    Args:
        values: Integers, or floats where the dtype is one. Any shape.
        dtype: float32, float64, int32 or int64.
    """
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            fitted = values.astype(dtype)
        return fitted, ~np.isfinite(fitted)
    limits = np.iinfo(dtype)
    return values.astype(dtype), (values < limits.min) | (values > limits.max)


def json_value(value: object, field: FieldRule) -> FieldValue:
    """Return a field's value of one JSON record.

    Raises:
        UnfitValueError: It is no number or list of numbers, or one does not fit the dtype.
    """
    if field.per == "token":
        if not isinstance(value, list):
            raise UnfitValueError(f"is {kind_of(value)}, not a list of numbers")
        return _fit_all(value, field)
    fitted: float = _fit_all([value], field)[0].item()
    return fitted


def _fit_all(values: list[Any], field: FieldRule) -> ValueArray:
    dtype = value_dtype(field)
    taken = {int, float} if dtype.kind == "f" else {int}
    if not taken.issuperset(map(type, values)):
        place = next(at for at, value in enumerate(values) if type(value) not in taken)
        what = "a number" if dtype.kind == "f" else "an integer"
        raise UnfitValueError(_place(field, place, values[place], f"not {what}"))
    try:
        numbers = np.array(values, dtype=np.float64 if dtype.kind == "f" else np.int64)
    except OverflowError:
        place = next(at for at, value in enumerate(values) if abs(value) >= 1 << 63)
        raise UnfitValueError(_place(field, place, values[place], f"no {field.dtype}")) from None
    fitted, is_unfit = fit_numbers(numbers, dtype)
    if is_unfit.any():
        place = int(np.flatnonzero(is_unfit)[0])
        raise UnfitValueError(_place(field, place, values[place], f"no {field.dtype}"))
    return fitted


def _place(field: FieldRule, place: int, value: object, what: str) -> str:
    where = f" at {place}" if field.per == "token" else ""
    return f"holds {shown(value)}{where}, {what}"


def json_ids(value: object, vocabulary_count: int) -> npt.NDArray[np.int64]:
    """Return the token ids of one JSON record.

    Raises:
        UnfitValueError: It is no list of integers, or one is outside the vocabulary.
    """
    if not isinstance(value, list):
        raise UnfitValueError(f"is {kind_of(value)}, not a list of ids")
    if not {int}.issuperset(map(type, value)):
        place = next(at for at, item in enumerate(value) if type(item) is not int)
        raise UnfitValueError(f"holds {shown(value[place])} at {place}, not an integer")
    try:
        ids = np.array(value, dtype=np.int64)
        is_inside = not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocabulary_count)
    except OverflowError:
        is_inside = False
    if not is_inside:
        place = next(at for at, item in enumerate(value) if not 0 <= item < vocabulary_count)
        raise UnfitValueError(unknown_id(value[place], place, vocabulary_count))
    return ids


def ids_of(value: object, vocabulary_count: int) -> npt.NDArray[np.int64]:
    """Return the token ids of a list or array.

    Raises:
        UnfitValueError: It is neither, holds others than integers, or one outside the vocabulary.
    """
    if not isinstance(value, np.ndarray):
        return json_ids(value, vocabulary_count)
    if value.ndim != 1 or value.dtype.kind not in "iu":
        raise UnfitValueError(f"is an array of {value.dtype} {list(value.shape)}, not ids in a row")
    if len(value):
        for worst in (int(value.min()), int(value.max())):
            if not 0 <= worst < vocabulary_count:
                place = int(np.flatnonzero(value == worst)[0])
                raise UnfitValueError(unknown_id(worst, place, vocabulary_count))
    return value.astype(np.int64)


def unknown_id(value: object, place: int, vocabulary_count: int) -> str:
    """Return what is wrong with an id outside the vocabulary."""
    return f"holds {shown(value)} at {place}, ids go from 0 to {vocabulary_count - 1}"
