"""Work on many shards by several processes, with progress while it lasts.

One worker works in this process. More are started anew (spawn): they inherit no thread, and open
what they need themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

import click

from msd_client.contract.errors import WorkerLostError

TICK_S = 1.0
_COUNTERS = 2

Result = TypeVar("Result")
Tell = Callable[[int, int], None]
"""Called by the work with what it did since its last call: two counts of its own choice."""
Worker = Callable[[int, Tell], Result]
"""Does one task, by its number."""


class ShardPool(Generic[Result]):
    """Does tasks by number.

    Args:
        open_worker: Called once in each process, with `arguments`; a function of a module.
        arguments: What travels to each process once.
        workers: Processes.
        on_tick: Called about once a second with both counts summed over all workers.
    """

    def __init__(
        self,
        open_worker: Callable[..., Worker[Result]],
        arguments: tuple[Any, ...],
        workers: int,
        on_tick: Callable[[int, int], None],
    ) -> None:
        self._open_worker = open_worker
        self._arguments = arguments
        self._workers = workers
        self._on_tick = on_tick

    def run(self, tasks: Sequence[int]) -> Iterator[tuple[int, Result]]:
        """Yield each task with its result as they are done.

        Raises:
            WorkerLostError: A process died; names the tasks that were in work.
            BaseException: What a task raised; those that have not begun are not done then.
        """
        if min(self._workers, len(tasks)) <= 1:
            return self._run_here(tasks)
        return self._run_apart(tasks)

    def _run_here(self, tasks: Sequence[int]) -> Iterator[tuple[int, Result]]:
        counts = [0, 0]
        told_s = time.monotonic()

        def tell(first: int, second: int) -> None:
            nonlocal told_s
            counts[0] += first
            counts[1] += second
            if time.monotonic() - told_s >= TICK_S:
                told_s = time.monotonic()
                self._on_tick(*counts)

        worker = self._open_worker(*self._arguments) if tasks else None
        for task in tasks:
            assert worker is not None
            result = worker(task, tell)
            self._on_tick(*counts)
            yield task, result

    def _run_apart(self, tasks: Sequence[int]) -> Iterator[tuple[int, Result]]:
        context = multiprocessing.get_context("spawn")
        workers = min(self._workers, len(tasks))
        counters = context.RawArray("q", _COUNTERS * workers)
        next_row = context.Value("i", 0)
        executor = ProcessPoolExecutor(
            workers,
            mp_context=context,
            initializer=_begin,
            initargs=(self._open_worker, self._arguments, counters, next_row),
        )
        waiting = list(reversed(tasks))
        running: dict[Future[Result], int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    task = waiting.pop()
                    running[executor.submit(_work, task)] = task
                done, _ = wait(running, timeout=TICK_S, return_when=FIRST_COMPLETED)
                self._on_tick(sum(counters[::_COUNTERS]), sum(counters[1::_COUNTERS]))
                for future in done:
                    # Not taken out before its result is there: a lost worker names it.
                    result = future.result()
                    yield running.pop(future), result
        except BrokenProcessPool as error:
            numbers = ", ".join(str(task) for task in sorted(running.values()))
            raise WorkerLostError(
                f"a worker process died while shards {numbers} were in work (memory, or a crash of "
                "a library): run again, what is finished stays; try fewer --workers"
            ) from error
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


_worker: Worker[Any] | None = None
_tell: Tell | None = None


def _begin(
    open_worker: Callable[..., Worker[Any]],
    arguments: tuple[Any, ...],
    counters: Any,
    next_row: Any,
) -> None:
    global _worker, _tell
    with next_row.get_lock():
        row = next_row.value
        next_row.value += 1

    def tell(first: int, second: int) -> None:
        counters[_COUNTERS * row] += first
        counters[_COUNTERS * row + 1] += second

    _worker, _tell = open_worker(*arguments), tell


def _work(task: int) -> Any:
    assert _worker is not None
    assert _tell is not None
    return _worker(task, _tell)


def default_workers() -> int:
    """Return how many processes this one may keep busy."""
    return max(1, len(os.sched_getaffinity(0)))


class ProgressLine:
    """A line on stderr that says how far work is: kept up to date on a terminal, else now and then.

    Args:
        every_s: Seconds between two lines where stderr is no terminal.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._every_s = TICK_S / 2 if self._is_terminal else every_s
        self._said_s = time.monotonic()
        self._width = 0

    def say(self, text: str, *, is_last: bool = False) -> None:
        """Show a line, unless one was just shown."""
        if not is_last and time.monotonic() - self._said_s < self._every_s:
            return
        self._said_s = time.monotonic()
        if not self._is_terminal:
            click.echo(text, file=sys.stderr)
            return
        click.echo("\r" + text.ljust(self._width), file=sys.stderr, nl=is_last)
        self._width = len(text)

    def clear(self) -> None:
        """Make room for another line on the terminal."""
        if self._is_terminal and self._width:
            click.echo("\r" + " " * self._width + "\r", file=sys.stderr, nl=False)
            self._width = 0
