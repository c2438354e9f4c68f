"""Values of user fields reach the place of their token, segment or row, or are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from msd_client.contract.user_fields import UserField
from msd_daemon.gather import SegmentColumns
from msd_daemon.gather.user_fields import gather_fields
from msd_daemon.shm.chunk_layout import encode_chunk_columns, encoded_bytes
from tests.support.microbatches import columns_of

ADVANTAGE = UserField("advantage", "token", "float32", -1.0)
REWARD = UserField("reward", "segment", "float64", -2.0)
GROUP = UserField("group", "row", "int64", -3.0)
FIELDS = (ADVANTAGE, REWARD, GROUP)
LENGTHS = (3, 0, 5)


def make_chunk(first: float, *, has_fields: bool = True) -> bytearray:
    """Return a chunk of three records whose values tell record and token: first + 10 * r + k."""
    tokens = sum(LENGTHS)
    values = (
        np.array(
            [first + 10 * r + k for r, length in enumerate(LENGTHS) for k in range(length)], "<f4"
        ),
        np.array([first + 10 * r for r in range(len(LENGTHS))], "<f8"),
        np.array([int(first) + 10 * r for r in range(len(LENGTHS))], "<i8"),
    )
    kept = values if has_fields else ()
    blocks = [array.nbytes for array in kept]
    size = encoded_bytes(len(LENGTHS), 2 * tokens, has_index=False, blocks=blocks)
    chunk = bytearray(size)
    payload = encode_chunk_columns(
        memoryview(chunk),
        token_bytes=2,
        source_index=0,
        block_key=0,
        first_index=0,
        flags=0,
        window_blocks=1,
        offsets=np.cumsum([0, *LENGTHS]).astype(np.int64),
        status=np.zeros(len(LENGTHS), np.uint8),
        values=kept,
    )
    np.frombuffer(payload, "<u2")[:] = np.arange(tokens)
    return chunk


def gather(
    pool: bytes | bytearray, segments: SegmentColumns, numbers: list[int], count: int = 5
) -> dict[str, np.ndarray]:
    outputs = {
        "advantage": np.full((3, 8), 99, np.float32),
        "reward": np.full(count, 99, np.float64),
        "group": np.full(3, 99, np.int64),
    }
    gather_fields(memoryview(pool), segments, FIELDS, (3, 8), np.array(numbers, np.int32), outputs)
    return outputs


def test_every_value_reaches_its_place_and_the_rest_is_filled() -> None:
    one, two = make_chunk(100), make_chunk(200)
    bare = make_chunk(0, has_fields=False)
    at_two, at_bare = len(one), len(one) + len(two)
    segments = columns_of(
        [
            (at_two, 2, 1, 3, 0, 0, 0),  # the middle of a split document
            (0, 0, 0, 3, 0, 4, 0),
            (at_bare, 0, 0, 3, 2, 0, 1),  # of a source that has no fields
            (0, 2, 0, 2, 2, 3, 0),
        ]
    )
    outputs = gather(one + two + bare, segments, [0, 1, 3, 4], count=6)
    assert outputs["advantage"].tolist() == [
        [221, 222, 223, -1, 100, 101, 102, -1],
        [-1] * 8,
        [-1, -1, -1, 120, 121, -1, -1, -1],
    ]
    assert outputs["reward"].tolist() == [220, 100, -2, -2, 120, -2]
    assert outputs["group"].tolist() == [220, -3, -3]


def test_outputs_that_are_not_asked_for_are_left_out_and_no_segment_is_all_fill() -> None:
    segments = columns_of([(0, 0, 0, 3, 1, 0, 0)])
    outputs = {"reward": np.zeros(2, np.float64)}
    gather_fields(
        memoryview(make_chunk(100)), segments, FIELDS, (3, 8), np.array([1], np.int32), outputs
    )
    assert outputs["reward"].tolist() == [-2, 100]
    empty = gather(b"", columns_of([]), [])
    assert (empty["advantage"] == -1).all()
    assert (empty["reward"] == -2).all()
    assert (empty["group"] == -3).all()


@pytest.mark.parametrize(
    ("segment", "number", "reason"),
    [
        ((8, 0, 0, 3, 0, 0, 0), 0, "not 64-byte aligned"),
        ((-64, 0, 0, 3, 0, 0, 0), 0, "outside the pool"),
        ((1 << 20, 0, 0, 3, 0, 0, 0), 0, "outside the pool"),
        ((64, 0, 0, 3, 0, 0, 0), 0, "magic"),
        ((0, 3, 0, 3, 0, 0, 0), 0, "of a chunk of 3 records"),
        ((0, -1, 0, 3, 0, 0, 0), 0, "of a chunk of 3 records"),
        ((0, 0, 1, 3, 0, 0, 0), 0, "tokens 1 to 4 of record 0"),
        ((0, 1, 0, 1, 0, 0, 0), 0, "of record 1"),
        ((0, 2, -1, 3, 0, 0, 0), 0, "tokens -1 to 2"),
        ((0, 0, 0, 3, 3, 0, 0), 0, "outside the microbatch"),
        ((0, 0, 0, 3, 0, 6, 0), 0, "outside the microbatch"),
        ((0, 0, 0, 3, -1, 0, 0), 0, "outside the microbatch"),
        ((0, 0, 0, 0, 0, 0, 0), 0, "outside the microbatch"),
        ((0, 0, 0, 3, 0, 0, 0), 5, "has 5 places"),
        ((0, 0, 0, 3, 0, 0, 0), -1, "has 5 places"),
    ],
)
def test_what_points_outside_is_refused(segment: tuple[int, ...], number: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gather(make_chunk(0), columns_of([segment]), [number])


def test_overlapping_segments_are_refused() -> None:
    segments = columns_of([(0, 0, 0, 3, 0, 0, 0), (0, 2, 0, 3, 0, 2, 0)])
    with pytest.raises(ValueError, match=r"segment 1: .*overlaps"):
        gather(make_chunk(0), segments, [0, 1])


@pytest.mark.parametrize(
    ("place", "kind", "value", "reason"),
    [
        (48, "<q", 1 << 40, "mapped ones"),
        (48, "<q", -8, "mapped ones"),
        (48, "<q", 64, "carries 3 fields in 64 bytes"),
        (56, "<I", 2, "carries 2 fields"),
        (72, "<q", 1 << 40, "of record 0"),
        (72, "<q", -1, "of record 0"),
    ],
)
def test_a_chunk_that_lies_about_its_fields_is_refused(
    place: int, kind: str, value: int, reason: str
) -> None:
    chunk = make_chunk(0)
    struct.pack_into(kind, chunk, place, value)
    segments = columns_of([(0, 0, 0, 3, 0, 0, 0)])
    with pytest.raises(ValueError, match=reason):
        gather(chunk, segments, [0])


@pytest.mark.parametrize(
    "output",
    [
        np.zeros((3, 8), np.float64),
        np.zeros((8, 3), np.float32),
        np.zeros(24, np.float32),
        np.zeros((3, 16), np.float32)[:, ::2],
    ],
)
def test_an_output_of_another_type_or_shape_is_refused(output: np.ndarray) -> None:
    numbers = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match="output advantage"):
        gather_fields(
            memoryview(b""), columns_of([]), FIELDS, (3, 8), numbers, {"advantage": output}
        )


def test_a_number_for_every_segment_is_asked_for() -> None:
    with pytest.raises(ValueError, match="segment numbers for 1 segments"):
        gather(make_chunk(0), columns_of([(0, 0, 0, 3, 0, 0, 0)]), [0, 1])
