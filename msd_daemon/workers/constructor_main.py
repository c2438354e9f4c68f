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
from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.shm.mapping import Mapping, map_read_only, map_read_write
from msd_daemon.shm.ring_writer import RingWriter
from msd_daemon.workers.frame_link import FrameLink
from msd_daemon.workers.messages import FILLED, TASK_HEAD, FromConstructor, ToConstructor
from msd_daemon.workers.microbatch_builder import MicrobatchBuilder, MicrobatchTask


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

    def serve(self) -> None:
        """Carry out orders one after the other."""
        while True:
            self._handle(*self._link.receive())

    def _handle(self, kind: int, body: bytes, fds: list[int]) -> None:
        match ToConstructor(kind):
            case ToConstructor.BUILD:
                self._build(body)
            case ToConstructor.SETUP:
                (fd,) = fds
                self._pool = map_read_only(
                    fd, unpack_map(body)["pool_bytes"], should_populate=True
                )
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
        ring, slot, sequence, generation, step, plan_step, microbatch, count, valid, _ = (
            TASK_HEAD.unpack_from(body)
        )
        known = self._rings.get(ring)
        if known is None or known[2] != generation:
            return  # an order of a generation whose rings were dropped
        began = time.monotonic_ns()
        try:
            segments = SegmentColumns.decode(body, count, TASK_HEAD.size)
            task = MicrobatchTask(slot, sequence, step, plan_step, microbatch, segments, valid)
            payload_bytes = known[0].build(task)
        except MsdError as error:
            self._fail(ring, slot, sequence, error)
            return
        except ValueError as error:
            self._fail(ring, slot, sequence, InternalError(f"gather of step {step}: {error}"))
            return
        taken = time.monotonic_ns() - began
        answer = FILLED.pack(ring, slot, sequence, generation, payload_bytes, taken)
        self._link.send(FromConstructor.FILLED, answer)

    def _fail(self, ring: int, slot: int, sequence: int, error: MsdError) -> None:
        answer = {"ring": ring, "slot": slot, "sequence": sequence, "error": encode_error(error)}
        self._link.send(FromConstructor.FAILED, pack(answer))
