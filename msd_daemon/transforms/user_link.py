"""The worker's hold on the process of a user's transform: starts it, asks it, ends it.

One request, one answer, over a socket pair that nothing else has. The process's stderr, where its
prints go too, is read all the while, so that it never blocks there; its tail is kept for errors. Its
end is seen by pidfd. No thread, no poll by time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.user_server import HEAD, STACK_SIGNAL

CHILD_FILE = Path(__file__).with_name("user_child.py")
TAIL_BYTES_MAX = 8 << 10
TAIL_LINES_MAX = 12
TAIL_READS_MAX = 16
STACK_MARK = "(most recent call first):"
"""Ends the first line of a stack that the process writes as it crashes or is asked to."""
END_S_MAX = 10.0
"""The guard has to kill and reap within it, else it is killed itself."""
STACK_S_MAX = 0.5
SOCKET_BYTES = 1 << 20
READ_BYTES_MAX = 1 << 20
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ProcessEndedError(Exception):
    """The process ended before it answered."""


class ProcessLateError(Exception):
    """It did not answer in time; it is still there."""


class AnswerTooLargeError(Exception):
    """Its answer is longer than allowed; the rest of it is still to be read."""


class UserLink:
    """One started process.

    Args:
        python: Interpreter.
        request: What user_server.py needs, without the link.
        folder: Working folder of the process.

    Raises:
        ConfigError: The interpreter cannot be run.
    """

    def __init__(self, python: str, request: dict[str, Any], folder: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._errors, errors = os.pipe2(os.O_CLOEXEC)
        argument = json.dumps(request | {"link": theirs.fileno(), "worker": os.getpid()})
        try:
            self._process = subprocess.Popen(
                [python, "-s", str(CHILD_FILE), argument],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env=child_environment(os.environ),
                cwd=folder,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            ours.close()
            os.close(self._errors)
            raise ConfigError(
                f"python {python!r} cannot be run in {folder!r}: {error}: name an interpreter, "
                "venv/bin/python",
                python=python,
            ) from error
        finally:
            theirs.close()
            os.close(errors)
        self._sock = ours
        ours.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        os.set_blocking(self._errors, False)
        self._ended_fd = os.pidfd_open(self._process.pid)
        self._call_fd = -1
        self._tail = bytearray()
        self.calls = 0
        """Calls that it was asked for."""

    @property
    def pid(self) -> int:
        """Of the guard, whose child the process that calls is."""
        return self._process.pid

    def know_caller(self, pid: int) -> None:
        """Keep hold of the process that calls, to ask it where it is."""
        with contextlib.suppress(OSError, ValueError, OverflowError):
            self._call_fd = os.pidfd_open(pid)

    def exchange(
        self, kind: int | None, body: bytes, limit_s: float, answer_bytes_max: int
    ) -> tuple[int, bytearray]:
        """Send a frame (none where kind is None) and return kind and body of the next one.

        Raises:
            ProcessEndedError: The process ended instead.
            ProcessLateError: The answer was not there in time.
            AnswerTooLargeError: It is longer than `answer_bytes_max`.
        """
        deadline = time.monotonic() + limit_s
        out = memoryview(b"" if kind is None else HEAD.pack(len(body), kind) + body)
        answer = _Incoming(answer_bytes_max)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if out else 0))
        poll.register(self._errors, select.POLLIN)
        poll.register(self._ended_fd, select.POLLIN)
        has_ended = False
        while not has_ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ProcessLateError
            events = dict(poll.poll(math.ceil(left_s * 1000)))
            if self._errors in events and not self._read_errors():
                poll.unregister(self._errors)
            has_ended = self._ended_fd in events
            mask = events.get(self._sock.fileno(), 0)
            if out and mask & select.POLLOUT:
                out = out[self._send(out) :]
                if not out:
                    poll.modify(self._sock, select.POLLIN)
            if (mask & ~select.POLLOUT or has_ended) and answer.read(self._sock):
                assert answer.body is not None
                return answer.kind, answer.body
        raise ProcessEndedError

    def _send(self, out: memoryview) -> int:
        try:
            return self._sock.send(out)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return 0  # an end is told by the pidfd

    def _read_errors(self) -> bool:
        """Keep what was written to stderr; return False where nobody can write any more."""
        try:
            data = os.read(self._errors, 1 << 16)
        except BlockingIOError:
            return True
        self._tail += data
        del self._tail[:-TAIL_BYTES_MAX]
        return bool(data)

    def stack(self) -> str:
        """Return where the process is, as far as it tells within half a second."""
        before = self.tail()
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._call_fd, STACK_SIGNAL)
            self._tail.clear()
            poll = select.poll()
            poll.register(self._errors, select.POLLIN)
            deadline = time.monotonic() + STACK_S_MAX
            while (left_s := deadline - time.monotonic()) > 0:
                # The trace comes in many small writes: once it has begun, silence is its end.
                wait_ms = 50 if self._tail else math.ceil(left_s * 1000)
                if not poll.poll(wait_ms) or not self._read_errors():
                    break
        return self.tail() or before

    def tail(self) -> str:
        """Return the last lines that were written to stdout and stderr."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        starts = [number for number, line in enumerate(lines) if line.endswith(STACK_MARK)]
        if not starts:
            return "\n".join(lines[-TAIL_LINES_MAX:])
        own = str(CHILD_FILE.parent)  # frames of msd and lists of libraries tell nothing
        stack = [line for line in lines[starts[-1] :] if own not in line and line.startswith("  ")]
        said = [line for line in lines[: starts[-1]] if line][-TAIL_LINES_MAX // 2 :]
        return "\n".join([*said, lines[starts[-1]], *stack[:TAIL_LINES_MAX]])

    def end(self) -> int:
        """End the process with all that it has started; return its exit code, negative: signal.

        A process that has ended by itself keeps its own code.
        """
        self._sock.close()
        poll = select.poll()
        poll.register(self._ended_fd, select.POLLIN)
        poll.register(self._errors, select.POLLIN)
        deadline = time.monotonic() + END_S_MAX
        while (left_s := deadline - time.monotonic()) > 0:
            events = dict(poll.poll(math.ceil(left_s * 1000)))
            if self._errors in events and not self._read_errors():
                poll.unregister(self._errors)
            if self._ended_fd in events:
                break
        else:
            self._process.kill()
        status = self._process.wait()
        for _ in range(TAIL_READS_MAX):
            if _is_empty(self._errors) or not self._read_errors():
                break
        for fd in (self._errors, self._ended_fd, self._call_fd):
            if fd >= 0:
                os.close(fd)
        return status


class _Incoming:
    """A frame that is being received."""

    def __init__(self, bytes_max: int) -> None:
        self.kind = 0
        self.body: bytearray | None = None
        self._bytes_max = bytes_max
        self._head = bytearray(HEAD.size)
        self._rest = memoryview(self._head)

    def read(self, sock: socket.socket) -> bool:
        """Read what is there; return True once the frame is whole."""
        while True:
            while self._rest:
                try:
                    count = sock.recv_into(self._rest[:READ_BYTES_MAX])
                except (BlockingIOError, ConnectionResetError):
                    return False
                if not count:
                    return False
                self._rest = self._rest[count:]
            if self.body is not None:
                return True
            size_bytes, self.kind = HEAD.unpack(self._head)
            if size_bytes > self._bytes_max:
                raise AnswerTooLargeError(size_bytes)
            self.body = bytearray(size_bytes)
            self._rest = memoryview(self.body)


def _is_empty(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not poll.poll(0)


def child_environment(environ: Any) -> dict[str, str]:
    """Return the environment of a user's process: nothing in it changes what a record becomes.

    Python's own variables go: what is imported is the interpreter's, not the shell's. Strings hash
    alike in every process, text is UTF-8, and libraries compute on one thread, as the sums of
    several differ.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return kept | fixed | dict.fromkeys(ONE_THREAD, "1")


def tree_rss_bytes(pid: int) -> int:
    """Return the anonymous and shared memory of a process and all below it; 0 where it is gone."""
    pids, total_bytes = [pid], 0
    for one in pids:  # grows while it is read
        with contextlib.suppress(OSError, ValueError):
            total_bytes += _rss_bytes(one)
            for task in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{task}/children").read_text(encoding="ascii")
                pids += map(int, children.split())
    return total_bytes


def _rss_bytes(pid: int) -> int:
    total_bytes = 0
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(("RssAnon:", "RssShmem:")):
                total_bytes += int(line.split()[1]) << 10
    return total_bytes
