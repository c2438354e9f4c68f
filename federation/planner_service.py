"""The planner process: plans every job of its nodes, one step after the other, and journals first.

Root of its own process: one blocking loop over a ROUTER socket and the link to whoever started it
(end of file there means: leave). Several steps are planned per call, committed in one transaction
and sent in one message. What is planned is in federation.planning, one generation's way in federation.job_planning.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import zmq

from federation.faults import failure_of
from federation.job_planning import JobPlanning, Tell
from federation.journal_files import may_pass
from federation.messages import (
    CloseJob,
    Envelope,
    JobFailed,
    Message,
    OpenJob,
    decode_envelope,
)
from federation.transport import SequenceGuard, prepare_socket
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import (
    JournalUnavailableError,
    MsdError,
    ProtocolError,
    encode_error,
)

log = logging.getLogger(__name__)

RETRY_MS = 300
"""Between tries to write, or to open, a journal that could not be."""
OPEN_WAIT_S = 45.0
"""So long a generation that begins waits for room on its journal's disk; daemons wait longer."""


def run(link: socket.socket) -> None:
    """Serve until the starter's end of `link` closes.

    The link first carries one msgpack map, length-prefixed (u32): {endpoint, term}; the answer is
    one byte once the endpoint is bound.
    """
    size = int.from_bytes(_read_exactly(link, 4), "little")
    config = unpack_map(_read_exactly(link, size))
    context = zmq.Context(io_threads=1)
    router = context.socket(zmq.ROUTER)
    try:
        prepare_socket(router)
        router.bind(config["endpoint"])
        link.sendall(b"r")
        PlannerService(router, link, config["term"]).serve()
    finally:
        router.close(linger=0)
        context.term()


def _read_exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise SystemExit(0)
        data += part
    return data


class _Open(NamedTuple):
    """A generation that is planned, or waits for its journal."""

    identity: bytes
    generation: int
    planning: JobPlanning | None
    """None while its journal can't be written."""
    order: OpenJob
    give_up_ns: int
    """Of the monotonic clock: a generation that begins waits no longer than this."""


class PlannerService:
    """Plans the jobs of the daemons that write to its ROUTER socket."""

    def __init__(self, router: zmq.Socket[bytes], link: socket.socket, term: int) -> None:
        self._router = router
        self._link = link
        self._term = term
        self._jobs: dict[str, _Open] = {}
        self._guards: dict[bytes, SequenceGuard] = {}
        self._sequences: dict[bytes, int] = {}

    def serve(self) -> None:
        """Serve until the link closes."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._link, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(RETRY_MS if self._waiting() else None))
            if self._link.fileno() in ready:
                return
            touched: dict[str, None] = {}
            while True:
                try:
                    frames = self._router.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                job = self._receive(frames)
                if job is not None:
                    touched[job] = None
            for job in {**touched, **dict.fromkeys(self._waiting())}:
                found = self._jobs.get(job)
                if found is not None:
                    self._guarded(
                        job, found.identity, found.generation, partial(self._advance, job)
                    )

    def _waiting(self) -> list[str]:
        """Return the jobs that wait until their journal can be written."""
        return [
            job
            for job, found in self._jobs.items()
            if found.planning is None or found.planning.stalled
        ]

    def _advance(self, job: str) -> None:
        found = self._jobs[job]
        if found.planning is None:
            self._try_to_open(job, found)
        else:
            found.planning.advance()

    def _receive(self, frames: list[bytes]) -> str | None:
        identity, *rest = frames
        try:
            envelope = decode_envelope(rest)
            self._guards.setdefault(identity, SequenceGuard(repr(identity))).check(
                envelope.sequence
            )
        except ProtocolError as error:
            failure = JobFailed(encode_error(error))
            self._send(identity, "", 0, failure)
            return None
        self._guarded(
            envelope.job, identity, envelope.generation, partial(self._handle, identity, envelope)
        )
        return envelope.job

    def _guarded(
        self, job: str, identity: bytes, generation: int, action: Callable[[], None]
    ) -> None:
        failure = failure_of(action)
        if failure is not None:
            self._fail(job, identity, generation, failure)

    def _fail(self, job: str, identity: bytes, generation: int, error: MsdError) -> None:
        found = self._jobs.get(job)
        if found is not None and found.planning is not None:
            found.planning.fail(error)
            return
        if found is not None:
            del self._jobs[job]
        self._send(identity, job, generation, JobFailed(encode_error(error)))

    def _send(
        self,
        identity: bytes,
        job: str,
        generation: int,
        message: Message,
        frames: tuple[bytes, ...] = (),
    ) -> None:
        sequence = self._sequences.get(identity, 0)
        self._sequences[identity] = sequence + 1
        envelope = Envelope(job, generation, self._term, sequence, message, frames)
        self._router.send_multipart([identity, *envelope.encode()])

    def _handle(self, identity: bytes, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, OpenJob):
            self._open(identity, envelope, message)
            return
        found = self._jobs.get(envelope.job)
        if found is None or found.generation != envelope.generation:
            return  # a message of a generation that ended meanwhile
        if isinstance(message, CloseJob):
            del self._jobs[envelope.job]
            if found.planning is not None:
                found.planning.close()
        elif found.planning is not None:
            found.planning.take(message, envelope.frames)

    def _open(self, identity: bytes, envelope: Envelope, order: OpenJob) -> None:
        old = self._jobs.pop(envelope.job, None)
        if old is not None and old.planning is not None:
            old.planning.close()
        give_up_ns = time.monotonic_ns() + int(OPEN_WAIT_S * 1e9)
        found = _Open(identity, envelope.generation, None, order, give_up_ns)
        self._try_to_open(envelope.job, found)

    def _try_to_open(self, job: str, found: _Open) -> None:
        """Begin a generation, or go on with one; tried again while its journal can't be written."""
        is_new = found.order.resume_step is None
        make = JobPlanning.begin if is_new else JobPlanning.take_over
        try:
            planning = make(found.order, self._term, self._teller(job, found))
        except JournalUnavailableError as error:
            if is_new and (not may_pass(error) or time.monotonic_ns() > found.give_up_ns):
                raise
            if job not in self._jobs:
                log.warning("job %s waits: %s", job, error.message)
            self._jobs[job] = found
            return
        if job in self._jobs:
            log.warning("job %s goes on: its journal is written again", job)
        self._jobs[job] = found._replace(planning=planning)

    def _teller(self, job: str, found: _Open) -> Tell:
        def tell(message: Message, frames: tuple[bytes, ...]) -> None:
            self._send(found.identity, job, found.generation, message, frames)

        return tell
