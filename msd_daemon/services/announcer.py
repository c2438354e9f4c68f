"""Tells ranks of steps, slots and the end: notes packed once, one packet where they fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from federation.messages import JobEnded, JobOpened
from federation.model.plan import StepPlan
from msd_client.contract.codec import pack
from msd_client.contract.local_messages import (
    READY,
    RingEvent,
    encode_control,
    encode_packed,
    encode_ready_with_note,
)
from msd_client.contract.skips import merged_skips, skips_from
from msd_client.contract.state import StateDelta, StreamState
from msd_daemon.core.slots import Publication

NOTES_KEPT = 192
"""More steps than rings can be apart: a ring has at most 64 slots, a horizon a few steps."""


class Readers(Protocol):
    """Where announcements go."""

    def send_reader_packet(self, rank: int, packet: bytes) -> None:
        """Send an event to a rank."""

    def send_reader_message(self, rank: int, packets: list[bytes]) -> None:
        """Send an encoded control message to a rank."""


@dataclass
class _Note:
    """What ranks are told of a step."""

    fields: dict[str, Any]
    packed: bytes


class PendingChanges:
    """Accepted events by the plan step that they take effect at: mixture changes and skips.

    A change is accepted while planned steps still wait to be announced. Their differences were made
    before it, so it is written into them here: a state saved from then on knows of it, on every rank
    alike, as no rank was told of those steps yet.
    """

    def __init__(self, state: StreamState) -> None:
        """Begin with what the generation's first state has pending."""
        self.event_number = state.event_number
        self._steps = state.pending_steps.tolist()
        self._shares: list[npt.NDArray[np.int64]] = list(state.pending_shares)
        self._skips = state.pending_skips
        self._sources = len(state.source_names)

    def accept_skip(self, first: int, end: int) -> None:
        """Note that plan steps are left out."""
        self.event_number += 1
        self._skips = merged_skips(self._skips, first, end)

    def accept(self, step: int, shares: Sequence[int]) -> None:
        """Note a change that holds from plan step `step` on."""
        self.event_number += 1
        self._steps.append(step)
        self._shares.append(np.array(shares, np.int64))

    def begin(self, opened: JobOpened) -> None:
        """Take what the planner has pending at the generation's first step.

        The journal may know more than the state that ranks brought, and of events dropped since.
        """
        self.event_number = opened.event_number
        self._steps = list(opened.pending_steps)
        self._shares = [np.array(own, np.int64) for own in opened.pending_shares]
        self._skips = np.array(opened.pending_skips, np.int64).reshape(-1, 2)

    def take_over(self, opened: JobOpened) -> bool:
        """Compare with what a planner has pending that replayed the journal up to a step.

        The one before may have died behind the commit of an event and before it told of it.

        Returns:
            True where it knows of an event that was not told.
        """
        if opened.event_number == self.event_number:
            return False
        self.event_number = opened.event_number
        kept = [place for place, own in enumerate(self._steps) if own < opened.plan_step]
        self._steps = [self._steps[place] for place in kept] + list(opened.pending_steps)
        self._shares = [self._shares[place] for place in kept]
        self._shares += [np.array(own, np.int64) for own in opened.pending_shares]
        # Those that are over stay for notes of steps before them that no rank was told of.
        for first, end in opened.pending_skips:
            self._skips = merged_skips(self._skips, first, end)
        return True

    def waiting(self, plan_step: int) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
        """Return what has yet to take effect at or behind a plan step, ascending.

        Returns:
            Mixture changes as (plan step, integer shares), and skips as [first, end].
        """
        changes = [
            (step, shares.tolist())
            for step, shares in zip(self._steps, self._shares, strict=True)
            if step >= plan_step
        ]
        skips: list[list[int]] = skips_from(self._skips, plan_step).tolist()
        return sorted(changes), skips

    def write_into(self, note: dict[str, Any]) -> None:
        """Make a note's difference, or whole state, tell of all that is pending after its step."""
        after = note["plan_step"] + 1
        places = sorted(
            (place for place, step in enumerate(self._steps) if step >= after),
            key=lambda place: self._steps[place],
        )
        pending_steps = np.array([self._steps[place] for place in places], np.int64)
        pending_shares = np.array([self._shares[place] for place in places], np.int64).reshape(
            len(places), self._sources
        )
        pending_skips = skips_from(self._skips, after)
        if note["state"]:
            state = replace(
                StreamState.decode(note["state"]),
                event_number=self.event_number,
                pending_steps=pending_steps,
                pending_shares=pending_shares,
                pending_skips=pending_skips,
            )
            note["state"] = state.encode()
            return
        delta = replace(
            StateDelta.decode(note["delta"]),
            event_number=self.event_number,
            pending_steps=pending_steps,
            pending_shares=pending_shares,
            pending_skips=pending_skips if len(self._skips) else None,
        )
        note["delta"] = delta.encode()


class Announcer:
    """Announcements of one generation."""

    def __init__(
        self,
        readers: Readers,
        generation: int,
        pending: PendingChanges,
        loss_weights: Sequence[float],
        *,
        is_alone: bool = True,
    ) -> None:
        self._is_alone = is_alone
        """False in a cluster: other nodes may have told their ranks of steps that wait here."""
        self._readers = readers
        self._generation = generation
        self._pending = pending
        self._loss_weights = loss_weights
        """Of each source; empty where batches have none."""
        self._notes: dict[int, _Note] = {}
        """By sequence of the step's first microbatch, ascending; the last NOTES_KEPT of them."""
        self._announced = -1
        """Highest sequence of a first microbatch that some rank was told of."""

    @property
    def last_step(self) -> int | None:
        """Number of the newest step that some rank was told of; None before the first."""
        note = self._notes.get(self._announced)
        return None if note is None else int(note.fields["step"])

    def plan_arrived(self, plan: StepPlan, state: bytes, first_sequence: int) -> None:
        """Pack a step's note now: when its first slot is filled, ranks wait for it.

        Args:
            plan: The step.
            state: The whole state after it, every 64th step; else empty, and ranks get the
                difference.
            first_sequence: Of its first microbatch.
        """
        fields = self._step_note(plan, state)
        self._notes[first_sequence] = _Note(fields, pack(fields))

    def mixture_accepted(self, step: int, shares: Sequence[int], next_step: int) -> int:
        """Write a change into the notes of all steps that no rank was told of.

        Args:
            step: It holds from this plan step on.
            shares: Integer shares of the sources.
            next_step: The first step that was planned after the change was accepted.

        Returns:
            The first step behind whose completion states know of the change.
        """
        self._pending.accept(step, shares)
        return self._write_pending(next_step)

    def skip_accepted(self, first: int, end: int, next_step: int) -> int:
        """Write a skip into the notes of all steps that no rank was told of, as a change."""
        self._pending.accept_skip(first, end)
        return self._write_pending(next_step)

    def waiting(self, plan_step: int) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
        """Return the accepted events that have yet to take effect, see `PendingChanges.waiting`."""
        return self._pending.waiting(plan_step)

    def planner_replayed(self, opened: JobOpened) -> bool:
        """Take what a planner that replayed the journal knows; True where it is news."""
        is_news = self._pending.take_over(opened)
        if is_news:
            self._write_pending(opened.step)
        return is_news

    def _write_pending(self, next_step: int) -> int:
        """Write what is pending into the notes that no rank was told of; return the first step."""
        known_from = next_step
        if not self._is_alone:
            return known_from
        for sequence, note in self._notes.items():
            if sequence > self._announced:
                self._pending.write_into(note.fields)
                note.packed = pack(note.fields)
                known_from = min(known_from, note.fields["step"])
        return known_from

    def publish(self, readers: Iterable[int], publications: Sequence[Publication]) -> None:
        """Announce slots of a ring, and the steps that begin with them, in order."""
        for publication in publications:
            event = RingEvent(
                READY,
                publication.slot,
                publication.sequence,
                self._generation,
                publication.payload_bytes,
            )
            note = self._notes.get(publication.sequence)
            if note is not None:
                self._announce(note, event, readers)
                continue
            packet = event.encode()
            for rank in readers:
                self._readers.send_reader_packet(rank, packet)

    def ended(self, readers: Iterable[int], end: JobEnded) -> None:
        """Tell ranks that no step follows."""
        note = {
            "note": "ended",
            "generation": self._generation,
            "reason": end.reason,
            "step": end.next_step,
            "state": end.state,
        }
        packets = list(encode_control(note))
        for rank in readers:
            self._readers.send_reader_message(rank, packets)

    def _announce(self, note: _Note, event: RingEvent, readers: Iterable[int]) -> None:
        """Tell readers of a step and of its first microbatch, in one packet where they fit."""
        if event.sequence > self._announced:
            self._announced = event.sequence
            while len(self._notes) > NOTES_KEPT:
                del self._notes[next(iter(self._notes))]
        packet = encode_ready_with_note(event, note.packed)
        if packet is not None:
            for rank in readers:
                self._readers.send_reader_packet(rank, packet)
            return
        packets = [*encode_packed(note.packed), event.encode()]
        for rank in readers:
            self._readers.send_reader_message(rank, packets)

    def _step_note(self, plan: StepPlan, state: bytes) -> dict[str, Any]:
        valid_tokens = plan.source_valid_tokens.tolist()
        weights = self._loss_weights
        encoders = plan.encoder_imbalance
        return {
            "note": "step",
            "generation": self._generation,
            "step": plan.step,
            "plan_step": plan.plan_step,
            "valid_tokens": plan.valid_tokens,
            "valid_segments": plan.valid_segments,
            "loss_weight": sum(w * n for w, n in zip(weights, valid_tokens, strict=True))
            if weights
            else float(plan.valid_tokens),
            "microbatches": plan.microbatch_count,
            "delta": b"" if state else plan.delta_bytes,
            "state": state,
            "stats": {
                "imbalance": plan.imbalance,
                **({} if encoders is None else {"encoder_imbalance": encoders}),
                "fill": plan.fill_ratio,
                "carried_tokens": plan.carried_tokens,
                "drawn_tokens": plan.drawn_tokens.tolist(),
                "valid_tokens": valid_tokens,
                "valid_segments": plan.source_valid_segments.tolist(),
                "dropped_records": plan.dropped_records.tolist(),
                "wanted_shares": plan.wanted_shares.tolist(),
                "realised_shares": plan.realised_shares.tolist(),
            },
        }
