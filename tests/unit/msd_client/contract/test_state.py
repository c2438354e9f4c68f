import hashlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from msd_client.contract.codec import pack
from msd_client.contract.errors import ProtocolError, StateMismatchError
from msd_client.contract.state import (
    CARRIED_COLUMNS,
    DROPPED_COLUMNS,
    PROGRESS_COLUMNS,
    StateDelta,
    StreamState,
)


def full_state() -> StreamState:
    rng = np.random.default_rng(3)
    state = StreamState.initial("ab" * 16, ("web", "ü", "code"), sample_digest="ef" * 16)
    return replace(
        state,
        step=7,
        event_number=2,
        progress=rng.integers(0, 1 << 60, (len(PROGRESS_COLUMNS), 3)),
        dropped=rng.integers(0, 99, (len(DROPPED_COLUMNS), 3)),
        shares=np.array([1, 0, 5]),
        schedule_index=1,
        accumulators=np.array([0, 4, 1 << 58]),
        pending_steps=np.array([9, 12]),
        pending_shares=np.array([[1, 2, 3], [4, 5, 6]]),
        carried=rng.integers(0, 99, (len(CARRIED_COLUMNS), 4)),
        faults=np.array([[0, 2], [17, 33]]),
        ending="source web is exhausted",
        stream_digest=bytes(range(32)),
    )


def delta() -> StateDelta:
    return StateDelta(
        step=8,
        event_number=3,
        changed=np.array([0, 2]),
        progress=np.full((len(PROGRESS_COLUMNS), 2), 5),
        dropped_changed=np.array([1]),
        dropped=np.full((len(DROPPED_COLUMNS), 1), 6),
        accumulators=np.array([1, 2]),
        carried_out=np.array([1, 3]),
        carried_in=np.full((len(CARRIED_COLUMNS), 1), 8),
        stream_digest=bytes(32),
        ending="",
        schedule_index=2,
    )


def test_a_state_survives_its_bytes():
    for state in (
        full_state(),
        StreamState.initial("x", (), sample_digest="y"),
        StreamState.initial("x", ("a",), sample_digest="y"),
    ):
        data = state.encode()
        again = StreamState.decode(data)
        assert again.encode() == data
        assert again.source_names == state.source_names
        assert np.array_equal(again.progress, state.progress)
        assert np.array_equal(again.pending_shares, state.pending_shares)
        assert np.array_equal(again.carried, state.carried)


def test_a_delta_survives_its_bytes():
    full = replace(
        delta(),
        shares=np.array([1, 2, 3]),
        pending_steps=np.array([4]),
        pending_shares=np.array([[1, 2, 3]]),
        faults=np.array([[0], [1]]),
    )
    for one in (delta(), full):
        again = StateDelta.decode(one.encode())
        assert again.encode() == one.encode()
    assert StateDelta.decode(delta().encode()).shares is None


def test_a_delta_changes_what_it_names_and_no_more():
    state = full_state()
    after = state.apply(delta())
    assert (after.step, after.event_number, after.schedule_index) == (8, 3, 2)
    assert after.progress[:, 0].tolist() == [5] * len(PROGRESS_COLUMNS)
    assert np.array_equal(after.progress[:, 1], state.progress[:, 1])
    assert np.array_equal(after.dropped[:, 0], state.dropped[:, 0])
    assert after.dropped[0, 1] == 6
    assert np.array_equal(after.carried[:, :2], state.carried[:, [0, 2]])
    assert after.carried[:, 2].tolist() == [8] * len(CARRIED_COLUMNS)
    assert np.array_equal(after.shares, state.shares)
    assert np.array_equal(after.pending_steps, state.pending_steps)
    assert after.ending == ""


def test_a_delta_of_another_step_is_refused():
    with pytest.raises(ProtocolError, match="step 8 cannot follow a state at step 6"):
        replace(full_state(), step=6).apply(delta())


def test_a_delta_that_names_what_the_state_lacks_is_refused():
    for bad in ({"changed": np.array([0, 3])}, {"carried_out": np.array([4])}):
        with pytest.raises(ProtocolError, match="lacks"):
            full_state().apply(replace(delta(), **bad))


def test_every_damaged_byte_of_a_state_is_noticed():
    data = full_state().encode()
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 0x40
        with pytest.raises(StateMismatchError):
            StreamState.decode(bytes(damaged))


@pytest.mark.parametrize("size", [0, 5, 26, 200])
def test_a_state_cut_short_is_refused(size):
    with pytest.raises(StateMismatchError):
        StreamState.decode(full_state().encode()[:size])
    with pytest.raises(ProtocolError):
        StateDelta.decode(delta().encode()[:size])


def test_a_state_is_no_delta():
    with pytest.raises(ProtocolError, match="no msd delta"):
        StateDelta.decode(full_state().encode())
    with pytest.raises(StateMismatchError, match="no msd state"):
        StreamState.decode(delta().encode())


def test_columns_that_do_not_fit_each_other_are_refused():
    short = replace(full_state(), pending_steps=np.array([9]))
    with pytest.raises(StateMismatchError, match="differ in length"):
        StreamState.decode(short.encode())
    narrow = replace(full_state(), dropped=np.zeros((len(DROPPED_COLUMNS), 2), np.int64))
    with pytest.raises(StateMismatchError, match="do not fit"):
        StreamState.decode(narrow.encode())


def test_a_state_of_another_job_or_version_is_refused():
    state = full_state()
    state.check_job(1, "ef" * 16)
    with pytest.raises(StateMismatchError, match="another job: samples differ"):
        state.check_job(1, "cd" * 16)
    parts = replace(state, sample_digest="batch:1,seed:2,sources.a:b:3")
    parts.check_job(1, "batch:1,seed:2,sources.a:b:3")
    with pytest.raises(StateMismatchError, match=r"seed, sources\.a:b, sources\.c differ"):
        parts.check_job(1, "batch:1,seed:4,sources.a:b:5,sources.c:6")
    with pytest.raises(StateMismatchError, match="stream version 1"):
        state.check_job(2, "ef" * 16)


def test_a_state_is_adopted_by_a_job_of_the_same_samples():
    state = full_state()
    assert state.adopt("ab" * 16) is state
    adopted = state.adopt("cd" * 16)
    assert adopted.job_digest == "cd" * 16
    assert adopted.adopt("ab" * 16).encode() == state.encode()


def unpacked(state: StreamState) -> dict:
    return msgpack.unpackb(state.encode()[26:])


def framed(body: dict) -> bytes:
    packed = msgpack.packb(body)
    checksum = hashlib.blake2b(packed, digest_size=16).digest()
    return b"MSDSTATE" + (1).to_bytes(2, "little") + checksum + packed


def test_columns_that_a_state_lacks_read_zeros_whatever_their_order():
    state = full_state()
    body = unpacked(state)
    names = body["dropped_columns"]
    values = np.frombuffer(body["dropped"], "<i8").reshape(len(names), -1)
    kept = [place for place, name in enumerate(names) if name != "held_out"][::-1]
    body["dropped_columns"] = [names[place] for place in kept]
    body["dropped"] = values[kept].tobytes()
    dropped = StreamState.decode(framed(body)).dropped
    assert dropped[DROPPED_COLUMNS.index("held_out")].tolist() == [0, 0, 0]
    others = [place for place, name in enumerate(DROPPED_COLUMNS) if name != "held_out"]
    assert np.array_equal(dropped[others], state.dropped[others])


def test_an_unknown_column_is_refused_by_name_unless_nothing_was_counted():
    state = full_state()
    body = unpacked(state)
    body["progress_columns"].append("patches")
    body["progress"] += bytes(3 * 8)
    assert StreamState.decode(framed(body)).encode() == state.encode()
    body["progress"] = body["progress"][:-8] + (1).to_bytes(8, "little")
    with pytest.raises(StateMismatchError, match="progress column 'patches' is unknown"):
        StreamState.decode(framed(body))


def test_three_hundred_sources_stay_small():
    names = tuple(f"source-number-{number}" for number in range(300))
    state = StreamState.initial("ab" * 16, names, sample_digest="ef" * 16)
    carried = np.zeros((len(CARRIED_COLUMNS), 2000), np.int64)
    assert len(replace(state, carried=carried).encode()) < 350 * 1024


@pytest.mark.parametrize("what", ["step", "skipped_steps", "event_number", "schedule_index"])
def test_a_number_beyond_those_of_steps_is_refused(what):
    for value in (-1, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1):
        with pytest.raises(StateMismatchError, match=f"the state's {what} is {value}: it is from"):
            StreamState.decode(replace(full_state(), **{what: value}).encode())
    state = replace(full_state(), **{what: 1 << 62})
    assert StreamState.decode(state.encode()).encode() == state.encode()


def test_a_message_holds_numbers_of_64_bits_and_unicode_alone():
    assert pack(2**64 - 1)
    for value in (2**64, -(2**63) - 1, "a\udcff"):
        with pytest.raises(ProtocolError, match="a message can't be sent"):
            pack({"key": [value]})
