"""A child process that is kept running: started, started again where it died, ended in order."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msd_client.contract.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

STARTS_MAX = 5
STARTS_WITHIN_S = 120.0
"""As the systemd units have it: more starts than this in so long are a fault, no accident."""
PAUSE_S = 1.0
END_S = 30.0


@dataclass
class RestartLimit:
    """Tells when a child may be started again. Time is given in seconds of any one clock."""

    starts_max: int = STARTS_MAX
    within_s: float = STARTS_WITHIN_S
    pause_s: float = PAUSE_S
    _starts: list[float] = field(default_factory=list)

    def started(self, now: float) -> None:
        """Note a start."""
        self._starts = [at for at in self._starts if now - at < self.within_s] + [now]

    def may_start(self, now: float) -> bool:
        """True where another start is no endless one."""
        return sum(now - at < self.within_s for at in self._starts) < self.starts_max

    def due(self, now: float) -> bool:
        """True once the pause after the last start is over."""
        return not self._starts or now - self._starts[-1] >= self.pause_s


class Supervised:
    """One child. It gets our end of a pipe as standard input, so that it ends where we do.

    Args:
        what: For people.
        command: To run.
        environ: Of it.
    """

    def __init__(self, what: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.what = what
        self.starts = 0
        self.command = list(command)
        """Of the next start."""
        self._environ = dict(environ)
        self._limit = RestartLimit()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None: none does."""
        return None if self._process is None else self._process.pid

    def keep_running(self) -> bool:
        """Start the child where it does not run and may; tell whether it was started just now.

        Raises:
            ConfigError: It ended because of its configuration: starting it again changes nothing.
            ResourceError: It ends again and again.
        """
        now = time.monotonic()
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return False
            self._let_go()
            log.warning("%s ended with status %d", self.what, status)
            if status == ConfigError.exit_code:
                raise ConfigError(f"{self.what} refuses its configuration: see its log above")
            if not self._limit.may_start(now):
                raise ResourceError(
                    f"{self.what} ended {STARTS_MAX} times in {STARTS_WITHIN_S:g} s, the last time "
                    f"with status {status}: see its log above"
                )
        if not self._limit.due(now):
            return False
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, env=self._environ, start_new_session=True
        )
        self._limit.started(now)
        self.starts += 1
        return True

    @property
    def has_ended(self) -> bool:
        """True where no process runs."""
        return self._process is None or self._process.poll() is not None

    def close_stdin(self) -> None:
        """Tell it that it may end at once."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self, timeout_s: float = END_S) -> None:
        """Let it end: at once, and by force where it does not in that time."""
        if self._process is None:
            return
        self.close_stdin()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("%s does not end in %g s: killed", self.what, timeout_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        self.close_stdin()
        self._process = None
