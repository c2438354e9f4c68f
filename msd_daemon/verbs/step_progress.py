"""A progress bar on a terminal's stderr for verbs that go through many steps; silent elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int], None]


@contextmanager
def step_progress(total: int, what: str) -> Iterator[Tell]:
    """Give a function that takes how many more steps are done.

    Args:
        total: Steps in all.
        what: What is done with them.
    """
    if total < 2 or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
