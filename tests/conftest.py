"""Fixtures of the whole suite."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.node import Node, running_node

StartNode = Callable[..., Node]


@pytest.fixture
def start_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNode]:
    """Start daemons that are stopped, and looked after for leftovers, at the test's end."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(*arguments: str, folder: Path | None = None, **options: object) -> Node:
            where = folder or tmp_path_factory.mktemp(f"n{next(numbers)}")
            return stack.enter_context(running_node(where, *arguments, **options))

        yield start
