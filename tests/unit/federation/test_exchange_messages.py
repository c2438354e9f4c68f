"""The exchange's wire: what is said comes back, and nothing else gets through."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.exchange_messages import (
    FRAGMENTS_MAX,
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    HEADER_BYTES_MAX,
    NUMBER_MAX,
    PARCEL_BYTES_MAX,
    PULLED_FRAMES_MAX,
    WIRE_VERSION,
    ExchangeMessage,
    ParcelData,
    ParcelKey,
    ParcelSize,
    ParcelTable,
    Ping,
    Pong,
    Pull,
    Refused,
    Taken,
    TakenNoted,
    Want,
    decode_data,
    decode_message,
    encode_data,
    encode_header,
)
from msd_client.contract.codec import pack, unpack
from msd_client.contract.errors import MsdError, ProtocolError, VersionMismatchError

numbers = st.integers(0, NUMBER_MAX)
names = st.text(max_size=20)
keys = st.builds(ParcelKey, names, numbers, numbers, names, names)
sizes = st.builds(
    ParcelSize,
    keys,
    st.integers(1, PARCEL_BYTES_MAX),
    st.integers(FRAME_BYTES_MIN, FRAME_BYTES_MAX),
    numbers,
    numbers,
)
messages = st.one_of(
    st.builds(Want, keys),
    sizes,
    st.builds(
        Pull,
        keys,
        numbers,
        st.lists(numbers, min_size=1, max_size=PULLED_FRAMES_MAX).map(tuple),
    ),
    st.builds(ParcelData, keys, numbers, numbers),
    st.builds(Taken, keys),
    st.builds(TakenNoted, keys),
    st.builds(Refused, keys, names, names),
    st.builds(Ping, names, numbers),
    st.builds(Pong, names, numbers, numbers),
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def further_frames(message: ExchangeMessage) -> list[bytes]:
    return [b""] * {ParcelSize: 5, ParcelData: 1}.get(type(message), 0)


@given(messages)
def test_what_is_said_comes_back(message: ExchangeMessage) -> None:
    frames = [encode_header(message), *further_frames(message)]
    assert decode_message(frames) == message
    assert decode_message([memoryview(frame) for frame in frames]) == message


@settings(max_examples=400)
@given(messages, st.data())
def test_one_wrong_value_is_refused(message: ExchangeMessage, data: st.DataObject) -> None:
    values = unpack(encode_header(message))
    place = data.draw(st.integers(0, len(values) - 1))
    wrong = data.draw(plain)
    values[place] = wrong
    frames = [pack(values), *further_frames(message)]
    try:
        decoded = decode_message(frames)
    except ProtocolError:
        return
    assert encode_header(decoded) == pack(values)  # it was a legal value after all


@settings(max_examples=400)
@given(st.lists(st.binary(max_size=80) | plain.map(pack), max_size=7))
def test_bytes_of_any_kind_are_refused_or_are_a_message(frames: list[bytes]) -> None:
    try:
        decode_message(frames)
    except ProtocolError:
        return
    assert unpack(frames[0])[0] == WIRE_VERSION


@pytest.mark.parametrize("change", [-1, 1])
def test_the_number_of_frames_must_fit(change: int) -> None:
    key = ParcelKey("j", 1, 2, "a", "b")
    for message in (Want(key), ParcelData(key, 1, 0), ParcelSize(key, 1, FRAME_BYTES_MIN, 0, 0)):
        frames = [encode_header(message), *further_frames(message), b""]
        with pytest.raises(ProtocolError, match="frame"):
            decode_message(frames if change > 0 else frames[:-2])


@given(
    st.builds(ParcelData, keys, numbers, numbers),
    st.binary(max_size=40),
    st.integers(0, 8),
    plain | st.sampled_from([2.0, 3.0, True, WIRE_VERSION, WIRE_VERSION + 1]),
)
def test_the_short_way_of_data_headers_gives_what_the_long_one_does(
    data: ParcelData, noise: bytes, place: int, value: object
) -> None:
    header = encode_header(data)
    values = unpack(header)
    values[place] = value
    for changed in (header, noise, header + noise, pack(values), pack([*values, 1])):
        try:
            long = decode_message([changed, b""])
        except MsdError as error:
            with pytest.raises(type(error)) as raised:
                decode_data(changed)
            assert raised.value.message == error.message
            continue
        if isinstance(long, ParcelData):
            assert decode_data(changed) == long
        else:
            with pytest.raises(ProtocolError, match="where data frames come"):
                decode_data(changed)
    assert encode_data(data) == header


def test_another_version_is_named() -> None:
    with pytest.raises(VersionMismatchError, match=f"speaks version 7, this one {WIRE_VERSION}"):
        decode_message([pack([7, 0, "anything"])])


def test_a_header_has_a_limit() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        decode_message([bytes(HEADER_BYTES_MAX + 1)])


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": 0},
        {"size_bytes": PARCEL_BYTES_MAX + 1},
        {"frame_bytes": FRAME_BYTES_MIN - 1},
        {"frame_bytes": FRAME_BYTES_MAX + 1},
    ],
)
def test_sizes_have_limits(change: dict[str, int]) -> None:
    size = ParcelSize(ParcelKey("j", 1, 2, "a", "b"), 5, FRAME_BYTES_MIN, 0, 0)
    with pytest.raises(ProtocolError, match="bytes"):
        decode_message([encode_header(dataclasses.replace(size, **change)), *[b""] * 5])


def test_frames_cover_the_parcel() -> None:
    size = ParcelSize(
        ParcelKey("j", 1, 2, "a", "b"), 2 * FRAME_BYTES_MIN + 5, FRAME_BYTES_MIN, 0, 0
    )
    spans = [size.frame_span(frame) for frame in range(size.frames_count)]
    assert spans == [
        (0, FRAME_BYTES_MIN),
        (FRAME_BYTES_MIN, 2 * FRAME_BYTES_MIN),
        (2 * FRAME_BYTES_MIN, 2 * FRAME_BYTES_MIN + 5),
    ]


# tables


def make_table(parts: list[list[int]], **columns: Any) -> ParcelTable:
    count = sum(part[3] for part in parts)
    rows = {
        "block_key": np.arange(count),
        "index": np.arange(count, dtype=np.int32),
        "offset": np.zeros(count, np.int32),
        "length": np.ones(count, np.int32),
    }
    return ParcelTable(np.array(parts), **(rows | columns))


PARTS = [[3, 0, 128, 2], [5, 128, 64, 1]]


def test_a_table_comes_back() -> None:
    table = make_table(PARTS)
    again = ParcelTable.decode([memoryview(frame) for frame in table.encode()], 192)
    for field in dataclasses.fields(ParcelTable):
        assert np.array_equal(getattr(again, field.name), getattr(table, field.name))


@pytest.mark.parametrize(
    "parts",
    [
        [[3, 64, 128, 2], [5, 192, 64, 1]],  # begins behind the parcel's start
        [[3, 0, 128, 2], [5, 100, 64, 1]],  # overlap, not aligned
        [[3, 0, 128, 2], [5, 64, 64, 1]],  # overlap
        [[3, 0, 128, 2], [5, 192, 64, 1]],  # a hole
        [[3, 0, 128, 2]],  # too short
        [[3, 0, 128, 3]],  # too many records, too short
        [[-1, 0, 192, 3]],
        [[1 << 31, 0, 192, 3]],
        [[3, 0, -64, 2], [5, 0, 192, 1]],
        [[3, 0, 1 << 62, 2], [5, 1 << 62, (1 << 62) + 192, 1]],
        [[3, 0, 192, 1 << 62], [5, 192, 1, 1 << 62]],
    ],
)
def test_a_table_that_does_not_cover_its_parcel_is_refused(parts: list[list[int]]) -> None:
    frames = [np.array(parts, "<i8").tobytes(), *make_table(PARTS).encode()[1:]]
    with pytest.raises(ProtocolError, match="do not make up"):
        ParcelTable.decode(frames, 192)


@pytest.mark.parametrize("name", ["index", "offset", "length"])
def test_columns_below_zero_are_refused(name: str) -> None:
    table = make_table(PARTS, **{name: np.array([0, -1, 0], np.int32)})
    with pytest.raises(ProtocolError, match="below 0"):
        ParcelTable.decode(table.encode(), 192)


def test_columns_of_other_lengths_are_refused() -> None:
    frames = make_table(PARTS).encode()
    for number in range(5):
        for wrong in (frames[number][:-1], frames[number] + bytes(32), b""):
            with pytest.raises(ProtocolError):
                ParcelTable.decode([*frames[:number], wrong, *frames[number + 1 :]], 192)


def test_more_fragments_than_one_parcel_may_have_are_refused() -> None:
    frames = make_table(PARTS).encode()
    frames[1] = bytes(8 * (FRAGMENTS_MAX + 1))
    with pytest.raises(ProtocolError, match="limits"):
        ParcelTable.decode(frames, 192)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=96), min_size=5, max_size=5), st.integers(1, 300))
def test_tables_of_any_bytes_are_refused_or_sound(frames: list[bytes], size_bytes: int) -> None:
    try:
        table = ParcelTable.decode(frames, size_bytes)
    except MsdError:
        return
    assert int(table.parts[-1, 1] + table.parts[-1, 2]) == size_bytes
