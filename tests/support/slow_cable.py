"""A slow and lossy cable in user space: carries frames between two interfaces, later, or never.

Run in the switch's namespace: `python -m tests.support.slow_cable NEAR FAR`; each line on its input
says `DELAY_S LOSS` from then on. Frames carry their offload headers (PACKET_VNET_HDR), so whatever
the hosts' stacks left to their cards passes as it is. Losses are drawn from a fixed seed.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_IGNORE_OUTGOING = 23
PACKET_VNET_HDR = 15
OUTGOING = 4
FRAME_BYTES_MAX = 1 << 17


def open_end(interface: str) -> socket.socket:
    """Return a raw socket that gives what comes in at an interface, offload headers in front."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        end.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
    end.bind((interface, 0))
    end.setblocking(False)
    return end


def main() -> None:
    """Carry frames until the input ends."""
    near, far = (open_end(name) for name in sys.argv[1:3])
    other = {near: far, far: near}
    rng = random.Random(1)
    delay_s, loss, number = 0.0, 0.0, 0
    queue: list[tuple[float, int, socket.socket, bytes]] = []
    print("up", flush=True)
    while True:
        wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, _, _ = select.select([near, far, sys.stdin], [], [], wait_s)
        for end in ready:
            if not isinstance(end, socket.socket):
                line = sys.stdin.readline()
                if not line:
                    return
                delay_s, loss = map(float, line.split())
                continue
            while True:
                try:
                    frame, source = end.recvfrom(FRAME_BYTES_MAX)
                except BlockingIOError:
                    break
                if source[2] == OUTGOING or rng.random() < loss:
                    continue
                number += 1
                heapq.heappush(queue, (time.monotonic() + delay_s, number, other[end], frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(queue)
            try:
                end.send(frame)
            except (BlockingIOError, OSError):
                continue  # as cards do whose queue is full, and cables that are out


if __name__ == "__main__":
    main()
