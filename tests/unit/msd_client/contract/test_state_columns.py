"""States and deltas of the first release load; what came later is written where it says something."""

import base64
import zlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from federation.model.job import BatchRule, ErrorPolicy, SourceSpec
from msd_client.contract.errors import ProtocolError, StateMismatchError
from msd_client.contract.state import (
    CARRIED_COLUMNS,
    DROPPED_COLUMNS,
    PROGRESS_COLUMNS,
    StateDelta,
    StreamState,
)
from tests.support.metadata import Feed, SourceCorpus, make_job, make_spec, start

# Of the first release: a state after eleven steps of the job below, and the last of those steps.
OLD_STATE = (
    "eNqVUz1s00AUthFFAoRoBaoEA6rYKkVV/u14Kz8DAwvpjHW+e05MbJ91d24ThEQHBsQGCwMLUtskFKdNF5jYMiAG"
    "lkqgLt26ISFYWTgnl7QgVVVPsr/3vvfuvXufz/erd6pLi0t3de3nk4cznz7O5jtXDpJnX6t/9rWrbS4YoEBfe0Sd"
    "vblSziGmix3TqAAUXexWSmW3XCxLOmtgQjocBZEPfO+1gwSuW1imkpKDC9jBGYgornNL7nNLYBADGW4m8JoiZmCZ"
    "JdPBRVRBZZzPcABiFVG5iHJZw81iJ8NpzDDwBUwJWFComCZxc3nHKE4iK+BY8kBGIZfNlcyCkRG0AaH3GJjlmOVi"
    "DvLlSqlgrnMB0cUNWIZQaB21+dWa3L2e1u5HjNYYcG5j6sdByN/0ccw4ZbbjU9ywG9BKFOGFBJo95VDX5SASBpgy"
    "YssH2HsfhcBtkGkk8aTRrKNYdicJYWgltIfn472Ro2TrE/C9ZWBAVHjnkFApyTLyvXG4Oz7uoK/9t64qvKxQV3j9"
    "mPhJa1EVqCqcUfy0wgXF39P/5cf1byjeUrhNGI0iOddY6A0IItHq1sGXAsZi00Fy5lYoUDNJTQjl9/HCWs/10ozA"
    "41x67wSlto9YDTbjUN5TghwfEp+GNZs3vLT+1tARLA4xkuJ3wzTfAX9r3H+kZEe5g75+ghCnjeva6daUwnPHxC2F"
    "txW2eR3JKzAYCr6qyBS7HNeBxD7oCcI4DmIfCcpUoko7m757kbykXiqZ/Df4QNua+KPKWg8jxrzht4pDcaaj3MGt"
    "yYz60XEvTcypI+yFiXn+0NTaLop9IXu0Rz3ftolXAy4Gczd3w2/7D3Z+fJl+Of98fnW1dW139vPTXwe/tz+88L97"
    "8BcfCz1Y"
)
OLD_DELTA = (
    "eNrzDXZxcfUJcWRkODqnef5Ro6v/N3dFzmRkN1PvWVJcklrAvTS1LDWvhGF5ckZiXnpqyhEBBihghNIrCory04tS"
    "i4uPbGBAAyJQmh9NixQOeULAEWpAMJQWhIrD3KQHFfdkRBWHmS8HFbeC0utTivILClJT4mGe44DZtBwqcySCEc0N"
    "uPiMONzMisa3gtJrEpOTS3NLcxJL8ouKEaHKwNDAAiJXJycWFWUCnZZfWoJw1iqYaGbekQRGAqHFC6WFcMhzQWlh"
    "ND6MXpaSmZ5aXHJEQely3rV7QRvfnBKYqNmh2dBQKXlZ7ET9x6ef1m/ryrmembosNS8lMy99wYri5IzUlNKcVEYA"
    "kAxZNQ=="
)
NEXT_DIGEST = "6384b2baeb5f8a7a547e9279daa1d91d65766a763526c17dc8ecd05156f1bdf8"
MASKED = (*CARRIED_COLUMNS, "trained", "units_image")


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def counted(columns: np.ndarray) -> dict[str, list[int]]:
    """Return the columns in which something was counted."""
    return {
        name: column.tolist()
        for name, column in zip(DROPPED_COLUMNS, columns, strict=True)
        if column.any()
    }


DROPPED = {
    "empty": [1, 0],
    "bad_syntax": [1, 0],
    "field_missing": [1, 0],
    "too_large": [1, 0],
    "long_truncated": [5, 6],
    "dropped_tokens": [58, 67],
}
CARRIED = [[1, 0], [0, 0], [13, 18], [0, 0], [10, 19], [10, 10]]


def test_a_state_of_the_first_release_loads_and_reads_the_same() -> None:
    data = unpacked(OLD_STATE)
    state = StreamState.decode(data)
    assert state.encode() == data  # nothing came to it that says something
    assert state.step == 11
    assert counted(state.dropped) == DROPPED
    assert state.carried_columns == CARRIED_COLUMNS
    assert state.carried.tolist() == CARRIED


def test_a_delta_of_the_first_release_reads_the_same() -> None:
    data = unpacked(OLD_DELTA)
    delta = StateDelta.decode(data)
    assert delta.encode() == data
    assert delta.dropped_changed.tolist() == [0]
    assert counted(delta.dropped) == {name: web[:1] for name, web in DROPPED.items()}
    assert delta.carried_in.tolist() == CARRIED


def fixed_corpus(spec: SourceSpec, factor: int, bad_every: int) -> SourceCorpus:
    statuses = [1 + n % 7 if bad_every and n % bad_every == 4 else 0 for n in range(60)]
    lengths = [0 if bad else factor * n * n % 50 + 1 for n, bad in enumerate(statuses)]
    blocks = [(lengths[:25], statuses[:25]), (lengths[25:], statuses[25:])]
    return SourceCorpus(spec, [blocks])


def test_the_stream_of_an_old_state_goes_on() -> None:
    specs = [make_spec("web", 2, on_error=ErrorPolicy("skip", 1.0)), make_spec("code", 2)]
    job = make_job(specs, BatchRule(2, 32, long="truncate"), [0.5, 0.5])
    corpora = [fixed_corpus(specs[0], 7, 5), fixed_corpus(specs[1], 11, 0)]
    feed = Feed(start(job, state=StreamState.decode(unpacked(OLD_STATE))), corpora)
    assert feed.step().stream_digest == NEXT_DIGEST


def filled(columns: tuple[str, ...] = MASKED, carried: int = 3) -> StreamState:
    state = StreamState.initial("ab" * 16, ("web", "code"), sample_digest="ef" * 16)
    table = np.arange(len(columns) * carried).reshape(len(columns), carried)
    return replace(state, carried=table, carried_columns=columns)


def delta_of(state: StreamState, **changes: object) -> StateDelta:
    plain = StateDelta(
        step=state.step + 1,
        event_number=0,
        changed=np.zeros(0, np.int64),
        progress=np.zeros((len(PROGRESS_COLUMNS), 0), np.int64),
        dropped_changed=np.zeros(0, np.int64),
        dropped=np.zeros((len(DROPPED_COLUMNS), 0), np.int64),
        accumulators=np.zeros(0, np.int64),
        carried_out=np.zeros(0, np.int64),
        carried_in=np.zeros((len(state.carried_columns), 0), np.int64),
        stream_digest=bytes(32),
        ending="",
        schedule_index=0,
        carried_columns=state.carried_columns,
    )
    return replace(plain, **changes)


def body_of(data: bytes) -> dict:
    return msgpack.unpackb(data[26:])


def test_later_columns_are_written_once_they_count_something() -> None:
    state = filled()
    assert len(body_of(state.encode())["dropped_columns"]) == 11
    dropped = state.dropped.copy()
    dropped[DROPPED_COLUMNS.index("undecodable"), 1] = 5
    state = replace(state, dropped=dropped)
    of_skips = ("skipped", "skipped_tokens")
    written = [name for name in DROPPED_COLUMNS if name not in of_skips]
    assert body_of(state.encode())["dropped_columns"] == written
    dropped[DROPPED_COLUMNS.index("skipped"), 1] = 2
    skipping = replace(state, dropped=dropped.copy())
    assert body_of(skipping.encode())["dropped_columns"] == list(DROPPED_COLUMNS)
    dropped[DROPPED_COLUMNS.index("skipped"), 1] = 0
    assert counted(StreamState.decode(state.encode()).dropped) == {"undecodable": [0, 5]}
    delta = delta_of(state, dropped_changed=np.array([1]), dropped=dropped[:, [1]])
    again = StateDelta.decode(delta.encode())
    assert counted(again.dropped) == {"undecodable": [5]}
    assert "dropped_columns" not in body_of(delta_of(state).encode())


def test_a_delta_that_counts_what_nobody_knows_is_refused() -> None:
    state = filled()
    dropped = np.zeros((len(DROPPED_COLUMNS), 1), np.int64)
    dropped[DROPPED_COLUMNS.index("quarantined")] = 1
    data = delta_of(state, dropped_changed=np.array([1]), dropped=dropped).encode()
    damaged = data.replace(b"quarantined", b"quarantimed")
    with pytest.raises(ProtocolError, match="checksum"):
        StateDelta.decode(damaged)
    with pytest.raises(ProtocolError, match="'quarantimed' is unknown"):
        StateDelta.decode(reframed(damaged))


def reframed(data: bytes) -> bytes:
    import hashlib

    return data[:10] + hashlib.blake2b(data[26:], digest_size=16).digest() + data[26:]


def test_carried_fragments_keep_their_columns() -> None:
    state = filled()
    again = StreamState.decode(state.encode())
    assert again.carried_columns == MASKED
    assert np.array_equal(again.carried, state.carried)
    assert again.encode() == state.encode()
    delta = delta_of(state, carried_out=np.array([0]), carried_in=np.full((8, 1), 9))
    decoded = StateDelta.decode(delta.encode())
    assert decoded.carried_columns == MASKED
    after = again.apply(decoded)
    assert after.carried.tolist() == [[3 * n + 1, 3 * n + 2, 9] for n in range(8)]


def test_columns_of_nothing_are_not_written() -> None:
    none = filled(MASKED, 0)
    assert none.encode() == filled(CARRIED_COLUMNS, 0).encode()
    assert "carried_columns" not in body_of(delta_of(none).encode())
    # The planner's own state and the one that a client puts together stay the same bytes.
    delta = delta_of(none, carried_in=np.full((8, 2), 4))
    own = none.apply(delta)
    client = StreamState.decode(none.encode()).apply(StateDelta.decode(delta.encode()))
    assert client.carried_columns == own.carried_columns == MASKED
    assert client.encode() == own.encode()
    left = delta_of(own, carried_out=np.array([0, 1]))
    assert own.apply(left).encode() == client.apply(StateDelta.decode(left.encode())).encode()


def test_a_delta_of_other_columns_is_refused() -> None:
    state = filled()
    other = delta_of(filled(CARRIED_COLUMNS), carried_in=np.full((6, 1), 9))
    with pytest.raises(ProtocolError, match=r"the delta carries source, .*the state source, .*tra"):
        state.apply(other)
    # Nothing is carried any more: the columns are those of what joins.
    all_left = replace(other, carried_out=np.arange(3))
    assert state.apply(all_left).carried_columns == CARRIED_COLUMNS


@pytest.mark.parametrize(
    "names", [["trained", "trained"], ["source"], [f"c{n}" for n in range(11)]]
)
def test_names_that_are_none_are_refused(names: list[str]) -> None:
    body = body_of(filled().encode())
    body["carried_columns"] = names
    head = filled().encode()[:26]
    with pytest.raises(StateMismatchError, match="do not fit"):
        StreamState.decode(reframed(head + msgpack.packb(body)))
