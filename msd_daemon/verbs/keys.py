"""`msdctl keys`: key pairs of nodes and planners: generate, list, show, revoke, rotate."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import Any

import click

from federation.key_files import (
    PUBLIC,
    REVOKED,
    SECRET,
    KeyFile,
    fingerprint,
    generate,
    read_key_file,
    revoke,
    rotate,
    utc_now,
)
from msd_client.contract.errors import ConfigError, NotFoundError
from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.output import format_table, json_option, print_json, say

DEFAULT_DIR = Path("/etc/msd/keys")
KEYS_DIR_MODE = 0o755
UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@click.group(name="keys", short_help="Keys of nodes and planners.")
@click.option(
    "--keys-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="MSD__FEDERATION__KEYS_DIR",
    default=DEFAULT_DIR,
    show_default=True,
    help="Folder of key files; daemons and planners are told the same one.",
)
@click.pass_context
def command(context: click.Context, keys_dir: Path) -> None:
    """Make, list and replace the keys by which nodes and planners know each other.

    NAME.secret stays on its machine; NAME.pub is copied to the keys_dir of each peer, and whoever
    is listed there may connect. Running daemons and planners see changes within a second.
    """
    context.obj = keys_dir


@command.command(name="generate", short_help="Make a key pair.")
@click.argument("name")
@json_option
@click.pass_obj
def generate_verb(keys_dir: Path, name: str, as_json: bool) -> None:
    """Make the key pair of NAME: NAME.secret (0600) and NAME.pub."""
    _make(keys_dir)
    made = generate(keys_dir, name)
    _report("generate", keys_dir, name, made, as_json)
    if not as_json:
        say(f"copy {name}{PUBLIC} to the keys_dir of its peers; {name}{SECRET} stays here")


@command.command(name="list", short_help="Who is listed, and what is revoked.")
@json_option
@click.pass_obj
def list_verb(keys_dir: Path, as_json: bool) -> None:
    """List the names that may connect, former keys in their grace, revoked keys, and faults."""
    rows, problems = _listed(keys_dir)
    if as_json:
        payload = {"keys_dir": str(keys_dir), "keys": rows, "problems": problems}
        print_json("keys", payload)
    else:
        header = ("NAME", "FINGERPRINT", "STATE", "MADE", "UNTIL", "SECRET")
        cells = [
            (row["name"], row["fingerprint"], row["state"], row["made"], row["until"],
             "here" if row["has_secret"] else None)
            for row in rows
        ]  # fmt: skip
        click.echo(format_table(header, cells))
    for problem in problems:
        say(problem)
    if problems:
        raise click.exceptions.Exit(1)


@command.command(name="show", short_help="Print a public key.")
@click.argument("name")
@json_option
@click.pass_obj
def show_verb(keys_dir: Path, name: str, as_json: bool) -> None:
    """Print the public key of NAME, and former ones in their grace."""
    path = keys_dir / f"{name}{PUBLIC}"
    if not path.exists():
        raise NotFoundError(f"{path} is not there: `msdctl keys list` names who is listed")
    _report("show", keys_dir, name, read_key_file(path), as_json)


@command.command(name="revoke", short_help="Take a name off the list for good.")
@click.argument("name")
@json_option
@click.pass_obj
def revoke_verb(keys_dir: Path, name: str, as_json: bool) -> None:
    """Take NAME's keys off the list for good: its connections are closed, its keys never accepted.

    Run it in each keys_dir that lists NAME, or copy the .revoked file that it writes there.
    """
    if not (keys_dir / f"{name}{PUBLIC}").exists():
        raise NotFoundError(f"{name} is not listed in {keys_dir}: `msdctl keys list` names who is")
    noted = [str(path) for path in revoke(keys_dir, name)]
    if as_json:
        print_json("keys_revoke", {"name": name, "noted": noted})
        return
    click.echo(f"{name} is revoked here")
    say(f"copy to the keys_dir of its peers: {', '.join(noted)}")


@command.command(name="rotate", short_help="Replace a key pair while all runs.")
@click.argument("name")
@click.option(
    "--grace",
    default="1h",
    show_default=True,
    help="So long the old key is accepted: 30s, 10m, 1h, 2d.",
)
@json_option
@click.pass_obj
def rotate_verb(keys_dir: Path, name: str, grace: str, as_json: bool) -> None:
    """Replace the key pair of NAME on its own machine; the old key is accepted until the grace ends.

    Copy NAME.pub to its peers before that. A planner shows its new key when the grace is over.
    """
    made = rotate(keys_dir, name, parsed(parse_grace, grace, "--grace"), utc_now())
    _report("rotate", keys_dir, name, made, as_json)
    if not as_json:
        say(f"copy {name}{PUBLIC} to the keys_dir of its peers within {grace}")


def parse_grace(text: str) -> dt.timedelta:
    """Return the time of `30s`, `10m`, `1h` or `2d`.

    Raises:
        ValueError: Not of this form, or more than a year.
    """
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit()) or unit not in UNITS_S:
        raise ValueError(f"{text!r} is none of 30s, 10m, 1h, 2d")
    seconds = int(number) * UNITS_S[unit]
    if seconds > 366 * UNITS_S["d"]:
        raise ValueError(f"{text!r} is more than a year")
    return dt.timedelta(seconds=seconds)


def _make(keys_dir: Path) -> None:
    try:
        keys_dir.mkdir(mode=KEYS_DIR_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{keys_dir}: {error.strerror}: name another folder with --keys-dir, and tell daemons "
            "the same one (federation.keys_dir)"
        ) from error


def _report(verb: str, keys_dir: Path, name: str, made: KeyFile, as_json: bool) -> None:
    if as_json:
        former = [{"key": one.key, "until": _text(one.until)} for one in made.former]
        payload = {"name": name, "key": made.key, "fingerprint": fingerprint(made.key)}
        more = {"former": former, "path": str(keys_dir / f"{name}{PUBLIC}")}
        print_json(f"keys_{verb}", payload | more)
        return
    click.echo(f"{name}  {made.key}  {fingerprint(made.key)}")
    for one in made.former:
        click.echo(f"{name}  {one.key}  {fingerprint(one.key)}  until {_text(one.until)}")


def _listed(keys_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    problems = []
    try:
        names = sorted(os.listdir(keys_dir))
    except OSError as error:
        raise ConfigError(f"{keys_dir}: {error.strerror}: --keys-dir names the folder") from error
    now = utc_now()
    for file in names:
        stem, suffix = os.path.splitext(file)
        if suffix not in (PUBLIC, REVOKED, SECRET):
            continue
        try:
            found = read_key_file(keys_dir / file)
        except ConfigError as error:
            problems.append(error.message)
            continue
        if suffix == SECRET:
            continue
        has_secret = f"{stem}{SECRET}" in names
        state = "listed" if suffix == PUBLIC else "revoked"
        rows.append(_row(stem, found.key, state, found.made, None, has_secret))
        rows += [
            _row(
                stem, one.key, "grace" if now < one.until else "ended", None, one.until, has_secret
            )
            for one in found.former
        ]
    return rows, problems


def _row(
    name: str,
    key: str,
    state: str,
    made: dt.datetime | None,
    until: dt.datetime | None,
    secret: bool,
) -> dict[str, Any]:
    return {
        "name": name,
        "key": key,
        "fingerprint": fingerprint(key),
        "state": state,
        "made": _text(made),
        "until": _text(until),
        "has_secret": secret,
    }


def _text(when: dt.datetime | None) -> str | None:
    return None if when is None else f"{when:%Y-%m-%dT%H:%M:%SZ}"
