"""Main of a data constructor: gathers microbatches from the pool into ring slots.

It maps the pool read-only and the rings for writing, and imports neither pyarrow nor a tokenizer.
One blocking loop over its link; a task is one slot.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import InternalError, MsdError, encode_error
from msd_client.contract.ring_layout import RingLayout
from msd_daemon.gather.encode_columns import EncodeColumns
from msd_daemon.gather.group_column import GROUP_BYTES, decode_groups
from msd_daemon.gather.segment_columns import SEGMENT_BYTES, SegmentColumns
from msd_daemon.shm.mapping import Mapping, map_read_only, map_read_write
from msd_daemon.shm.ring_writer import RingWriter
from msd_daemon.workers.frame_link import FrameLink, encode_frame
from msd_daemon.workers.messages import FILLED, TASK_HEAD, FromConstructor, ToConstructor
from msd_daemon.workers.microbatch_builder import MicrobatchBuilder, MicrobatchTask

SHORT_BUILD_NS = 100_000
"""Answers of builds shorter than this may wait for the next one, where its order is here already:
waking the daemon costs as much as such a build."""
ANSWERS_MAX = 4


def run(sock: socket.socket) -> None:
    """Serve one daemon link until it closes.

    Raises:
        LinkClosed: The daemon is gone or wants this constructor to leave.
    """
    Constructor(FrameLink(sock)).serve()


class Constructor:
    """One process; borrows pool and rings."""

    def __init__(self, link: FrameLink) -> None:
        self._link = link
        self._pool: Mapping | None = None
        self._rings: dict[int, tuple[MicrobatchBuilder, Mapping, int]] = {}
        self._answers: list[bytes] = []

    def serve(self) -> None:
        """Carry out orders one after the other."""
        while True:
            kind, body, fds = self._link.receive()
            if kind != ToConstructor.BUILD:
                self._send_answers()
            self._handle(kind, body, fds)

    def _handle(self, kind: int, body: bytes, fds: list[int]) -> None:
        match ToConstructor(kind):
            case ToConstructor.BUILD:
                self._build(body)
            case ToConstructor.SETUP:
                (fd,) = fds
                self._pool = map_read_only(fd, unpack_map(body)["pool_bytes"], should_populate=True)
                os.close(fd)
                self._link.send(FromConstructor.READY, pack({"pid": os.getpid()}))
            case ToConstructor.RING:
                self._add_ring(unpack_map(body), fds)
            case ToConstructor.DROP_RINGS:
                for builder, mapping, _ in self._rings.values():
                    builder.close()
                    mapping.close()
                self._rings.clear()
                self._link.send(FromConstructor.DROPPED, body)

    def _add_ring(self, order: dict[str, Any], fds: list[int]) -> None:
        assert self._pool is not None
        (fd,) = fds
        # The pages exist: populating them here only fills this process's page tables.
        mapping = map_read_write(fd, order["nbytes"])
        os.close(fd)
        writer = RingWriter(mapping, RingLayout.decode(order["layout"]))
        builder = MicrobatchBuilder(self._pool, writer, BatchSpec.decode(order["spec"]))
        self._rings[order["ring"]] = (builder, mapping, order["generation"])

    def _build(self, body: bytes) -> None:
        (
            ring,
            slot,
            sequence,
            generation,
            step,
            plan_step,
            microbatch,
            count,
            valid,
            row_tokens,
            modalities,
        ) = TASK_HEAD.unpack_from(body)
        known = self._rings.get(ring)
        if known is None or known[2] != generation:
            return  # an order of a generation whose rings were dropped
        began = time.monotonic_ns()
        try:
            segments = SegmentColumns.decode(body, count, TASK_HEAD.size)
            at = TASK_HEAD.size + count * SEGMENT_BYTES
            has_groups = known[0].spec.has_groups
            groups = decode_groups(body, count, at) if has_groups else None
            at += GROUP_BYTES * count if has_groups else 0
            task = MicrobatchTask(
                slot, sequence, step, plan_step, microbatch, segments, valid, row_tokens,
                EncodeColumns.decode(body, count, modalities, at) if modalities else None, groups,
            )  # fmt: skip
            payload_bytes = known[0].build(task)
        except MsdError as error:
            self._fail(ring, slot, sequence, error)
            return
        except ValueError as error:
            self._fail(ring, slot, sequence, InternalError(f"gather of step {step}: {error}"))
            return
        taken = time.monotonic_ns() - began
        answer = FILLED.pack(ring, slot, sequence, generation, payload_bytes, taken)
        self._answers.append(encode_frame(FromConstructor.FILLED, answer))
        if taken > SHORT_BUILD_NS or len(self._answers) >= ANSWERS_MAX or not self._link.pending():
            self._send_answers()

    def _send_answers(self) -> None:
        answers, self._answers = self._answers, []
        if answers:
            self._link.send_frames(answers)

    def _fail(self, ring: int, slot: int, sequence: int, error: MsdError) -> None:
        self._send_answers()
        answer = {"ring": ring, "slot": slot, "sequence": sequence, "error": encode_error(error)}
        self._link.send(FromConstructor.FAILED, pack(answer))
