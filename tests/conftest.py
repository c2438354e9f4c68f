"""Fixtures of the whole suite."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd import EtcdCluster
from tests.support.node import Node, running_node
from tests.support.plan_stores import Places

StartNode = Callable[..., Node]
ONE_BY_ONE = (
    "tests/soak/",
    *(
        f"tests/integration/test_{name}"
        for name in (
            # Many processes each: clusters, hosts, browsers, booted systems.
            "cluster", "dashboard", "demo", "launch", "newcomer", "systemd",
            # Leases, heartbeats and stalls: they measure time.
            "chaos", "deaths", "etcd", "kills", "observing", "paired_kills", "plan_store",
            "planner_takeover", "predicted_waits", "reattach", "scaling", "shadow", "slow_sources",
            "supervision", "throttled", "user_deaths", "why",
        )
    ),
)  # fmt: skip
"""Tests that fill the machine or mind the time: never two at once."""


OF_THE_CALLER = (
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "JUPYTER_COLUMNS",
    "JUPYTER_LINES",
)
"""What a calling shell may say of its own terminal; rich and typer would believe it of a test's."""


def pytest_configure() -> None:
    """Keep the caller's terminal out of what tests, and processes that they start, print."""
    for name in OF_THE_CALLER:
        os.environ.pop(name, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give files to whoever is free, but those that fill the machine to one worker, in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "one by one" if nodeid.startswith(ONE_BY_ONE) else nodeid.partition("::")[0]

    # In order of collection: long files of processes first, unit tests to fill what is left.
    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture
def start_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNode]:
    """Start daemons that are stopped, and looked after for leftovers, at the test's end."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(*arguments: str, folder: Path | None = None, **options: object) -> Node:
            where = folder or tmp_path_factory.mktemp(f"n{next(numbers)}")
            return stack.enter_context(running_node(where, *arguments, **options))

        yield start


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One etcd member for all tests that keep to a prefix of their own."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture(scope="session", params=["file", "sqlite", "etcd"])
def places(request: pytest.FixtureRequest) -> Iterator[Places]:
    """Give journals of each kind."""
    cluster = request.getfixturevalue("etcd") if request.param == "etcd" else None
    with ExitStack() as stack:
        yield Places(request.param, cluster, stack)
