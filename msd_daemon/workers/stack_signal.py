"""The signal that has a loader worker write its stack into its page."""

from __future__ import annotations

import signal

STACK_SIGNAL = signal.SIGUSR2
