"""What verbs print: data on stdout, messages on stderr, JSON with a schema name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click


def json_option(function: Any) -> Any:
    """Add `--json` to a read verb as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON with a schema name.")(
        function
    )


def print_json(verb: str, payload: dict[str, Any], version: int = 1) -> None:
    """Print one JSON object on one line, `schema` first."""
    document = {"schema": f"msd.{verb}/{version}"} | payload
    click.echo(json.dumps(document, ensure_ascii=False, default=str))


def say(message: str) -> None:
    """Print a message for people on stderr."""
    click.echo(message, file=sys.stderr)


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as aligned columns; numbers stand right, the rest left."""
    cells = [[_show(cell) for cell in row] for row in rows]
    is_right = [
        bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(header))
    ]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = []
    for row in [list(header), *cells]:
        columns = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        ]
        lines.append("  ".join(columns).rstrip())
    return "\n".join(lines)


def format_size(count: float) -> str:
    """Return bytes for people in binary units."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {suffix}" if suffix == "B" else f"{count:.1f} {suffix}"
        count /= 1024
    return f"{count:.1f} TiB"


def _show(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else _printable(str(cell))


def _printable(text: str) -> str:
    """Return a text without what moves a cursor or breaks a line: keys and names are anybody's."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).replace(",", "").rstrip("%").isdigit()
