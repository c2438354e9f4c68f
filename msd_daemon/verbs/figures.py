"""Pictures of msdctl's verbs, by matplotlib without a display; the library loads when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msd_client.contract.errors import ConfigError

DOTS_PER_INCH = 110


def new_figure(width_inches: float, height_inches: float) -> Any:
    """Return an empty matplotlib figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"pictures need matplotlib ({error}): pip install 'msd[plots]', or leave them out"
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as `name.svg` and `name.png` and return their paths.

    Raises:
        ConfigError: The folder cannot be written.
    """
    files = [folder / f"{name}.{ending}" for ending in ("svg", "png")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ConfigError(
            f"{folder}: pictures can't be written: {error.strerror}; name another folder",
            path=str(folder),
        ) from error
    return files
