"""Reads a configuration file, and says what is wrong with one that can't be read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from msd_client.contract.errors import ConfigError


def read_toml(path: Path, name: str) -> dict[str, Any]:
    """Return the tables of a file.

    Args:
        path: Of the file.
        name: What such files are called, for the remedy.

    Raises:
        ConfigError: It is not there, can't be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give an existing {name} or none") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read ({error}); mend or remove it") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}; mend the line") from error
