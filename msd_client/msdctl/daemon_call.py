"""What verbs that talk to the daemon share: the socket option, the request, parsing arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

T = TypeVar("T")


def socket_option(function: Any) -> Any:
    """Add `--socket` as the argument `socket_path`."""
    return click.option(
        "--socket",
        "socket_path",
        type=click.Path(path_type=Path),
        help="The daemon's control socket; default: this user's.",
    )(function)


def call(socket_path: Path | None, verb: str, **fields: Any) -> dict[str, Any]:
    """Ask the daemon and return its answer.

    Raises:
        DaemonUnavailableError: No daemon answers (exit code 3).
        MsdError: What the daemon answered.
    """
    from msd_client import control

    return control.request(socket_path, {"verb": verb, **fields})


def parsed(parse: Callable[[str], T], text: str, name: str) -> T:
    """Return a parsed argument; a ValueError becomes a usage error (exit code 2).

    Raises:
        click.BadParameter: The text is malformed.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=name) from error
