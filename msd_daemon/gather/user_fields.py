"""Gathers the values of user fields from the pool into a microbatch, beside the tokens (E10).

Owns no buffer and knows no job: which fields there are, where segments lie and where values go is
told. A chunk without fields (a source of a format that has none) gives each field's fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.user_fields import UserField
from msd_daemon.gather.segment_chunks import (
    Places,
    by_chunk,
    checked_numbers,
    flat_places,
    open_chunk,
    token_starts,
)
from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.shm.field_layout import ValueArray

Array = npt.NDArray[Any]


def gather_fields(
    pool: memoryview,
    segments: SegmentColumns,
    fields: tuple[UserField, ...],
    shape: tuple[int, int],
    segment_numbers: npt.NDArray[np.int32],
    outputs: Mapping[str, Array],
) -> None:
    """Write the values of user fields of one microbatch; every output is wholly written.

    After an error the outputs hold parts of both; abort the slot. Does not block.

    Args:
        pool: The mapped pool, chunks as in `msd_daemon.shm.chunk_layout`.
        segments: Sorted by (row, column), no overlap.
        fields: All fields of the job, in its order.
        shape: (rows, row_tokens).
        segment_numbers: Number of each segment in the microbatch, padding counted. Shape
            (segments,).
        outputs: Arrays by field name, of the field's dtype, C-contiguous; a field without one is
            left out. Shapes: per token (rows, row_tokens); per segment (segments and paddings, or
            more,); per row (rows,): the value of the row's first segment.

    Raises:
        ValueError: A segment, chunk or place is out of bounds, the chunk carries other fields, or
            an output has the wrong shape or dtype.
    """
    wanted = [(number, field) for number, field in enumerate(fields) if field.name in outputs]
    for _, field in wanted:
        _check_output(field, outputs[field.name], shape)
        outputs[field.name][...] = field.fill
    if not wanted or not segments.count:
        return
    places = flat_places(segments, shape)
    numbers = checked_numbers(segment_numbers, segments.count)
    firsts = _first_of_rows(segments)
    for chunk_offset, own in by_chunk(segments):
        chunk = open_chunk(pool, chunk_offset)
        starts = token_starts(chunk, segments, own)
        values = chunk.values(fields)
        if not values:
            continue
        for number, field in wanted:
            output = outputs[field.name]
            if field.per == "token":
                _put_tokens(output.reshape(-1), values[number], places, starts, segments, own)
            elif field.per == "segment":
                _put_records(field, output, values[number], numbers[own], segments.sample[own])
            else:
                mine = own[firsts[own]]
                _put_records(
                    field, output, values[number], segments.row[mine], segments.sample[mine]
                )


def _check_output(field: UserField, output: Array, shape: tuple[int, int]) -> None:
    is_right = output.dtype == np.dtype(field.dtype) and output.flags.c_contiguous
    if field.per == "token":
        is_right = is_right and output.shape == shape
    elif field.per == "row":
        is_right = is_right and output.shape == shape[:1]
    else:
        is_right = is_right and output.ndim == 1
    if not is_right:
        raise ValueError(
            f"output {field.name} is {output.dtype}{output.shape}, expected C-contiguous "
            f"{field.dtype} per {field.per} of a microbatch of {shape}"
        )


def _first_of_rows(segments: SegmentColumns) -> npt.NDArray[np.bool_]:
    is_first = np.ones(segments.count, dtype=np.bool_)
    is_first[1:] = segments.row[1:] != segments.row[:-1]
    return is_first


def _put_tokens(
    output: Array,
    values: ValueArray,
    places: Places,
    starts: Places,
    segments: SegmentColumns,
    own: Places,
) -> None:
    columns = zip(places[own].tolist(), starts.tolist(), segments.length[own].tolist(), strict=True)
    for place, start, length in columns:
        output[place : place + length] = values[start : start + length]


def _put_records(
    field: UserField,
    output: Array,
    values: ValueArray,
    places: npt.NDArray[np.integer[Any]],
    samples: npt.NDArray[np.int32],
) -> None:
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(output):
        raise ValueError(
            f"output {field.name} has {len(output)} places, values go to {places.min()} to "
            f"{places.max()}"
        )
    output[places] = values[samples]
