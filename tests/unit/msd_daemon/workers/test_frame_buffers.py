"""Buffers of data frames: bounded, used again, and no peer holds them all."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass

from msd_daemon.workers.frame_buffers import BUFFERS_OF_PEER_MAX, FrameBuffers


@dataclass
class Tracker:
    done: bool = False


def send_all(buffers: FrameBuffers, peer: str) -> list[Tracker]:
    """Send until a peer may have no more, or no buffer is left."""
    trackers = []
    while peer not in buffers.busy() and (buffer := buffers.take()) is not None:
        trackers.append(Tracker())
        buffers.sent(peer, buffer, trackers[-1])
    return trackers


def test_a_peer_that_does_not_read_holds_its_share_and_leaves_some() -> None:
    buffers = FrameBuffers(100)
    buffers.allow_peers(3)
    trackers = send_all(buffers, "a")
    assert len(trackers) == BUFFERS_OF_PEER_MAX
    assert buffers.busy() == {"a"}
    others = send_all(buffers, "b")
    assert len(others) == 6
    assert buffers.take() is None
    others[0].done = True
    assert buffers.take() is not None
    trackers[3].done = True
    assert buffers.busy() == set()


def test_a_buffer_that_was_let_go_of_is_the_next_one() -> None:
    buffers = FrameBuffers(100)
    first, tracker = buffers.take(), Tracker()
    assert first is not None
    assert len(first) == 100
    buffers.sent("a", first, tracker)
    assert buffers.take() is not first
    tracker.done = True
    assert buffers.take() is first
    buffers.give_back(first)
    assert buffers.take() is first


def test_memory_is_kept_where_the_library_can() -> None:
    code = "from msd_daemon.workers.kept_memory import keep_memory; print(keep_memory(64 << 20))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(platform.libc_ver()[0] == "glibc")
