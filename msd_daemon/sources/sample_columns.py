"""Samples as columns: values of the job's user fields, and media. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule
from msd_daemon.shm.media_layout import ITEM_COLUMNS, MediaColumn
from msd_daemon.sources.field_numbers import UnfitValueError, json_value
from msd_daemon.sources.field_view import FieldView
from msd_daemon.sources.record import FieldValue
from msd_daemon.sources.record_encoder import unequal_counts
from msd_daemon.sources.record_fault import RecordFault, missing
from msd_daemon.sources.sample_tokens import SampleTokens


def field_values(
    rules: Sequence[FieldRule],
    views: Sequence[FieldView],
    tokens: SampleTokens,
    added: tuple[int, int],
) -> list[FieldValue]:
    """Return a record's value of each user field.

    Args:
        rules: The fields.
        views: Fields of each of the record's samples.
        tokens: Of all of them.
        added: Ids that stand before and behind the tokens that a list has values for.

    Raises:
        RecordFault: A value is absent or does not fit, or the samples of the record differ in it.
    """
    values: list[FieldValue] = []
    for rule in rules:
        own = [_value_of(view, rule) for view in views]
        if rule.per == "token":
            if len(own) > 1 or tokens.marks:
                raise missing(
                    f"field {rule.from_field!r} has a value per token, the record is more than "
                    "one text"
                )
            expected = len(tokens.ids) - sum(added)
            if np.size(own[0]) != expected:
                raise missing(unequal_counts(rule, int(np.size(own[0])), expected))
        elif any(value != own[0] for value in own):
            raise RecordFault(
                RecordStatus.TRANSFORM_FAILED,
                f"field {rule.from_field!r} differs between the samples of one record",
            )
        values.append(own[0])
    return values


def media_columns(samples: Sequence[SampleTokens | None], kinds: int) -> tuple[MediaColumn, ...]:
    """Return the media of records, one column for each of the job's rules.

    Args:
        samples: Of each record; None where it is no sample.
        kinds: Number of rules.
    """
    return tuple(_media_column(samples, kind) for kind in range(kinds))


def _media_column(samples: Sequence[SampleTokens | None], kind: int) -> MediaColumn:
    own = [
        [] if one is None else [item for item in one.items if item[0] == kind] for one in samples
    ]
    lines = [line for items in own for _, line, _ in items]
    return MediaColumn(
        np.array([len(items) for items in own], np.int32),
        np.array(lines, np.int32).reshape(-1, len(ITEM_COLUMNS)),
        [data for items in own for _, _, data in items],
    )


def _value_of(view: FieldView, rule: FieldRule) -> FieldValue:
    name = rule.from_field
    value = view.get(name)
    if value is None:
        raise missing(f"field {name!r} is {'null' if name in view else 'absent'}")
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    try:
        return json_value(value, rule)
    except UnfitValueError as error:
        raise missing(f"field {name!r} {error}") from None
