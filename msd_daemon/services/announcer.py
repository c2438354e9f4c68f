"""Tells ranks of steps, slots and the end: notes packed once, one packet where they fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from federation.messages import JobEnded
from federation.model.plan import StepPlan
from msd_client.contract.codec import pack
from msd_client.contract.local_messages import (
    READY,
    RingEvent,
    encode_control,
    encode_packed,
    encode_ready_with_note,
)
from msd_daemon.core.steps import Filled

NOTES_KEPT = 128
"""More steps than groups can be apart: a ring has at most 64 slots."""


class Readers(Protocol):
    """Where announcements go."""

    def send_reader_packet(self, rank: int, packet: bytes) -> None:
        """Send an event to a rank."""

    def send_reader_message(self, rank: int, packets: list[bytes]) -> None:
        """Send an encoded control message to a rank."""


class Announcer:
    """Announcements of one generation."""

    def __init__(self, readers: Readers, generation: int, microbatches: int) -> None:
        self._readers = readers
        self._generation = generation
        self._microbatches = microbatches
        self._notes: dict[int, bytes] = {}
        """Packed notes of steps that some group has yet to be told of."""

    def plan_arrived(self, plan: StepPlan, state: bytes) -> None:
        """Pack a step's note now: when its first slot is filled, ranks wait for it.

        Args:
            plan: The step.
            state: The whole state after it, every 64th step; else empty, and ranks get the
                difference.
        """
        self._notes[plan.step] = pack(self._step_note(plan, state))

    def publish(self, readers: Iterable[int], filled: Filled) -> None:
        """Announce slots of a group, and the steps that begin with them, in order."""
        steps = iter(filled.new_steps)
        for publication in filled.publications:
            event = RingEvent(
                READY,
                publication.slot,
                publication.sequence,
                self._generation,
                publication.payload_bytes,
            )
            if publication.sequence % self._microbatches == 0:
                self._announce(next(steps), event, readers)
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
        }
        packets = list(encode_control(note))
        for rank in readers:
            self._readers.send_reader_message(rank, packets)

    def _announce(self, plan: StepPlan, event: RingEvent, readers: Iterable[int]) -> None:
        """Tell a group of a step and of its first microbatch, in one packet where they fit."""
        note = self._notes[plan.step]
        self._notes.pop(plan.step - NOTES_KEPT, None)
        packet = encode_ready_with_note(event, note)
        if packet is not None:
            for rank in readers:
                self._readers.send_reader_packet(rank, packet)
            return
        packets = [*encode_packed(note), event.encode()]
        for rank in readers:
            self._readers.send_reader_message(rank, packets)

    def _step_note(self, plan: StepPlan, state: bytes) -> dict[str, Any]:
        return {
            "note": "step",
            "generation": self._generation,
            "step": plan.step,
            "plan_step": plan.plan_step,
            "valid_tokens": plan.valid_tokens,
            "valid_segments": plan.valid_segments,
            "microbatches": self._microbatches,
            "delta": b"" if state else plan.delta_bytes,
            "state": state,
            "stats": {
                "imbalance": plan.imbalance,
                "fill": plan.fill_ratio,
                "carried_tokens": plan.carried_tokens,
                "drawn_tokens": plan.drawn_tokens.tolist(),
                "valid_tokens": plan.source_valid_tokens.tolist(),
                "wanted_shares": plan.wanted_shares.tolist(),
                "realised_shares": plan.realised_shares.tolist(),
            },
        }
