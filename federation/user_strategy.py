"""Strategies of the user's own, loaded into the planner's process from their copy by content.

A strategy handles a graph of numpy columns, so unlike other code of the user it runs in the planner's
own process, under the daemon's own uid; a daemon that serves several uids refuses it (E21). What it
raises, gives or takes too long for is a `StrategyError` of its job; the planner and other jobs go on.

Copies of several jobs may have modules of one name. A copy's modules are in `sys.modules` while it is
imported and no longer, so each job has its own; a strategy imports at the top of its file.
"""

from __future__ import annotations

import importlib
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FrameType
from typing import Any

from federation.model.job import ResolvedJob
from federation.model.recipe import UserCall
from federation.planning.dgraph import DGraph
from federation.planning.sampling import DrawHindered
from federation.planning.strategies import Strategy, strategy_error
from federation.user_copy import FILES_FOLDER, CallCopy, Versions, check_versions, read_copy
from msd_client.contract.errors import DataError, MsdError, StrategyError

PROBLEM_CHARACTERS_MAX = 500
OWN_PACKAGES = frozenset({"federation", "msd_client", "msd_daemon"})

STEP_S_MAX = 20.0
"""Of one step; the other jobs of the planner wait so long, so it is less than their ranks wait for."""


class _TooLateError(BaseException):
    """The strategy took longer than it may. No Exception, so that it is not caught by mistake."""


def load_strategy(job: ResolvedJob) -> Strategy | None:
    """Return a job's own strategy, None where it names a built-in one.

    Raises:
        ConfigError: The copy is gone or changed, or a version is not what the job was resolved with.
        StrategyError: The module cannot be imported, or has no such function.
    """
    if job.strategy_call is None:
        return None
    return UserStrategy(job.strategy_call)


class UserStrategy:
    """A user's function as a strategy: `fn(graph, step, **options) -> graph`.

    Args:
        rule: The function and its copy.

    Raises:
        ConfigError: See load_strategy.
    """

    def __init__(self, rule: UserCall) -> None:
        self._rule = rule
        copy = read_copy(rule)
        packages = {name: _version_of(name) for name in copy.versions.packages}
        seen = Versions(platform.python_version(), sys.implementation.name, packages)
        check_versions(rule, copy.versions, seen)
        self._options = copy.options
        self._function = _imported(rule, copy)

    def __call__(self, graph: DGraph, step: int) -> DGraph:
        """Apply the function.

        Raises:
            StrategyError: It raised, took too long or gave something else than its graph.
            DataError: What the draw met.
            DrawHindered: Metadata has to come first.
        """
        name, limit_s = self._rule.call, min(self._rule.sample_s_max, STEP_S_MAX)
        try:
            with _limited(limit_s):
                given: object = self._function(graph, step, **self._options)
        except (DrawHindered, DataError, KeyboardInterrupt):
            raise
        except _TooLateError:
            problem = f"takes longer than {limit_s:g} s"
            raise strategy_error(name, step, problem) from None
        except BaseException as error:
            raise strategy_error(name, step, _told(error)) from error
        if given is not graph:
            problem = f"gives {type(given).__name__}, not the graph: a strategy returns its chain"
            raise strategy_error(name, step, problem)
        return graph


def _told(error: BaseException) -> str:
    if isinstance(error, MsdError):
        return error.message
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    at = ""
    if place is not None:
        code = place.tb_frame.f_code
        at = f" (in {code.co_name}, line {place.tb_lineno} of {Path(code.co_filename).name})"
    return f"raises {type(error).__name__}: {error}"[:PROBLEM_CHARACTERS_MAX] + at


def _imported(rule: UserCall, copy: CallCopy) -> Callable[..., Any]:
    module_name, _, attribute = rule.call.partition(":")
    files = Path(rule.folder, FILES_FOLDER)
    try:
        with _own_modules([files / path for path in copy.paths]):
            found: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise StrategyError(
            f"strategy {rule.call} cannot be imported: {_told(error)}: submit the job again with what "
            "its module needs",
            strategy=rule.call,
        ) from error
    if not callable(found):
        raise StrategyError(
            f"strategy {rule.call} is of type {type(found).__name__}: name a function",
            strategy=rule.call,
        )
    function: Callable[..., Any] = found
    return function


@contextmanager
def _own_modules(paths: list[Path]) -> Iterator[None]:
    """Let imports find a copy's modules, and forget them afterwards."""
    tops = {place.stem for path in paths for place in path.iterdir()}
    hidden = {name: sys.modules.pop(name) for name in _of(tops - _shared(tops))}
    former, writes = list(sys.path), sys.dont_write_bytecode
    sys.path[:0] = [str(path) for path in paths]
    sys.dont_write_bytecode = True  # a copy with more files in it is another one
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:], sys.dont_write_bytecode = former, writes
        for name in _of(tops - _shared(tops)):
            del sys.modules[name]
        sys.modules.update(hidden)


def _shared(tops: set[str]) -> set[str]:
    """Return which of the loaded packages all strategies share, whatever their copies hold.

    This process's own ones, as their types are spoken in, and those with compiled modules, which a
    process loads once; a copy has such packages where the environment's own folders lack them.
    """
    compiled = {
        name.partition(".")[0]
        for name in _of(tops)
        if str(getattr(sys.modules[name], "__file__", "")).endswith(tuple(EXTENSION_SUFFIXES))
    }
    return tops & (compiled | OWN_PACKAGES)


def _of(tops: set[str]) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in tops]


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """End what takes longer, by a signal; not beside the main thread, which alone receives them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _TooLateError

    former = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _version_of(name: str) -> str:
    from importlib import metadata  # brings zip, csv and mail: not for jobs of built-in strategies

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
