"""Loads a compiled kernel only where it was built of the sources that lie beside it.

The sources of a kernel are the C files in the folder `native` beside its module. A build puts their
digest in the kernel (setup.py), and loading compares: an older binary that stayed in a working tree
would compute what its sources no longer say.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def kernel_sources(folder: Path) -> list[Path]:
    """Return the C files of the kernel of a package's folder, by name; none in an installed copy."""
    return sorted(path for path in (folder / "native").glob("*.[ch]"))


def stamp_of(sources: list[Path]) -> str:
    """Return 16 hex digits over names and content of a kernel's sources."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.name}\n".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def load_kernel(name: str, folder: Path) -> Any:
    """Return a compiled kernel, or None where there is none or it is of other sources.

    An installed copy has no sources beside it and is taken as it is: binary and Python files are of
    one wheel.

    Args:
        name: Full name of the module.
        folder: The folder of its package.
    """
    try:
        kernel = importlib.import_module(name)
    except ImportError:
        return None
    sources = kernel_sources(folder)
    if sources and getattr(kernel, "stamp", "") != stamp_of(sources):
        log.warning(
            "%s was built of other sources than those in %s, so it is not used and its slower "
            "stand-in is; rebuild it: pip install --no-deps -e .",
            name,
            folder / "native",
        )
        return None
    return kernel
