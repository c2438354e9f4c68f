"""A slow or full disk below one folder, for a daemon of a test: a preloaded library plays it."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class BadDisk:
    """Orders to the library. Use `environ` as the daemon's.

    Args:
        root: What lies below it is on the bad disk.
        orders: A folder for its orders.
    """

    def __init__(self, root: Path, orders: Path) -> None:
        orders.mkdir(exist_ok=True)
        self._orders = orders
        self.environ = {
            "LD_PRELOAD": str(library()),
            "BAD_DISK_ROOT": str(root.resolve()),
            "BAD_DISK_ORDERS": str(orders.resolve()),
        }

    def begin(self, what: str) -> None:
        """Be `full` or `slow` from now on."""
        (self._orders / what).touch()

    def end(self, what: str) -> None:
        (self._orders / what).unlink(missing_ok=True)


@functools.cache
def library() -> Path:
    """Compile the library once; without a compiler the test is skipped."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a bad disk needs a C compiler")
    path = Path(tempfile.mkdtemp(prefix="bad-disk-")) / "bad_disk.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", path, SOURCE, "-ldl"], check=True)
    return path
