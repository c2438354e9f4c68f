"""Root of the daemon: reads its configuration, takes the lock, forks, and runs the loop.

Order matters: the configuration is read in a child (pydantic's 20 MiB stay out), the fork server is
forked before any loop, thread or ZeroMQ context exists, then the loop starts.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy must not start threads before the fork
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import (
    ConfigError,
    MsdError,
    ResourceError,
    decode_error,
)
from msd_client.contract.paths import prepare_private_dir
from msd_daemon.config.daemon_config import DaemonConfig, decode_daemon_config
from msd_daemon.config.read_main import answer_to
from msd_daemon.descriptors import raise_descriptor_limit
from msd_daemon.observe.json_log import set_up_logging
from msd_daemon.workers.spawn import fork_first_server, rest_collector

log = logging.getLogger("msd_daemon")


def main(arguments: list[str] | None = None) -> None:
    """Run the daemon; exit codes: 0 ended as asked, 78 configuration, 1 already running, 70 fault."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None) -> int:
    """Run the daemon and return its exit code."""
    if not __debug__:
        sys.stderr.write("msd-daemon: assertions guard the stream: start without -O\n")
        return ConfigError.exit_code
    options = _parse(arguments)
    try:
        config = _read_config(options)
        set_up_logging(config.log_level, config.log_format)
        prepare_private_dir(config.runtime_dir, os.getuid())
        try:
            config.state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"daemon.state_dir {config.state_dir} can't be made ({error.strerror}): set "
                "daemon.state_dir (MSD__DAEMON__STATE_DIR) to a folder of your own"
            ) from error
        if not os.access(config.state_dir, os.W_OK | os.X_OK):
            raise ConfigError(
                f"daemon.state_dir {config.state_dir} can't be written: journals and indexes go there; "
                "set daemon.state_dir (MSD__DAEMON__STATE_DIR) to a folder of your own"
            )
        lock = _take_lock(config.runtime_dir / f"{config.socket.name}.lock")
    except MsdError as error:
        sys.stderr.write(f"msd-daemon: {error.message}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"msd-daemon: {error}\n")
        return ConfigError.exit_code
    try:
        return _serve(config, lock, options)
    finally:
        os.close(lock)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="msd-daemon", description="msd's node daemon")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and end")
    parser.add_argument(
        "--config", type=Path, help="daemon.toml; default: what MSD_CONFIG names, none is needed"
    )
    parser.add_argument("--socket", help="control socket")
    parser.add_argument("--runtime-dir", help="folder of socket and lock")
    parser.add_argument("--state-dir", help="folder of journal and indexes")
    parser.add_argument("--loader-workers", type=int, help="loader worker processes of a job")
    parser.add_argument("--idle-exit-s", type=float, help="end after so long without clients")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="end at once when standard input closes"
    )
    return parser.parse_args(arguments)


class _Version(argparse.Action):
    """Shows the version; what reads it (email, zipfile, ...) stays out of the daemon."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"{parser.prog} {version('msd')}\n")
        parser.exit()


def _flags(options: argparse.Namespace) -> dict[str, object]:
    named = {
        "daemon.socket": options.socket,
        "daemon.runtime_dir": options.runtime_dir,
        "daemon.state_dir": options.state_dir,
        "daemon.idle_exit_s": options.idle_exit_s,
        "daemon.log_level": options.log_level,
        "workers.loader_workers": options.loader_workers,
    }
    return {key: value for key, value in named.items() if value is not None}


def _read_config(options: argparse.Namespace) -> DaemonConfig:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        file = None if options.config is None else str(options.config)
        with os.fdopen(write_fd, "wb") as pipe:
            pipe.write(pack(answer_to(file, _flags(options))))
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    answer = unpack_map(data)
    if "error" in answer:
        raise decode_error(**answer["error"])
    return decode_daemon_config(answer["config"])


def _take_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ResourceError(
            f"another daemon (pid {holder}) holds {path}: use it, or stop it, or give this one its "
            "own --socket and --runtime-dir",
            path=str(path),
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _serve(config: DaemonConfig, lock: int, options: argparse.Namespace) -> int:
    fork_sock, fork_pid = fork_first_server((lock,))
    # uvloop and ZeroMQ only after the fork: the children stay free of both.
    import uvloop

    from msd_daemon.services.daemon import Daemon
    from msd_daemon.services.reloader import ConfigSource
    from msd_daemon.services.scheduling import ask_for_short_slice

    source = ConfigSource(options.config, _flags(options))

    async def serve() -> None:
        daemon = Daemon(config, fork_sock, fork_pid, source)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.ask_to_stop)
        loop.add_signal_handler(signal.SIGHUP, daemon.ask_to_reload)
        if options.end_with_stdin:
            loop.add_reader(0, _stop_at_end_of_stdin, loop, daemon.stop_now)
        log.info("serving at %s (pid %d)", config.socket, os.getpid())
        await daemon.run()

    raise_descriptor_limit()
    rest_collector()
    ask_for_short_slice()
    try:
        uvloop.run(serve())
    except MsdError as error:
        sys.stderr.write(f"msd-daemon: {error.message}\n")
        return error.exit_code
    return 0


def _stop_at_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        log.warning("standard input closed: whoever started this daemon is gone")
        stop()
