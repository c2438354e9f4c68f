"""The process that a user's transform runs in: a script, run by the interpreter that a job names.

It needs the standard library alone, and nothing of msd but the two files beside it that the call's
process loads by their paths. Two processes: the first, a guard, forks the second, which
imports and calls the user's function, before anything large is imported. The guard ends everything
that the user's code has started, however that hides, as soon as the call's process ends or the
worker does (it sees the worker's end of the link close, kill -9 too), and then ends as the call's
process did. Should the guard itself be killed, the kernel kills the call's process.

The one argument is JSON: `link` (descriptor), `worker` (pid), and what user_server.py needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Guard the process that calls, or be it."""
    own_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != own_folder]
    request = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a job's end goes to the daemon, which ends this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if guard_child(request["link"], request["worker"]):
        control_process(PR_SET_NAME, b"msd-transform")
        server = load_beside(own_folder, "user_server")
        server.serve(request, lambda: load_beside(own_folder, "user_frames"))


def load_beside(folder: str, name: str) -> Any:
    """Return a module of msd's that lies in a folder which is not on sys.path."""
    from importlib import util

    spec = util.spec_from_file_location(f"msd_{name}", os.path.join(folder, f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def control_process(option: int, value: Any) -> None:
    """Set a property of this process."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def guard_child(link: int, worker: int) -> bool:
    """Fork the process that calls and watch it; returns, with True, in that process alone."""
    control_process(PR_SET_NAME, b"msd-guard")
    control_process(PR_SET_CHILD_SUBREAPER, 1)
    worker_fd = -1
    with contextlib.suppress(AttributeError, OSError):  # an old Python says so later, by itself
        worker_fd = os.pidfd_open(worker)
    if os.getppid() != worker:
        os._exit(0)
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        control_process(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != guard:
            os._exit(0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (woken, waker, worker_fd):
            if fd >= 0:
                os.close(fd)
        return True
    status = watch(child, link, worker_fd, woken)
    end_descendants(child)
    leave_as(status)
    return False


def watch(child: int, link: int, worker_fd: int, woken: int) -> int | None:
    """Return the wait status of the child, None where the worker went away first."""
    poll = select.poll()
    poll.register(link, 0)  # its hang-up is told in any case
    poll.register(woken, select.POLLIN)
    if worker_fd >= 0:
        poll.register(worker_fd, select.POLLIN)
    while True:
        events = dict(poll.poll())
        if link in events or worker_fd in events:
            return None
        os.read(woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == child:
                    return status
                if pid == 0:
                    break


def end_descendants(child: int) -> None:
    """Kill and reap until there is none: orphans of those that end become children of the guard."""
    while True:
        try:
            with open("/proc/thread-self/children", encoding="ascii") as file:
                pids = [int(pid) for pid in file.read().split()]
        except OSError:
            pids = [child]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def leave_as(status: int | None) -> None:
    """End with the exit code or by the signal that the child ended with."""
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
