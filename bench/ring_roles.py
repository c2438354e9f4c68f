"""Constructor and reader processes of the ring bench: the real pieces, with stamps.

    python -m bench.ring_roles constructor|reader ARGUMENTS

They write JSON lines and leave when the hub (bench/ring_hub.py) closes their links.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from msd_daemon.workers.frame_link import HEAD, FrameLink, LinkClosed
from msd_daemon.workers.messages import FromConstructor, ToConstructor

WAIT_S = 30.0
HOLD_S = 0.001
"""A trainer keeps its batch while it computes: no release comes while others still wake up."""


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class StampedLink(FrameLink):
    """A constructor's link that paces its orders and stamps what it commits."""

    def __init__(self, sock: socket.socket, pace_s: float) -> None:
        super().__init__(sock)
        self._pace_s = pace_s
        self._filled_at = time.monotonic()
        self.stamps_ns: list[int] = []

    def receive(self) -> tuple[int, bytes, list[int]]:
        frame = super().receive()
        if frame[0] == ToConstructor.BUILD:
            # Slots are far apart, so that every queue is empty: a wake-up, not a throughput.
            time.sleep(max(self._filled_at + self._pace_s - time.monotonic(), 0.0))
        return frame

    def send_frames(self, frames: list[bytes]) -> None:
        filled = sum(HEAD.unpack_from(frame)[1] == FromConstructor.FILLED for frame in frames)
        self.stamps_ns += [time.monotonic_ns()] * filled
        super().send_frames(frames)
        self._filled_at = time.monotonic()


def run_constructor(options: argparse.Namespace) -> None:
    """Run the daemon's real constructor on a link that stamps."""
    from msd_daemon.workers.constructor_main import Constructor

    link = StampedLink(socket.socket(fileno=options.fd), options.pace_ms / 1e3)
    try:
        Constructor(link).serve()
    except LinkClosed:
        tell(stamps_ns=link.stamps_ns)


def run_reader(options: argparse.Namespace) -> None:
    """Read every slot as a trainer does; tell when each was taken, opened and viewed."""
    from msd_client.batch import Batch
    from msd_client.contract.batch_spec import BatchSpec
    from msd_client.contract.errors import DeadlineError
    from msd_client.contract.ring_layout import RingLayout
    from msd_client.ring_reader import RingReader
    from msd_client.session import Session

    session = Session(Path(options.socket), "trainer")
    reply = session.request("join", WAIT_S, rank=options.rank)
    body, (fd,) = reply.body["ok"], reply.fds
    generation = body["generation"]
    reader = RingReader(
        fd,
        RingLayout.decode(body["layout"]),
        on_release=lambda slot, sequence: session.release(slot, sequence, generation),
    )
    os.close(fd)
    spec = BatchSpec.decode(body["spec"])
    taken_ns, opened_ns, viewed_ns = [], [], []
    cpu_ns = 0
    for count in range(options.count):
        if count == options.warmup:
            tell(at="warm")
            cpu_ns = time.process_time_ns()
        session.wait(lambda: bool(session.ready), WAIT_S, "a slot")
        event = session.ready.popleft()
        taken_ns.append(time.monotonic_ns())
        if options.pause_ms:
            time.sleep(options.pause_ms / 1e3)
        lease = reader.open(event.slot, event.sequence, event.generation, event.payload_bytes)
        opened_ns.append(time.monotonic_ns())
        batch = Batch.from_lease(lease, spec, as_="numpy")
        viewed_ns.append(time.monotonic_ns())
        time.sleep(HOLD_S)
        del lease, batch
    cpu_ns = time.process_time_ns() - cpu_ns
    if options.idle_s:
        tell(at="idle")
        try:
            session.wait(lambda: bool(session.ready), options.idle_s, "a slot that never comes")
        except DeadlineError as error:
            tell(at="deadline", text=error.message)
    session.close()
    tell(taken_ns=taken_ns, opened_ns=opened_ns, viewed_ns=viewed_ns, cpu_ns=cpu_ns)


def main() -> None:
    parser = argparse.ArgumentParser()
    roles = parser.add_subparsers(dest="role", required=True)
    constructor = roles.add_parser("constructor")
    constructor.add_argument("--fd", type=int, required=True)
    constructor.add_argument("--pace-ms", type=float, required=True)
    reader = roles.add_parser("reader")
    reader.add_argument("--socket", required=True)
    reader.add_argument("--rank", type=int, required=True)
    reader.add_argument("--count", type=int, required=True)
    reader.add_argument("--warmup", type=int, required=True)
    reader.add_argument("--idle-s", type=float, default=0.0)
    reader.add_argument("--pause-ms", type=float, default=0.0)
    options = parser.parse_args()
    {"constructor": run_constructor, "reader": run_reader}[options.role](options)


if __name__ == "__main__":
    main()
