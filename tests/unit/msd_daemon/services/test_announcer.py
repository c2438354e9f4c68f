"""What ranks are told of steps, and how an accepted mixture change gets into states."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from federation.messages import JobOpened
from msd_client.contract.codec import unpack_map
from msd_client.contract.state import StateDelta, StreamState
from msd_daemon.core.slots import Publication
from msd_daemon.services import announcer
from msd_daemon.services.announcer import Announcer, PendingChanges

NAMES = ("a", "b")


class Wire:
    """Keeps what went to each rank, decoded."""

    def __init__(self):
        self.notes: dict[int, list[dict]] = {}
        self.slots: dict[int, list[int]] = {}


@pytest.fixture
def wire(monkeypatch):
    found = Wire()
    monkeypatch.setattr(announcer, "encode_ready_with_note", lambda event, note: (event, note))
    return found


class Readers:
    def __init__(self, wire):
        self._wire = wire

    def send_reader_packet(self, rank, packet):
        if isinstance(packet, tuple):
            event, note = packet
            self._wire.notes.setdefault(rank, []).append(unpack_map(note))
            self._wire.slots.setdefault(rank, []).append(event.sequence)
        else:
            self._wire.slots.setdefault(rank, []).append(-1)

    def send_reader_message(self, rank, packets):
        raise AssertionError("all of these notes fit a packet")


def delta_to(step):
    state = StreamState.initial("j", NAMES, sample_digest="s")
    return StateDelta(
        step=step, event_number=0, changed=np.zeros(0, np.int64),
        progress=np.zeros((len(state.progress), 0), np.int64),
        dropped_changed=np.zeros(0, np.int64), dropped=np.zeros((len(state.dropped), 0), np.int64),
        accumulators=np.zeros(0, np.int64), carried_out=np.zeros(0, np.int64),
        carried_in=np.zeros((6, 0), np.int64), stream_digest=bytes(32), ending="", schedule_index=0,
    )  # fmt: skip


def plan_of(step, microbatches=2, encoder_imbalance=None):
    counts = np.array([3, 4])
    return SimpleNamespace(
        step=step, plan_step=step, microbatch_count=microbatches, valid_tokens=7, valid_segments=2,
        source_valid_tokens=counts, dropped_records=counts, source_valid_segments=np.array([1, 1]), imbalance=1.0,
        fill_ratio=1.0, carried_tokens=0, drawn_tokens=counts, wanted_shares=np.array([0.5, 0.5]),
        realised_shares=np.array([0.5, 0.5]), delta_bytes=delta_to(step + 1).encode(),
        encoder_imbalance=encoder_imbalance,
    )  # fmt: skip


def test_a_change_is_in_the_states_of_every_step_that_no_rank_was_told_of(wire):
    state = StreamState.initial("j", NAMES, sample_digest="s")
    whole = replace(state, step=4).encode()
    sent = Announcer(Readers(wire), 1, PendingChanges(state), [])
    for step in range(4):
        sent.plan_arrived(plan_of(step), whole if step == 3 else b"", first_sequence=2 * step)
    sent.publish([0], [Publication(0, 0, 8), Publication(1, 1, 8)])
    assert sent.mixture_accepted(3, [5, 6], 2) == 1
    assert sent.mixture_accepted(9, [7, 8], 2) == 1
    for sequence in range(2, 8):
        sent.publish([0, 1], [Publication(0, sequence, 8)])
    deltas = [StateDelta.decode(note["delta"]) for note in wire.notes[0][:3]]
    assert deltas[0].pending_steps is None
    assert deltas[0].event_number == 0
    assert [d.pending_steps.tolist() for d in deltas[1:]] == [[3, 9], [3, 9]]
    assert [d.event_number for d in deltas[1:]] == [2, 2]
    last = StreamState.decode(wire.notes[0][3]["state"])
    assert (last.pending_steps.tolist(), last.pending_shares.tolist()) == ([9], [[7, 8]])
    assert wire.notes[1] == wire.notes[0][1:]
    applied = state
    for delta in deltas:
        applied = applied.apply(delta)
    assert applied.pending_shares.tolist() == [[5, 6], [7, 8]]


def test_what_the_first_state_has_pending_stays_pending(wire):
    state = replace(
        StreamState.initial("j", NAMES, sample_digest="s"),
        event_number=4,
        pending_steps=np.array([2]),
        pending_shares=np.array([[1, 1]]),
    )
    sent = Announcer(Readers(wire), 1, PendingChanges(state), [])
    for step in range(3):
        sent.plan_arrived(plan_of(step), b"", first_sequence=2 * step)
    sent.mixture_accepted(5, [5, 6], 4)
    for step in range(3):
        sent.publish([0], [Publication(0, 2 * step, 8)])
    told = [StateDelta.decode(note["delta"]).pending_steps.tolist() for note in wire.notes[0]]
    assert told == [[2, 5], [2, 5], [5]]
    assert StateDelta.decode(wire.notes[0][0]["delta"]).event_number == 5


def test_steps_of_different_sizes_are_announced_with_their_first_microbatch(wire):
    state = StreamState.initial("j", NAMES, sample_digest="s")
    sent = Announcer(Readers(wire), 1, PendingChanges(state), [1.0, 0.5])
    firsts = [0, 1, 4, 6]
    for step, (first, following) in enumerate(zip(firsts, [*firsts[1:], 7], strict=True)):
        sent.plan_arrived(plan_of(step, following - first), b"", first)
    sent.publish([3], [Publication(0, sequence, 8) for sequence in range(7)])
    assert wire.slots[3] == [0, 1, -1, -1, 4, -1, 6]
    assert [note["microbatches"] for note in wire.notes[3]] == [1, 3, 2, 1]
    assert {note["loss_weight"] for note in wire.notes[3]} == {3 + 0.5 * 4}


def test_stats_tell_the_encoders_imbalance_where_a_plan_does(wire):
    state = StreamState.initial("j", NAMES, sample_digest="s")
    sent = Announcer(Readers(wire), 1, PendingChanges(state), [])
    for step, encoders in enumerate([None, 1.25]):
        sent.plan_arrived(plan_of(step, 1, encoders), b"", first_sequence=step)
        sent.publish([0], [Publication(0, step, 8)])
    stats = [note["stats"] for note in wire.notes[0] if note["note"] == "step"]
    assert [one.get("encoder_imbalance") for one in stats] == [None, 1.25]
    assert "encoder_imbalance" not in stats[0]


def opened(step, event_number, steps, shares):
    return JobOpened(step, [], [], [], [], [], event_number, steps, shares, step)


def test_a_change_that_its_planner_could_not_tell_of_is_taken_from_the_next_one(wire):
    state = StreamState.initial("j", NAMES, sample_digest="s")
    sent = Announcer(Readers(wire), 1, PendingChanges(state), [])
    for step in range(3):
        sent.plan_arrived(plan_of(step), b"", first_sequence=2 * step)
    sent.publish([0], [Publication(0, 0, 8)])
    sent.mixture_accepted(2, [5, 6], 3)
    assert sent.planner_replayed(opened(3, 2, [4], [[7, 8]]))
    assert not sent.planner_replayed(opened(3, 2, [4], [[7, 8]]))
    sent.mixture_accepted(6, [9, 9], 3)  # asked again
    sent.publish([0], [Publication(0, 2, 8), Publication(0, 4, 8)])
    _, second, third = (StateDelta.decode(note["delta"]) for note in wire.notes[0])
    assert (second.event_number, third.event_number) == (3, 3)
    assert second.pending_steps.tolist() == [2, 4, 6]
    assert third.pending_steps.tolist() == [4, 6]
    assert third.pending_shares.tolist() == [[7, 8], [9, 9]]


def test_a_planner_that_knows_nothing_new_changes_no_note(wire):
    state = StreamState.initial("j", NAMES, sample_digest="s")
    sent = Announcer(Readers(wire), 1, PendingChanges(state), [])
    sent.plan_arrived(plan_of(0), b"", first_sequence=0)
    assert not sent.planner_replayed(opened(1, 0, [], []))
    sent.publish([0], [Publication(0, 0, 8)])
    assert StateDelta.decode(wire.notes[0][0]["delta"]).pending_steps is None


def test_a_skip_is_written_into_what_no_rank_was_told_of(wire):
    state = StreamState.initial("j", NAMES, sample_digest="s")
    sent = Announcer(Readers(wire), 1, PendingChanges(state), [])
    for step in range(4):
        sent.plan_arrived(plan_of(step), b"", first_sequence=2 * step)
    sent.publish([0], [Publication(0, 0, 8)])
    assert sent.skip_accepted(2, 4, 4) == 1
    assert sent.skip_accepted(6, 7, 4) == 1
    sent.publish([0], [Publication(0, 2 * step, 8) for step in (1, 2, 3)])
    deltas = [StateDelta.decode(note["delta"]) for note in wire.notes[0]]
    assert deltas[0].pending_skips is None
    assert [delta.event_number for delta in deltas[1:]] == [2, 2, 2]
    assert deltas[1].pending_skips.tolist() == [[2, 4], [6, 7]]
    assert deltas[3].pending_skips.tolist() == [[6, 7]]  # behind plan step 3 the first is over
