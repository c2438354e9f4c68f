"""A user's own transform, called from a worker in the interpreter that the job names (E20).

The function runs in a process of its own (user_child.py), started at the first call, so that torch
stays out of the worker and a crash costs one record. What a record becomes depends on the record and
its key alone, never on those before it: a call that fails for want of memory, or whose process dies,
is made once more in a fresh process, and is the record's fault only where it fails there too.

Memory: RLIMIT_DATA, not RLIMIT_AS: it counts writable private memory, which is what a process can
take from others, and not the libraries that torch maps (639 MiB of address space, 220 of data, 146
resident after `import torch` here). A call over it gets MemoryError with a traceback, at the line
that asked, and nothing has to watch the process while it runs. What it does not count, shared
memory and processes that the function starts, is seen in /proc between calls: above the limit the
process is replaced, which changes no record.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from federation.model.recipe import UserCall
from federation.user_copy import (
    FILES_FOLDER,
    CallCopy,
    Versions,
    check_versions,
    read_copy,
)
from msd_client.contract.errors import ConfigError, TransformError
from msd_client.contract.plain import decode_plain
from msd_daemon.sources.record import MediaPath
from msd_daemon.transforms.user_frames import FrameError, decode, encode
from msd_daemon.transforms.user_link import (
    AnswerTooLargeError,
    ProcessEndedError,
    ProcessLateError,
    UserLink,
    tree_rss_bytes,
)
from msd_daemon.transforms.user_server import KEY_BYTES, Kind

START_S_MAX = 120.0
"""For the interpreter and the user's imports; torch from a cold network file system takes long."""
STARTS_MAX = 3
MEMORY_CHECK_CALLS = 64
NOTE_BYTES_MAX = 1 << 20
"""Of answers that are JSON."""

Array = npt.NDArray[Any]


def open_user_call(
    rule: UserCall,
    *,
    memory_bytes_max: int,
    sample_s_max: float,
    start_s_max: float = START_S_MAX,
) -> UserProcess:
    """Return the caller of a user's function; its process starts at the first call.

    Args:
        rule: The function. With an empty folder it is imported as the interpreter finds it, and
            neither files nor versions are checked.
        memory_bytes_max: Of the process; also the longest answer. 0: no limit but 1 GiB an answer.
        sample_s_max: Of one call.
        start_s_max: Of the process's start, imports included.
    """
    return UserProcess(rule, memory_bytes_max, sample_s_max, start_s_max)


class _CallFailedError(Exception):
    """A call failed in a way that a fresh process may not."""

    def __init__(self, error: TransformError) -> None:
        self.error = error


class UserProcess:
    """Calls a user's function; see open_user_call."""

    def __init__(
        self, rule: UserCall, memory_bytes_max: int, sample_s_max: float, start_s_max: float
    ) -> None:
        self._rule = rule
        self._memory_bytes_max = memory_bytes_max
        self._answer_bytes_max = memory_bytes_max or 1 << 30
        self._sample_s_max = sample_s_max
        self._start_s_max = start_s_max
        self._link: UserLink | None = None
        self._copy: CallCopy | None = None
        self.versions = Versions()
        """Of the process that was started last."""
        self.starts = 0
        """Processes that were started."""

    def call(self, sample: Mapping[str, Any], rng_key: int) -> list[dict[str, Any]]:
        """Return the samples that the function makes of one: none, one or several.

        Args:
            sample: Fields by name; see user_frames.encode for what they may be.
            rng_key: Seed of `rng`, 0 to 2^128 - 1; the global generators of Python, numpy and torch
                get it too.

        Raises:
            TransformError: The record's fault; `is_quarantine` where a limit or a dead process
                ended the call.
            ConfigError: The function cannot be called at all.
        """
        given = self._ask(Kind.SAMPLE, sample, rng_key)
        if not isinstance(given, list) or any(not isinstance(one, dict) for one in given):
            raise self._refused("gave what is no list of samples")
        return given

    def call_array(self, array: Array, rng_key: int) -> Array:
        """Return what the function makes of pixels or of a wave.

        Args:
            array: uint8 [height, width, 3], or floating point [samples] or [channels, samples].
            rng_key: As in `call`.

        Returns:
            An array of the same dtype and number of dimensions; sides and lengths may differ.

        Raises:
            TransformError: As in `call`; or it gave no such array.
            ConfigError: The function cannot be called at all.
        """
        given = self._ask(Kind.ARRAY, array, rng_key)
        if not isinstance(given, np.ndarray):
            raise self._refused("gave no array")
        is_float = array.dtype.kind == given.dtype.kind == "f"
        fits = given.ndim == array.ndim and given.size > 0
        if array.ndim == 3:
            fits = fits and given.shape[2] == array.shape[2]
        if not fits or not (is_float or given.dtype == array.dtype):
            raise self._refused(
                f"gave {given.dtype} {list(given.shape)} for {array.dtype} {list(array.shape)}, not "
                "the same dtype, dimensions and channels"
            )
        return given.astype(array.dtype, copy=False)

    def call_values(self, *arguments: object) -> Any:
        """Return what the function makes of plain values: a schedule's or a hook's.

        Args:
            arguments: In their order; see user_frames.encode for what they may be. The global
                generators of Python, numpy and torch are seeded alike for every call.

        Raises:
            TransformError: It raised, took too long or gave what is no plain value.
            ConfigError: The function cannot be called at all.
        """
        return self._ask(Kind.VALUES, list(arguments), 0)

    def describe(self) -> list[dict[str, Any]]:
        """Return the modules that the user's code has loaded; see user_server.describe_modules.

        Raises:
            ConfigError: The function cannot be called at all.
        """
        link = self._link or self._start()
        try:
            _, body = link.exchange(Kind.DESCRIBE, b"", self._start_s_max, 64 * NOTE_BYTES_MAX)
            modules = json.loads(body)
        except (ProcessEndedError, ProcessLateError, AnswerTooLargeError, ValueError) as error:
            self.close()
            raise ConfigError(
                f"{self._rule.call}: {self._rule.python} does not tell its modules: {error!r}: "
                "look at what the module starts on import"
            ) from error
        assert isinstance(modules, list)
        return modules

    def start(self) -> Versions:
        """Start the process now and return the versions it has.

        Raises:
            ConfigError: The function cannot be called at all.
        """
        self.close()
        self._start()
        return self.versions

    def rss_bytes(self) -> int:
        """Return the anonymous and shared memory of the process and all it started, 0 before."""
        return 0 if self._link is None else tree_rss_bytes(self._link.pid)

    def close(self) -> None:
        """End the process; a later call starts another."""
        if self._link is not None:
            self._link.end()
            self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, kind: int, value: object, rng_key: int) -> Any:
        if not 0 <= rng_key < 1 << 8 * KEY_BYTES:
            raise ValueError(f"rng_key {rng_key} is no integer of {KEY_BYTES} bytes")
        try:
            body = rng_key.to_bytes(KEY_BYTES, "little") + encode(value, MediaPath)
        except FrameError as error:
            raise self._refused(f"cannot be given the record, it holds {error}") from error
        for is_last in (False, True):
            is_fresh = self._link is None or self._link.calls == 0
            try:
                return self._answered(kind, body)
            except _CallFailedError as failure:
                self.close()
                if is_fresh or is_last:
                    raise failure.error from None
        raise AssertionError

    def _answered(self, kind: int, body: bytes) -> Any:
        link = self._link or self._start()
        link.calls += 1
        answer, given = self._exchange(link, kind, body)
        if answer == Kind.AGAIN:
            answer, given = self._exchange(link, kind, body)
        if answer == Kind.RAISED:
            self._raise(given)
        try:
            if answer != Kind.DONE:
                raise FrameError(f"an answer of kind {answer}")
            value = decode(given, 0, MediaPath)
        except FrameError as error:
            self.close()  # what it will say next cannot be trusted either
            raise self._refused(f"gave an answer that cannot be read: {error}") from error
        if link.calls % MEMORY_CHECK_CALLS == 0 and self._is_too_large():
            self.close()
        return value

    def _exchange(self, link: UserLink, kind: int, body: bytes) -> tuple[int, bytearray]:
        try:
            return link.exchange(kind, body, self._sample_s_max, self._answer_bytes_max)
        except ProcessEndedError:
            raise _CallFailedError(self._crashed(link)) from None
        except ProcessLateError:
            stack = link.stack()
            self.close()
            raise TransformError(
                f"{self._rule.call} took longer than {self._sample_s_max:g} s and was ended: make it "
                f"faster or raise the limit{_last_lines(stack)}",
                call=self._rule.call,
                cause="time",
                limit_s=self._sample_s_max,
            ) from None
        except AnswerTooLargeError as error:
            self.close()
            raise self._refused(
                f"gave {error} bytes, over {self._answer_bytes_max}: give less, or raise the limit"
            ) from None

    def _crashed(self, link: UserLink) -> TransformError:
        status = link.end()
        self._link = None
        return TransformError(
            f"{self._rule.call} ended its process {_ending(status)}: mend it or leave the record out"
            f"{_last_lines(link.tail())}",
            call=self._rule.call,
            cause="crash",
            status=status,
        )

    def _raise(self, body: bytearray) -> None:
        try:
            told = json.loads(body)
            cause, text = str(told["cause"]), str(told["text"])
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise self._refused(f"gave an answer that cannot be read: {error}") from error
        if cause == "refused":
            raise self._refused(text)
        if cause == "memory":
            raise _CallFailedError(
                TransformError(
                    f"{self._rule.call} needs more than {self._memory_bytes_max} bytes: lower its "
                    f"use or raise the limit{_last_lines(text)}",
                    call=self._rule.call,
                    cause="memory",
                    limit_bytes=self._memory_bytes_max,
                )
            )
        raise TransformError(
            f"{self._rule.call} raised{_last_lines(text)}", call=self._rule.call, cause="raised"
        )

    def _refused(self, problem: str) -> TransformError:
        return TransformError(f"{self._rule.call} {problem}", call=self._rule.call, cause="refused")

    def _is_too_large(self) -> bool:
        return 0 < self._memory_bytes_max < self.rss_bytes()

    def _start(self) -> UserLink:
        """Start the process and wait until the function can be called.

        Raises:
            ConfigError: It cannot: the interpreter, the copy, the import or a version is wrong.
        """
        if self._copy is None and self._rule.folder:
            self._copy = read_copy(self._rule)
        problem = ""
        for _ in range(STARTS_MAX):
            link = self._new_link()
            try:
                ready = self._greeted(link)
            except ProcessEndedError:
                problem = (
                    f"ends {_ending(link.end())} before it can be called{_last_lines(link.tail())}"
                )
                continue
            except BaseException:
                link.end()
                raise
            self._link = link
            self.versions = decode_plain(Versions, ready, f"{self._rule.python}: versions")
            if self._copy is not None:
                self._check_versions(self._copy.versions)
            return link
        raise self._unusable(problem)

    def _new_link(self) -> UserLink:
        copy = self._copy or CallCopy(self._rule.call)
        files = Path(self._rule.folder, FILES_FOLDER)
        paths = [str(files / path) for path in copy.paths] if self._copy else []
        request = {
            "call": self._rule.call,
            "paths": paths,
            "options": copy.options,
            "packages": sorted(copy.versions.packages),
            "data_bytes_max": self._memory_bytes_max,
        }
        self.starts += 1
        return UserLink(self._rule.python, request, (paths or ["/"])[0])

    def _greeted(self, link: UserLink) -> dict[str, Any]:
        """Return what the process says of its versions once the function can be called."""
        try:
            _, hello = link.exchange(None, b"", self._start_s_max, NOTE_BYTES_MAX)
            link.know_caller(json.loads(hello)["pid"])
            kind, body = link.exchange(None, b"", self._start_s_max, NOTE_BYTES_MAX)
            told = json.loads(body)
        except ProcessLateError:
            stack = _last_lines(link.stack())
            raise self._unusable(
                f"cannot be called {self._start_s_max:g} s after the start{stack}"
            ) from None
        except (AnswerTooLargeError, ValueError, KeyError, TypeError) as error:
            raise self._unusable(f"answers nonsense: {error!r}") from error
        if kind != Kind.READY or not isinstance(told, dict):
            raise self._unusable(str(told.get("text", "") if isinstance(told, dict) else told))
        return told

    def _check_versions(self, expected: Versions) -> None:
        try:
            check_versions(self._rule, expected, self.versions)
        except ConfigError:
            self.close()
            raise

    def _unusable(self, problem: str) -> ConfigError:
        return ConfigError(
            f"transform {self._rule.call} in {self._rule.python}: {problem}",
            call=self._rule.call,
            python=self._rule.python,
        )


def _ending(status: int) -> str:
    """Return how a process ended, for people."""
    if status >= 0:
        return f"with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"by {name}" + (" (out of memory, perhaps)" if status == -signal.SIGKILL else "")


def _last_lines(text: str) -> str:
    """Return a text as the indented end of a message."""
    if not text:
        return ""
    return ":\n" + "\n".join(f"  | {line}" for line in text.splitlines())
