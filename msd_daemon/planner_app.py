"""Root of msd-planner: reads `planner.toml` and flags, then runs the planner until a signal ends it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from federation.planner_config import PlannerConfig
from msd_client.contract.errors import ConfigError, MsdError
from msd_daemon.config.planner_file import load_planner_config
from msd_daemon.descriptors import raise_descriptor_limit
from msd_daemon.observe.json_log import set_up_logging


def run(arguments: list[str] | None, run_planner: Callable[[PlannerConfig], None]) -> int:
    """Run a planner and return its exit code: 0 ended as asked, 78 configuration, 3 no store.

    Args:
        arguments: Of the command line; None: this process's.
        run_planner: Lives with these settings until a signal comes (federation.planner_main).
    """
    if not __debug__:
        sys.stderr.write("msd-planner: assertions guard the stream: start without -O\n")
        return ConfigError.exit_code
    try:
        options = vars(_parse(arguments))
        file = options.pop("config")
        lives = {
            "endpoint_file": options.pop("endpoint_file"),
            "ends_with_stdin": options.pop("end_with_stdin"),
        }
        flags = {key: value for key, value in options.items() if value is not None}
        config = replace(load_planner_config(file, None, flags), **lives)
        set_up_logging(config.log_level, config.log_format)
        _prepare(config.state_dir)
        raise_descriptor_limit()
        run_planner(config)
    except MsdError as error:
        sys.stderr.write(f"msd-planner: {error.message}\n")
        return error.exit_code
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run `msd-planner`; return its exit code."""
    return run(arguments, _plan)


def _plan(config: PlannerConfig) -> None:
    # ZeroMQ only now: --help and faults of the file need none.
    from federation.cluster_hello import PlannerHello
    from federation.cluster_router import ClusterRouter
    from federation.cluster_service import ClusterService
    from federation.keys import KeyDir
    from federation.planner_life import Standing
    from federation.planner_main import run_planner
    from federation.store.plan_store import PlanStore

    def make_router(config: PlannerConfig) -> ClusterRouter:
        keys = None if config.keys_dir is None else KeyDir(config.keys_dir, config.name)
        return ClusterRouter(config.listen, keys, hello=PlannerHello(config.name, False, 0))

    def make_service(router: ClusterRouter, store: PlanStore, term: int) -> ClusterService:
        return ClusterService(router, store, term)

    def announce(router: ClusterRouter, standing: Standing) -> None:
        router.set_hello(
            PlannerHello(
                config.name, standing.leads, standing.term, standing.leader, metadata.version("msd")
            )
        )

    run_planner(config, make_router, announce, make_service)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="msd-planner",
        description="msd's planner of a cluster; all flags may stand in the file",
    )
    parser.add_argument(
        "--version", action="version", version=f"msd-planner {metadata.version('msd')}"
    )
    parser.add_argument(
        "--config", type=Path, help="planner.toml; default: what MSD_PLANNER_CONFIG names, if any"
    )
    parser.add_argument("--name", help="told to nodes and other planners; default: the host's")
    parser.add_argument("--listen", help="endpoint that it binds")
    parser.add_argument("--announce", help="endpoint at which nodes reach it, where another one")
    parser.add_argument("--store", help="sqlite:///path or etcd://host1:2379,host2,host3/prefix")
    parser.add_argument("--state-dir", help="local folder of SQLite's store or copies of journals")
    parser.add_argument("--keys-dir", help="folder of CURVE keys")
    parser.add_argument("--lease-s", type=float, help="so long a silent leader is waited for")
    parser.add_argument(
        "--endpoint-file", type=Path, help="write the endpoint there, once it is bound"
    )
    parser.add_argument(
        "--end-with-stdin", action="store_true",
        help="end when standard input closes, not at signals",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--log-format", choices=("text", "json"))
    return parser.parse_args(arguments)


def _prepare(state_dir: Path) -> None:
    """Make the state folder.

    Raises:
        ConfigError: It can't be made or written.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(state_dir, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"state_dir {state_dir}: {error.strerror}: set another one") from error
    if not is_writable:
        raise ConfigError(
            f"state_dir {state_dir} can't be written: set state_dir to a folder of your own"
        )


if __name__ == "__main__":
    sys.exit(main())
