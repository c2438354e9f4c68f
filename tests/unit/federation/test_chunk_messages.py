"""Chunk metadata between a daemon and the planner, marks and all."""

import numpy as np
import pytest

from federation.messages import (
    ChunksPublished,
    Envelope,
    decode_chunks,
    decode_envelope,
    encode_chunks,
)
from federation.model.chunk import ChunkMeta, Marks
from msd_client.contract.errors import ProtocolError


def chunk(source: int, lengths: list[int], marks: Marks | None = None) -> ChunkMeta:
    status = np.zeros(len(lengths), np.uint8)
    return ChunkMeta(
        source, source << 48, 3, np.array(lengths, np.int32), status, True, 2, False, "bad", marks
    )


MARKS = Marks(
    np.array([2, 0, 1], np.int32),
    np.array([[-1, 0, 4, 0], [0, 4, 9, 36], [-2, 5, 0, 0]], np.int32),
)
NONE = Marks(np.zeros(1, np.int32), np.zeros((0, 4), np.int32))
CHUNKS = [chunk(1, [20, 3, 8], MARKS), chunk(2, [7, 7]), chunk(3, [5], NONE)]


def test_chunks_survive_their_frames() -> None:
    message, frames = encode_chunks(CHUNKS)
    envelope = Envelope("job", 1, 1, 0, message, frames)
    again = decode_envelope(envelope.encode())
    found = decode_chunks(again.message, again.frames)
    for one, other in zip(CHUNKS, found, strict=True):
        assert (one.source_index, one.block_key, one.first_index) == (
            other.source_index,
            other.block_key,
            other.first_index,
        )
        assert (other.is_block_end, other.window_blocks, other.is_lane_end, other.fault) == (
            True, 2, False, "bad",
        )  # fmt: skip
        assert np.array_equal(one.lengths, other.lengths)
        assert np.array_equal(one.status, other.status)
        assert (one.marks is None) == (other.marks is None)
        if one.marks is not None:
            assert np.array_equal(one.marks.counts, other.marks.counts)
            assert np.array_equal(one.marks.table, other.marks.table)


def test_chunks_without_marks_take_two_frames() -> None:
    message, frames = encode_chunks([chunk(2, [7, 7]), chunk(4, [])])
    assert [len(frame) for frame in frames] == [8, 2]
    assert [meta.marks for meta in decode_chunks(message, frames)] == [None, None]
    assert decode_chunks(*encode_chunks([])) == []


@pytest.mark.parametrize(
    ("place", "value"), [(3, 2), (3, -1), (3, 4), (8, 2), (8, 4), (8, -2), (8, "3"), (8, -1)]
)
def test_rows_that_do_not_fit_their_frames_are_refused(place: int, value: object) -> None:
    message, frames = encode_chunks(CHUNKS[:1])
    message.chunks[0][place] = value
    with pytest.raises(ProtocolError):
        decode_chunks(message, frames)


def test_frames_cut_short_or_missing_are_refused() -> None:
    message, frames = encode_chunks(CHUNKS)
    for number in range(4):
        short = [frame[: -4 if number != 1 else -1] if number == n else frame
                 for n, frame in enumerate(frames)]  # fmt: skip
        with pytest.raises(ProtocolError):
            decode_chunks(message, short)
        with pytest.raises(ProtocolError):
            decode_chunks(message, frames[:number])
    with pytest.raises(ProtocolError, match="malformed"):
        decode_chunks(ChunksPublished([[1, 0, 0, 0, True, 1, False, ""]]), frames[:2])
