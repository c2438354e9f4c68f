"""What a cluster's planner costs: 64 simulated nodes of 64 ranks, 306 sources, the real service.

Nodes are simulated in the process (they feed record lengths and release steps at once); what is
timed is the planner's side alone, from decoding messages to encoding each node's part, with a journal
on SQLite. Bytes are those of messages before the reliable session's headers and encryption.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.planner import SEED, lengths_of_sources, make_job, peak_bytes
from federation.cluster_events import Message, PeerTraffic, PeerUp
from federation.cluster_messages import BeginGeneration, NodeReady, RanksStarted
from federation.cluster_service import ClusterService
from federation.messages import (
    Envelope,
    JobFailed,
    JobOpened,
    PlansMade,
    StepReleased,
    decode_envelope,
    decode_parts,
    encode_chunks,
)
from federation.messages import Message as Order
from federation.model.job import encode_job
from federation.planning.step_change import first_state
from federation.simulation.statistic_feed import BLOCK_RECORDS, StatisticFeed
from federation.store.open_store import open_store
from msd_client.contract.codec import pack

NODES, NODE_RANKS = 64, 64
HORIZON_STEPS = 8
AHEAD_STEPS = 2 * HORIZON_STEPS
STEPS, STEPS_QUICK = 48, 16
WARM_STEPS = 8
JOB = "bench"
MIB = 1 << 20


class Wire:
    """A router whose nodes are in this process; counts what goes over it."""

    def __init__(self, nodes: int) -> None:
        self._names = [f"n{number:02}" for number in range(nodes)]
        self.sent: deque[tuple[str, list[bytes]]] = deque()
        self.bytes_out = self.bytes_in = self.messages = 0

    def hellos(self) -> dict[str, dict[str, Any]]:
        return {}

    def traffic(self) -> list[PeerTraffic]:
        return []

    def drop(self, node: str, reason: str) -> None:
        raise RuntimeError(f"{node}: {reason}")

    def send(self, node: str, frames: Sequence[bytes]) -> bool:
        self.bytes_out += sum(map(len, frames))
        self.messages += 1
        self.sent.append((node, list(frames)))
        return True


class SimulatedNodes:
    """All nodes of the cluster: they feed what they own, and release what they are told."""

    def __init__(self, nodes: int, ranks: int) -> None:
        self.job = make_job(ranks)
        self.names = [f"n{number:02}" for number in range(nodes)]
        self.ranks = np.array_split(np.arange(ranks), nodes)
        self._lengths = lengths_of_sources()
        self._feed = StatisticFeed(self._lengths, SEED)
        means = np.array([source.lengths.mean() for source in self._lengths])
        schedule = np.array(list(self.job.mixture.points[0].weights.values()))
        per_step = (
            self.job.batch.rows * self.job.batch.row_tokens * schedule / schedule.sum() / means
        )
        self._wanted = (AHEAD_STEPS * per_step).astype(np.int64) + 64
        self._fed = np.zeros(len(means), np.int64)
        self._drawn = np.zeros(len(means), np.int64)
        self._owner: dict[int, str] = {}
        self.steps = -1
        self._told: dict[str, int] = {}
        self._sequence = 0

    def begin(self, mesh: list[list[Any]]) -> list[Any]:
        state = first_state(self.job).encode()
        digest = hashlib.sha256(state).hexdigest()
        events: list[Any] = [
            PeerUp(name, number, {"loader_workers": 4}) for number, name in enumerate(self.names)
        ]
        packed = pack(encode_job(self.job))
        for name, ranks in zip(self.names, self.ranks, strict=True):
            own = ranks.tolist()
            message = RanksStarted(
                "bench", self.job.digest(), mesh, "", own, own, [], [digest] * len(own), 0,
                HORIZON_STEPS, 1000,
            )  # fmt: skip
            frames = (packed, state) if name == self.names[0] else ()
            events.append(self._event(name, 0, message, frames))
        return events

    def _event(
        self, name: str, generation: int, message: Order, frames: tuple[bytes, ...] = ()
    ) -> Message:
        self._sequence += 1
        envelope = Envelope(JOB, generation, 1, self._sequence, message, frames)
        return Message(name, envelope.encode())

    def hear(self, name: str, frames: list[bytes]) -> list[Message]:
        envelope = decode_envelope(frames)
        message, number = envelope.message, envelope.generation
        match message:
            case BeginGeneration():
                self._owner = {
                    source: message.nodes[nodes[0]] for source, nodes in enumerate(message.owners)
                }
                return [self._event(name, number, NodeReady())]
            case JobOpened() if name == self.names[0]:
                return self._feed_all(number)
            case JobFailed():
                raise RuntimeError(message.error)
            case PlansMade():
                last = message.headers[-1]["step"]
                self._told[name] = last
                events = [self._event(name, number, StepReleased(last))]
                if name == self.names[0]:
                    for plan, _ in decode_parts(message, envelope.frames):
                        self._drawn += plan.drawn_samples
                    self.steps = last
                    events += self._feed_all(number)
                return events
            case _:
                return []

    def _feed_all(self, generation: int) -> list[Message]:
        """Return the chunks that bring every source as far ahead as loaders are."""
        by_node: dict[str, list[Any]] = {}
        missing = -(-np.maximum(self._wanted - (self._fed - self._drawn), 0) // BLOCK_RECORDS)
        for source in np.flatnonzero(missing).tolist():
            for _ in range(int(missing[source])):
                meta = self._feed.next_block(source)
                self._fed[source] += len(meta.lengths)
                by_node.setdefault(self._owner[source], []).append(meta)
        return [
            self._event(node, generation, *encode_chunks(metas)) for node, metas in by_node.items()
        ]


def measure(nodes: int, node_ranks: int, steps: int) -> dict[str, Any]:
    """Have the service plan so many steps; return seconds of its CPU and bytes a step."""
    ranks = nodes * node_ranks
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite://{folder}/plan.db", Path(folder))
        assert store.campaign("bench", "inproc") == 1
        wire = Wire(nodes)
        service = ClusterService(wire, store, 1)
        cluster = SimulatedNodes(nodes, ranks)
        events: list[Any] = cluster.begin([["dp", ranks]])
        cpu_s = 0.0
        marks: list[tuple[int, float, int, int]] = []
        while cluster.steps < WARM_STEPS + steps:
            wire.bytes_in += sum(
                sum(map(len, event.frames)) for event in events if isinstance(event, Message)
            )
            begun = time.process_time()
            service.handle(events)
            cpu_s += time.process_time() - begun
            events = []
            while wire.sent:
                events += cluster.hear(*wire.sent.popleft())
            if cluster.steps >= WARM_STEPS and (not marks or cluster.steps > marks[-1][0]):
                marks.append((cluster.steps, cpu_s, wire.bytes_out, wire.bytes_in))
        service.close()
        store.close()
    rates = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in itertools.pairwise(marks)
    ]
    first, last = marks[0], marks[-1]
    count = last[0] - first[0]
    return {
        "step_cpu_ms": 1e3 * statistics.median(rates),
        "steps_per_s": 1 / statistics.median(rates),
        "bytes_out_per_step": (last[2] - first[2]) / count,
        "bytes_in_per_step": (last[3] - first[3]) / count,
        "rss_mib": peak_bytes() / MIB,
    }


def run_planner(*, is_quick: bool, say: Callable[..., None]) -> dict[str, float]:
    """Return the planner's figures, measured in a process of its own."""
    steps = STEPS_QUICK if is_quick else STEPS
    command = [sys.executable, "-m", "bench.cluster_planner", str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ)
    found = json.loads(output.stdout)
    say(
        f"  {found['step_cpu_ms']:.0f} ms of CPU a step, {found['bytes_out_per_step'] / MIB:.2f} MiB "
        f"to all nodes and {found['bytes_in_per_step'] / MIB:.2f} MiB from them, {found['rss_mib']:.0f} MiB"
    )
    return {
        "planner_steps_per_s_4096": found["steps_per_s"],
        "planner_cpu_ms_per_step_4096": found["step_cpu_ms"],
        "control_bytes_out_per_step_64x64": found["bytes_out_per_step"],
        "control_bytes_in_per_step_64x64": found["bytes_in_per_step"],
        "planner_rss_mib_4096": found["rss_mib"],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(NODES, NODE_RANKS, int(sys.argv[1]))))
