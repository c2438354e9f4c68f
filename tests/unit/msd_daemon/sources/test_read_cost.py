"""What a loader's work took: CPU, the user's code, and waiting apart."""

import threading
import time
from pathlib import Path

from msd_daemon.shm.mark_page import InFlight
from msd_daemon.sources.record_guard import SourceGuard, timed_outside
from msd_daemon.sources.run_delay import run_delay_ns
from tests.support.sources import json_lines, make_loader, make_spec


def test_time_in_the_users_code_is_counted_as_theirs_faults_included() -> None:
    guard = SourceGuard(in_flight=InFlight())

    def fail() -> None:
        raise KeyError

    for call in (lambda: time.sleep(0.01), fail):
        try:
            timed_outside(guard.in_flight, call)()
        except KeyError:
            continue
    assert guard.in_flight.user_ns >= 10_000_000


def test_the_run_delay_of_each_thread_is_its_own_and_never_falls() -> None:
    first = run_delay_ns()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(run_delay_ns()))
    thread.start()
    thread.join()
    assert run_delay_ns() >= first >= 0
    assert found[0] >= 0


def test_a_chunk_comes_with_what_it_cost_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["some text"] * 50))
    loader = make_loader(make_spec([path]))
    loader.seek(0, 0)
    draft = loader.next_chunk(1 << 16)
    assert draft is not None
    cost = loader.take_cost()
    assert cost.cpu_ns > 0
    assert cost.read_bytes > 0
    assert cost.user_ns == 0
    assert loader.take_cost() == (0, 0, 0, 0)
    loader.close()
