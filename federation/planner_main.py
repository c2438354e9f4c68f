"""A cluster's planner: opens the store and the wire, and lives until a signal asks it to end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from federation.planner_config import PlannerConfig
from federation.planner_life import PlannerLife, Router, Service, Standing
from federation.service_manager import ServiceManager
from federation.store.leadership import Leadership
from federation.store.open_store import open_store
from federation.store.plan_store import PlanStore
from msd_client.contract.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class PlannerRouter(Router, Protocol):
    """What a planner needs of its wire."""

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that was chosen."""
        ...

    def close(self) -> None:
        """Close."""
        ...


R = TypeVar("R", bound=PlannerRouter)


def run_planner(
    config: PlannerConfig,
    make_router: Callable[[PlannerConfig], R],
    announce: Callable[[R, Standing], None],
    make_service: Callable[[R, PlanStore, int], Service],
) -> None:
    """Run a planner until SIGTERM or SIGINT; it resigns at its end.

    Args:
        config: Of this planner.
        make_router: Binds the wire.
        announce: Says on the wire how this planner stands.
        make_service: Plans jobs for one term, the last argument.

    Raises:
        ConfigError: The store or the wire can't be as they are asked for.
        PlanStoreError: SQLite's store can't be opened.
    """
    with contextlib.ExitStack() as stack:
        stop_fd = _end_of_stdin() if config.ends_with_stdin else stack.enter_context(stop_signals())
        store = open_store(config.store, config.state_dir, lease_s=config.lease_s, tls=config.tls)
        stack.callback(store.close)
        router = make_router(config)
        stack.callback(router.close)
        endpoint = config.announce or router.endpoint
        if config.endpoint_file is not None:
            _write_whole(config.endpoint_file, endpoint)
        leadership = Leadership(store, config.name, endpoint)
        stack.callback(leadership.close)
        manager = ServiceManager()

        def say(standing: Standing) -> None:
            announce(router, standing)
            manager.status(f"{'leads' if standing.leads else 'stands by'}, term {standing.term}")

        manager.ready()
        stack.callback(manager.stopping)
        PlannerLife(
            store,
            leadership,
            router,
            say,
            lambda term: make_service(router, store, term),
            endpoint=endpoint,
            stop_fd=stop_fd,
            alive=manager.alive,
        ).run()


@contextlib.contextmanager
def stop_signals() -> Iterator[int]:
    """Return a context with a descriptor that becomes readable once a signal asks to end."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    former_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    former = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield read_fd
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_fd)
        os.close(read_fd)
        os.close(write_fd)


def _end_of_stdin() -> int:
    """Return a descriptor that becomes readable at the end of standard input; signals pass by.

    At the end of a batch job every process of it gets SIGTERM at once, while the nodes' daemons
    still serve what is planned: the planner stays until they are done.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return 0


def _write_whole(path: Path, text: str) -> None:
    """Write a file beside and rename it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(f"{text}\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"endpoint file {path}: {error.strerror}: give another path") from error
