"""Root of the dashboard's process: options, socket, server; ends with a signal or its parent."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from msd_client.contract.errors import ConfigError, MsdError, ResourceError
from msd_daemon.config.dashboard_options import is_loopback, parse_listen

log = logging.getLogger("msd_dashboard")

GRACE_S = 2
BACKLOG = 128


@dataclass(frozen=True)
class DashboardRun:
    """How a dashboard is run."""

    socket_path: Path
    """The daemon's."""
    host: str
    port: int
    token: str | None
    """None: none is needed."""
    ends_with_stdin: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a dashboard; exit codes: 0 ended as asked, 78 configuration, 1 failed."""
    options = _parse(arguments)
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        host, port = parse_listen(options.listen)
    except ValueError as error:
        sys.stderr.write(f"msd dashboard: --listen {options.listen}: {error}\n")
        return ConfigError.exit_code
    try:
        token = None
        if options.token_file:
            from msd_daemon.dashboard.gate import read_token

            token = read_token(Path(options.token_file))
        run = DashboardRun(Path(options.socket), host, port, token, options.end_with_stdin)
        with bind(host, port) as sock:
            log.info("serving %s", address_of(sock, host))
            asyncio.run(serve(run, sock))
    except MsdError as error:
        sys.stderr.write(f"msd dashboard: {error.message}\n")
        return error.exit_code
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m msd_daemon.dashboard")
    parser.add_argument("--socket", required=True, help="the daemon's control socket")
    parser.add_argument(
        "--listen", default="127.0.0.1:8710", help="HOST:PORT; port 0: any free one"
    )
    parser.add_argument("--token-file", help="file with the token that visitors need")
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="end when standard input closes"
    )
    return parser.parse_args(arguments)


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


def check_libraries() -> None:
    """Refuse to begin without what the page needs.

    Raises:
        ConfigError: It is not installed.
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the dashboard needs {' and '.join(missing)}: pip install 'msd[dashboard]'"
        )


def check_open(host: str, token: str | None) -> None:
    """Refuse a page for others without a token.

    Raises:
        ConfigError: It is one.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"the dashboard at {host} is reached from other machines, without a token: give "
            "dashboard.token_file, or listen at 127.0.0.1"
        )


async def serve(run: DashboardRun, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, or the end of standard input where it is so asked.

    Args:
        run: How.
        sock: Listens for it; stays the caller's.

    Raises:
        ConfigError: It would be open to others, or libraries are missing.
    """
    check_open(run.host, run.token)
    check_libraries()
    import uvicorn

    from msd_daemon.dashboard.daemon_link import DaemonLink
    from msd_daemon.dashboard.gate import LOOPBACK_NAMES, Gate
    from msd_daemon.dashboard.searches import Searches
    from msd_daemon.dashboard.server import make_app

    link = DaemonLink(run.socket_path)
    # Behind a token a name may be anything: a proxy's, a tunnel's.
    names = LOOPBACK_NAMES if run.token is None else ()
    app = make_app(link, Gate(run.token, names), Searches(run.socket_path))

    class Server(uvicorn.Server):
        """Leaves signals to the loop's handlers below."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Take none."""
            yield

    server = Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if run.ends_with_stdin:
        loop.add_reader(0, _read_stdin, loop, stop)
    try:
        await server.serve(sockets=[sock])
    finally:
        link.close()


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket.

    Raises:
        ResourceError: The address can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # who reads the address may come at once
    except OSError as error:
        sock.close()
        raise ResourceError(
            f"dashboard.listen {host}:{port} can't be bound ({error.strerror}): another port, or 0 for "
            "any free one"
        ) from error
    return sock


def address_of(sock: socket.socket, host: str) -> str:
    """Return the page's address."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}/"


def _read_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        stop()
