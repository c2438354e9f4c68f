"""The state folder's disk is full, its journal damaged: the stream waits, or goes on, the same."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import StateMismatchError
from tests.support.ledger import read_ledger
from tests.support.ledger_case import Case, make_case
from tests.support.node import Node, running_node, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any) -> Case:
    rng = np.random.default_rng(5)
    lengths = {"only": [rng.integers(0, 200, 400).tolist() for _ in range(3)]}
    batch = {"rows": 8, "row_tokens": 128, "microbatch_rows": 1}
    return make_case(tmp_path_factory.mktemp("full"), lengths, batch)


def journal_of(node: Node) -> Path:
    (path,) = (node.folder / "state" / "jobs").glob("*/journal.db")
    return path


def stalled(node: Node) -> str:
    (job,) = node.request("status")["jobs"]
    return str(job.get("journal_stalled", ""))


def test_a_planner_that_may_write_no_byte_waits_until_it_may(start_node: Any, case: Case) -> None:
    node: Node = start_node()
    seen: list[str] = []

    def act(data: Any, step: Any) -> None:
        if data.rank or step.number != 6:
            return
        planner = node.child("msd-planner").pid
        limits = resource.prlimit(planner, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))

        def free() -> None:
            wait_until(lambda: bool(stalled(node)), "the planner to say that it waits")
            seen.append(stalled(node))
            resource.prlimit(planner, resource.RLIMIT_FSIZE, limits)

        threading.Thread(target=free).start()

    ledger = read_ledger(node, case.corpus, case.job, {"dp": 2}, 60, on_step=act)
    ledger.check_equals(case.wanted(60))
    assert "make room on its disk" in seen[0]
    assert node.log.count("waits: journal") == 1  # said once
    assert node.log.count("its journal is written again") == 1


def test_a_planner_that_dies_while_it_may_not_write_is_replaced(
    start_node: Any, case: Case
) -> None:
    node: Node = start_node()

    def act(data: Any, step: Any) -> None:
        if step.number != 6:
            return
        first = node.child("msd-planner")
        resource.prlimit(first.pid, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))

        def replace() -> None:
            wait_until(lambda: bool(stalled(node)), "the planner to say that it waits")
            first.kill()

        threading.Thread(target=replace).start()

    ledger = read_ledger(node, case.corpus, case.job, {"dp": 1}, 60, on_step=act)
    ledger.check_equals(case.wanted(60))


def fill(path: Path) -> None:
    """Write a file until its disk has no room."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0755", "none", str(folder)],
        check=False,
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_and_is_freed_changes_nothing(
    tmp_path: Path, case: Case, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    with running_node(tmp_path / "node", "--state-dir", str(small_disk)) as node:

        def act(data: Any, step: Any) -> None:
            if step.number != 6:
                return
            fill(filler)

            def free() -> None:
                wait_until(lambda: bool(stalled(node)), "the planner to say that it waits")
                filler.unlink()

            threading.Thread(target=free).start()

        ledger = read_ledger(node, case.corpus, case.job, {"dp": 1}, 60, on_step=act)
        ledger.check_equals(case.wanted(60))
        for job, state in ((case.job | {"name": "other"}, None), (case.job, ledger.state(30))):
            fill(filler)
            waits = node.log.count("waits: journal") + 1

            def free(waits: int = waits) -> None:  # a start waits for room, too
                wait_until(lambda: node.log.count("waits: journal") == waits, "a start to wait")
                filler.unlink()

            thread = threading.Thread(target=free)
            thread.start()
            again = read_ledger(node, case.corpus, job, {"dp": 1}, 5, state=state)
            thread.join()
            again.check_equals(case.wanted(40))


@pytest.mark.parametrize("what", ["cut", "flipped", "empty", "folder"])
def test_a_job_goes_on_from_its_state_whatever_became_of_the_journal(
    start_node: Any, case: Case, what: str
) -> None:
    case = Case(case.corpus, case.job | {"name": f"damage-{what}"}, case.sources)
    node: Node = start_node()
    first = read_ledger(node, case.corpus, case.job, {"dp": 1}, 40)
    wait_until(node.is_at_rest, node.holdings)
    path = journal_of(node)
    data = bytearray(path.read_bytes())
    if what == "cut":
        path.write_bytes(data[: len(data) // 3])
    elif what == "flipped":
        for place in range(100, len(data), 997):
            data[place] ^= 0x55
        path.write_bytes(data)
    elif what == "empty":
        path.write_bytes(b"")
    else:
        os.unlink(path)
        path.mkdir()
    again = read_ledger(node, case.corpus, case.job, {"dp": 2}, 20, state=first.state(20))
    again.check_equals(case.wanted(40))
    assert again.states[40] == first.states[40]
    is_aside = path.with_name("journal.db.damaged-1").exists()
    assert is_aside == (what != "empty")
    assert ("journal.db.damaged-1" in node.log) == is_aside


def test_a_state_of_other_samples_is_refused_before_the_journal_is_touched(
    start_node: Any, case: Case
) -> None:
    node: Node = start_node()
    first = read_ledger(node, case.corpus, case.job, {"dp": 1}, 5)
    with pytest.raises(StateMismatchError):
        read_ledger(node, case.corpus, case.job | {"seed": 99}, {"dp": 1}, 3, state=first.state(5))
