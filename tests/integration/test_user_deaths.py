"""A user's transform that dies, hangs, takes too much or is left alone: one record, and no leftover."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import msd_daemon.transforms.user_process as user_process
from msd_client.contract.errors import TransformError
from msd_daemon.transforms.user_process import open_user_call
from tests.support.sources import ROOT
from tests.support.user_code import user_call, wait_gone

pytestmark = pytest.mark.processes

PARTS = """
    import os, subprocess, sys
    def start():
        # A process of a session of its own, whose parent is gone: no group and no parent to find it.
        code = "import os, signal; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); signal.pause()"
        started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        orphan = int(started.stdout.readline())
        started.stdout.close()
        started.wait()
        return [os.getpid(), os.getppid(), orphan]
"""


@pytest.fixture
def opened(tmp_path):
    """Open calls that are closed at the test's end."""
    processes = []

    def open_one(source, **limits):
        rule = user_call(tmp_path / str(len(processes)), source)
        limits = {"memory_bytes_max": 1 << 30, "sample_s_max": 60} | limits
        processes.append(open_user_call(rule, **limits))
        return processes[-1]

    yield open_one
    for process in processes:
        process.close()


@pytest.mark.parametrize(
    ("statement", "status", "told"),
    [
        ("ctypes.string_at(0)", -signal.SIGSEGV, "ended its process by SIGSEGV"),
        ("os.abort()", -signal.SIGABRT, "by SIGABRT"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, "by SIGKILL (out of memory, perhaps)"),
        ("os._exit(0)", 0, "with exit code 0"),
        ("os._exit(77)", 77, "with exit code 77"),
    ],
)
def test_a_process_that_dies_costs_its_record_alone(opened, statement, status, told):
    process = opened(f"""
        import ctypes, os
        def fn(sample, rng):
            if sample["dies"]: {statement}
            return {{"pid": os.getpid()}}
    """)
    (first,) = process.call({"dies": False}, 1)
    with pytest.raises(TransformError) as raised:
        process.call({"dies": True}, 2)
    assert told in raised.value.message
    assert raised.value.attributes["cause"] == "crash"
    assert raised.value.attributes["status"] == status
    assert (raised.value.is_quarantine, raised.value.is_timeout) == (True, False)
    # It was tried in a fresh process too, which has been seen to die of it.
    assert process.starts == 2
    (after,) = process.call({"dies": False}, 3)
    assert process.starts == 3
    assert after["pid"] != first["pid"]


def test_the_line_of_a_crash_in_native_code_is_shown(opened):
    process = opened("import ctypes\ndef fn(sample, rng):\n    ctypes.string_at(0)")
    with pytest.raises(TransformError) as raised:
        process.call({}, 1)
    assert "Fatal Python error: Segmentation fault" in raised.value.message
    assert 'mine.py", line 3 in fn' in raised.value.message
    assert "user_server" not in raised.value.message


def test_a_crash_of_a_process_that_earlier_records_have_worn_out_is_no_records_fault(opened):
    process = opened("""
        import os
        calls = []
        def fn(sample, rng):
            calls.append(1)
            if len(calls) > 2: os._exit(1)
            return sample
    """)
    assert [process.call({"n": n}, n)[0]["n"] for n in range(6)] == list(range(6))
    assert process.starts == 3


def test_a_call_that_takes_too_long_is_ended_and_shows_where_it_was(opened):
    process = opened(
        """
        import os, threading
        def fn(sample, rng):
            if sample["waits"]: threading.Event().wait()
            return {"pid": os.getpid()}
        """,
        sample_s_max=1.0,
    )
    (first,) = process.call({"waits": False}, 1)
    held = os.pidfd_open(first["pid"])
    with pytest.raises(TransformError) as raised:
        process.call({"waits": True}, 2)
    wait_gone([held])
    error = raised.value
    assert "mine:fn took longer than 1 s and was ended" in error.message
    assert 'mine.py", line 4 in fn' in error.message
    assert (error.is_timeout, error.is_quarantine, error.attributes["limit_s"]) == (True, True, 1.0)
    assert process.call({"waits": False}, 3)[0]["pid"] != first["pid"]
    assert process.starts == 2


def test_code_that_lets_go_of_nothing_is_ended_too(opened):
    process = opened(
        "def fn(sample, rng):\n    import re\n    re.match('(a+)+$', 'a' * 64 + 'b')",
        sample_s_max=0.5,
    )
    with pytest.raises(TransformError) as raised:
        process.call({}, 1)
    assert raised.value.is_timeout


def test_output_without_end_does_not_put_off_the_limit(opened):
    process = opened("def fn(sample, rng):\n    while True: print('x' * 1000)", sample_s_max=0.5)
    with pytest.raises(TransformError) as raised:
        process.call({}, 1)
    assert raised.value.is_timeout
    assert len(raised.value.message) < 20_000


def test_memory_over_the_limit_is_the_records_fault_with_its_line(opened):
    process = opened(
        "def fn(sample, rng):\n    held = bytearray(sample['size'])\n    return {'size': len(held)}",
        memory_bytes_max=256 << 20,
    )
    assert process.call({"size": 64 << 20}, 1) == [{"size": 64 << 20}]
    with pytest.raises(TransformError) as raised:
        process.call({"size": 1 << 30}, 2)
    error = raised.value
    assert f"mine:fn needs more than {256 << 20} bytes" in error.message
    assert "line 2, in fn" in error.message
    assert (error.attributes["cause"], error.is_quarantine) == ("memory", True)
    assert process.call({"size": 64 << 20}, 3) == [{"size": 64 << 20}]


def test_memory_that_calls_pile_up_is_no_records_fault(opened):
    process = opened(
        """
        import numpy as np
        kept = []
        def fn(sample, rng):
            kept.append(np.ones(40 << 20, np.uint8))
            return {"n": sample["n"], "kept": len(kept)}
        """,
        memory_bytes_max=256 << 20,
    )
    given = [process.call({"n": n}, n)[0] for n in range(12)]
    assert [one["n"] for one in given] == list(range(12))
    assert max(one["kept"] for one in given) < 7
    assert process.starts >= 2


def test_shared_memory_over_the_limit_replaces_the_process(opened, monkeypatch):
    monkeypatch.setattr(user_process, "MEMORY_CHECK_CALLS", 1)
    process = opened(
        """
        import mmap
        kept = []
        def fn(sample, rng):
            kept.append(mmap.mmap(-1, 160 << 20))
            kept[-1][:] = bytes(160 << 20)
            return {"kept": len(kept)}
        """,
        memory_bytes_max=256 << 20,
    )
    assert [process.call({}, n)[0]["kept"] for n in range(4)] == [1, 2, 1, 2]
    assert process.starts == 2


def test_answers_have_a_limit(opened):
    process = opened(
        "def fn(sample, rng): return {'raw': b'x' * sample['size']}", memory_bytes_max=128 << 20
    )
    assert len(process.call({"size": 20 << 20}, 1)[0]["raw"]) == 20 << 20
    process = opened(
        "def fn(sample, rng): return [{'raw': sample['raw']}] * 40", memory_bytes_max=128 << 20
    )
    with pytest.raises(TransformError) as raised:
        process.call({"raw": bytes(4 << 20)}, 1)
    assert raised.value.attributes["cause"] in ("refused", "memory")


def test_its_memory_is_told(opened):
    process = opened(
        "import numpy as np\nkept = np.ones(64 << 20, np.uint8)\ndef fn(s, r): return s"
    )
    assert process.rss_bytes() == 0
    process.call({}, 1)
    assert 64 << 20 < process.rss_bytes() < 160 << 20
    process.close()
    assert process.rss_bytes() == 0


def test_close_leaves_nothing_behind(opened):
    process = opened(PARTS + "\n    def fn(sample, rng): return {'pids': start()}")
    pids = process.call({}, 1)[0]["pids"]
    held = [os.pidfd_open(pid) for pid in pids]
    process.close()
    wait_gone(held)
    assert not os.path.exists(f"/proc/{pids[1]}"), "the guard is a zombie"


def test_a_process_that_dies_takes_along_what_it_has_started(opened):
    process = opened(
        PARTS
        + """
    def fn(sample, rng):
        if sample["dies"]: os._exit(1)
        return {"pids": start()}
    """
    )
    held = [os.pidfd_open(pid) for pid in process.call({"dies": False}, 1)[0]["pids"]]
    with pytest.raises(TransformError):
        process.call({"dies": True}, 1)
    wait_gone(held)


def test_a_call_that_takes_too_long_takes_along_what_it_has_started(opened, tmp_path):
    process = opened(
        PARTS
        + f"""
    def fn(sample, rng):
        import json, threading
        open({str(tmp_path / "pids")!r}, "w").write(json.dumps(start()))
        threading.Event().wait()
    """,
        sample_s_max=3.0,
    )
    with pytest.raises(TransformError) as raised:
        process.call({}, 1)
    assert raised.value.is_timeout
    pids = json.loads((tmp_path / "pids").read_text())
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


WORKER = """
import json, sys, signal
from federation.model.recipe import UserCall
from msd_daemon.transforms.user_process import open_user_call
process = open_user_call(UserCall(*json.loads(sys.argv[1])), memory_bytes_max=0, sample_s_max=60)
print(json.dumps(process.call({"waits": False}, 1)[0]["pids"]), flush=True)
if sys.argv[2] == "in a call":
    print("calls", flush=True)
    process.call({"waits": True}, 1)
signal.pause()
"""


@pytest.mark.parametrize("when", ["between calls", "in a call"])
@pytest.mark.parametrize("victim", ["worker", "guard"])
def test_nothing_outlives_a_killed_worker_or_guard(tmp_path, when, victim):
    rule = user_call(
        tmp_path,
        PARTS
        + """
    def fn(sample, rng):
        if sample["waits"]:
            import threading
            threading.Event().wait()
        return {"pids": start()}
    """,
    )
    arguments = json.dumps([rule.call, rule.python, rule.folder, rule.digest])
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, arguments, when],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as worker:
        child, guard, orphan = json.loads(worker.stdout.readline())
        if when == "in a call":
            assert worker.stdout.readline() == b"calls\n"
        held = [os.pidfd_open(pid) for pid in (child, guard, orphan)]
        if victim == "worker":
            worker.kill()
            wait_gone(held)
        else:
            os.kill(guard, signal.SIGKILL)
            wait_gone(held[:2])
            os.kill(orphan, signal.SIGKILL)  # the one thing that only a guard can find
            wait_gone(held[2:])
            worker.kill()
