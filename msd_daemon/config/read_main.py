"""Reads the daemon's configuration in a process of its own: `python -m msd_daemon.config.read_main`.

Standard input has the packed request `{file, flags}`, standard output gets `{config}` or `{error}`.
A running daemon asks it at a reload; pydantic never enters the daemon.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import InternalError, MsdError, encode_error
from msd_daemon.config.daemon_config import encode_daemon_config


def answer_to(file: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, or why there are none, in their plain form.

    Args:
        file: `daemon.toml`, None where no flag names one.
        flags: `section.key` to value, of the command line.
    """
    try:
        from msd_daemon.config.daemon_file import load_daemon_config

        config = load_daemon_config(None if file is None else Path(file), None, flags)
        return {"config": encode_daemon_config(config)}
    except MsdError as error:
        return {"error": encode_error(error)}
    except Exception as error:  # noqa: BLE001 - a child's main: the parent must get an answer
        return {"error": encode_error(InternalError(f"{type(error).__name__}: {error}"))}


def main() -> None:
    """Answer the one request."""
    request = unpack_map(sys.stdin.buffer.read())
    sys.stdout.buffer.write(pack(answer_to(request["file"], request["flags"])))


if __name__ == "__main__":
    main()
