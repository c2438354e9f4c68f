"""The dashboard's process beside the daemon: started where the configuration says so, kept running.

It hangs on the daemon by its standard input, so it ends with it however that ends. It serves no rank:
one that does not come up costs a line in the log and in `msdctl status`, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

from msd_daemon.config.dashboard_options import DashboardOptions

log = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Before it is started again; a port may be taken by one that is leaving."""
CONFIG_STATUS = 78


class DashboardProcess:
    """Keeps one dashboard running.

    Args:
        socket_path: The daemon's.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket = socket_path
        self._options: DashboardOptions | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self.error = ""
        """Why none runs; empty: one does, or none is wanted."""

    @property
    def pid(self) -> int | None:
        """Process id, None where none runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def take(self, options: DashboardOptions | None) -> None:
        """Have it run as the configuration says now; None: not at all."""
        if options == self._options:
            return
        self.close()
        self._options = options
        if options is not None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep(options))

    async def _keep(self, options: DashboardOptions) -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        command = [
            sys.executable, "-m", "msd_daemon.dashboard", "--end-with-stdin",
            "--socket", str(self._socket), "--listen", f"{host}:{options.port}",
        ]  # fmt: skip
        if options.token_file:
            command += ["--token-file", options.token_file]
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE
            )
            self.error = ""
            status = await self._process.wait()
            self.error = f"the dashboard ended with status {status}: see the daemon's log"
            if status == CONFIG_STATUS:
                log.error("%s; not started again before a reload", self.error)
                return
            log.warning("%s; another in %g s", self.error, PAUSE_S)
            await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """End it."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        process, self._process = self._process, None
        self.error = ""
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if process.stdin is not None:
                process.stdin.close()
