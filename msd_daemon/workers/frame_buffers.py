"""Buffers that data frames are gathered into, used again once the library has let go of them.

Fresh memory for every frame would cost as much as the gather: its pages are faulted in each time.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import zmq

BUFFERS_OF_PEER_MAX = 8
"""A peer that does not read holds no more than these."""


class FrameBuffers:
    """A bounded set of buffers of one size.

    Args:
        frame_bytes: Of each.
    """

    def __init__(self, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.buffers_max = BUFFERS_OF_PEER_MAX
        self._free: list[memoryview] = []
        self._made = 0
        self._out: deque[tuple[str, memoryview, zmq.MessageTracker]] = deque()
        self._held: Counter[str] = Counter()

    def allow_peers(self, count: int) -> None:
        """Let there be so many buffers that some are left where a few peers hold all they may."""
        self.buffers_max = BUFFERS_OF_PEER_MAX + 2 * count

    def take(self) -> memoryview | None:
        """Return a free buffer, None where all are under way."""
        if not self._free:
            self.reclaim()
        if self._free:
            return self._free.pop()
        if self._made >= self.buffers_max:
            return None
        self._made += 1
        return np.empty(self.frame_bytes, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Take back a buffer that was not sent."""
        self._free.append(buffer)

    def sent(self, peer: str, buffer: memoryview, tracker: zmq.MessageTracker) -> None:
        """Take note that a buffer is under way to a peer."""
        self._out.append((peer, buffer, tracker))
        self._held[peer] += 1

    def busy(self) -> set[str]:
        """Return the peers that hold as many buffers as they may."""
        if any(count >= BUFFERS_OF_PEER_MAX for count in self._held.values()):
            self.reclaim()
        return {peer for peer, count in self._held.items() if count >= BUFFERS_OF_PEER_MAX}

    def reclaim(self) -> None:
        """Take back the buffers that were let go of."""
        for _ in range(len(self._out)):
            peer, buffer, tracker = self._out.popleft()
            if not tracker.done:
                self._out.append((peer, buffer, tracker))
                continue
            self._free.append(buffer)
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]
