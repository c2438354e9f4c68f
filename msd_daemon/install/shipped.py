"""Finds the files that come with the package but are no modules: units, the manual page.

A wheel carries them as data below `share/`; a checkout has them at its top level.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from msd_client.contract.errors import NotFoundError

DISTRIBUTION = "msd"
CHECKOUT = Path(__file__).resolve().parents[2]


def shipped_file(name: str) -> Path:
    """Return where a shipped file lies.

    Args:
        name: As in a checkout: `systemd/msd-daemon.service`.

    Raises:
        NotFoundError: This installation lacks it.
    """
    beside = CHECKOUT / name
    if beside.is_file():
        return beside
    wanted = f"share/msd/{name}"
    for file in metadata.files(DISTRIBUTION) or ():
        if file.as_posix().endswith(wanted):
            return Path(str(file.locate())).resolve()
    raise NotFoundError(
        f"this installation of msd has no {name}: install its wheel again "
        "(pip install --force-reinstall msd)"
    )
