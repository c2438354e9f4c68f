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
            "LD_PRELOAD": str(compiled(SOURCE)),
            "BAD_DISK_ROOT": str(root.resolve()),
            "BAD_DISK_ORDERS": str(orders.resolve()),
        }

    def begin(self, what: str) -> None:
        """Be `full`, `slow` (writes), `slow_reads`, `worn_reads` or `lame_reads` from now on."""
        (self._orders / what).touch()

    def end(self, what: str) -> None:
        (self._orders / what).unlink(missing_ok=True)


@functools.cache
def compiled(source: Path) -> Path:
    """Compile a library to preload, once; without a compiler the test is skipped."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"{source.name} needs a C compiler")
    path = Path(tempfile.mkdtemp(prefix="msd-preload-")) / source.with_suffix(".so").name
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return path
