"""Ranks of a torch run as forks of one process that imported torch already."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork_ranks(main: Callable[[int], None], count: int) -> int:
    """Call `main` in a fork for each rank and wait for them; return the worst status."""
    pids = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                main(rank)
                status = 0
            except BaseException:  # noqa: BLE001 - told, and the process ends here
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
