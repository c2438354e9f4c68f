"""Reads the configuration again while the daemon runs, on SIGHUP or by `msdctl reload`.

A configuration with faults changes nothing: the daemon goes on with the one that it has.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from federation.service_manager import ServiceManager
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import DeadlineError, InternalError, MsdError, decode_error
from msd_daemon.config.daemon_config import DaemonConfig, decode_daemon_config
from msd_daemon.config.reloading import Reload, reload

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ConfigSource:
    """What the command line said of the configuration; the environment is the process's own."""

    file: Path | None = None
    flags: Mapping[str, object] = field(default_factory=dict)

    async def read(self) -> DaemonConfig:
        """Return the settings as the files say them now.

        Raises:
            ConfigError: All faults at once.
            DeadlineError: The files do not answer.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "msd_daemon.config.read_main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        request = {
            "file": None if self.file is None else str(self.file),
            "flags": dict(self.flags),
        }
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                output, _ = await process.communicate(pack(request))
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise DeadlineError(
                f"daemon.toml could not be read within {READ_TIMEOUT_S:g} s: does the file system of "
                f"{self.file} answer?"
            ) from error
        if not output:
            raise InternalError(f"reading daemon.toml ended with status {process.returncode}")
        answer = unpack_map(output)
        if "error" in answer:
            raise decode_error(**answer["error"])
        return decode_daemon_config(answer["config"])


class Reloader:
    """Reloads one at a time.

    Args:
        source: Where the configuration is read.
        manager: Told while it happens.
        current: The settings in force.
        take: Puts others in force.
    """

    def __init__(
        self,
        source: ConfigSource,
        manager: ServiceManager,
        current: Callable[[], DaemonConfig],
        take: Callable[[DaemonConfig], None],
    ) -> None:
        self._source = source
        self._manager = manager
        self._current = current
        self._take = take
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self) -> None:
        """Reload soon; what comes of it is logged (SIGHUP)."""
        task = asyncio.get_running_loop().create_task(self._logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _logged(self) -> None:
        try:
            await self.run()
        except MsdError as error:
            log.error("reload: nothing is changed: %s", error.message)

    async def run(self) -> Reload:
        """Reload and return what changed.

        Raises:
            ConfigError: The configuration has faults; nothing changed.
            DeadlineError: It could not be read in time; nothing changed.
        """
        async with self._lock:
            self._manager.reloading()
            try:
                found = reload(self._current(), await self._source.read())
                self._take(found.config)
            finally:
                self._manager.ready()
        for line in found.lines():
            log.info("reload: %s", line)
        return found
