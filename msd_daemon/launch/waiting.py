"""Waiting for the nodes of a launch: until all are ready, or until none is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from msd_client.contract.errors import DeadlineError, ResourceError
from msd_daemon.launch.meeting import NodeNote

LOOK_S = 0.2
NODES_A_SECOND = 500
"""Whose notes are read, of a launch with more nodes than are read in one look's time."""
NAMED_MAX = 8

Look = Callable[[], Mapping[str, NodeNote]]


def wait_ready(
    look: Look, nodes: Sequence[str], trouble: Callable[[], str], timeout_s: float, logs: str
) -> Mapping[str, NodeNote]:
    """Return what the nodes say once all are ready.

    Args:
        look: Returns what they said so far.
        nodes: Their names.
        trouble: Why none will come any more; empty: they may.
        timeout_s: Longest wait.
        logs: Where people find the nodes' logs.

    Raises:
        ResourceError: A node failed, or who starts them ended.
        DeadlineError: Some were not ready in time; they are named.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        ended = trouble()  # before looking: what a node said last counts
        found = look()
        failed = [found[node] for node in nodes if node in found and found[node].state == "failed"]
        if failed:
            lines = [f"node {note.node}: {note.error}" for note in failed[:NAMED_MAX]]
            lines += [f"and {len(failed) - NAMED_MAX} more"] if len(failed) > NAMED_MAX else []
            raise ResourceError("\n  ".join([f"{len(failed)} nodes failed ({logs}):", *lines]))
        late = [node for node in nodes if node not in found or found[node].state != "ready"]
        if not late:
            return found
        if ended:
            raise ResourceError(f"{_late(late, found)} ({logs}): {ended}")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"after {timeout_s:g} s {_late(late, found)} ({logs}): mend them, or wait longer "
                "(--timeout-s)"
            )
        time.sleep(max(LOOK_S, len(nodes) / NODES_A_SECOND))


def _late(late: Sequence[str], found: Mapping[str, NodeNote]) -> str:
    """Say which nodes are not ready: those that said nothing first, since the others wait for them."""
    silent = [node for node in late if node not in found]
    starting = [node for node in late if node in found]
    parts = [f"nodes {_named(silent)} said nothing"] if silent else []
    parts += [f"nodes {_named(starting)} are starting"] if starting else []
    return ", ".join(parts)


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:NAMED_MAX]) + (", ..." if len(nodes) > NAMED_MAX else "")


def wait_over(is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a launch has ended; tell whether it has in that time."""
    deadline = time.monotonic() + timeout_s
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True
