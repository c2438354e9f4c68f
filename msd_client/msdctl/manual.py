"""The manual of msdctl, made from the verbs' own texts: as roff for man(1), as Markdown for the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import click

EXIT_CODES = {
    0: "done",
    1: "failed, or something was found that will not work",
    2: "the command line is wrong",
    3: "no daemon answers, or the planner or a worker went away",
    4: "no such job, source or node",
    5: "a deadline passed",
    6: "not permitted",
    70: "a fault of msd itself, with its traceback",
    78: "the job, the mesh or the daemon's configuration is wrong",
    130: "interrupted",
}
VARIABLES = {
    "MSD__DAEMON__SOCKET": "the daemon's control socket, where --socket names none",
    "MSD__SECTION__KEY": "any key of daemon.toml",
    "MSD_CONFIG": "daemon.toml, by an absolute path",
    "NO_COLOR": "no colours, also on a terminal",
}


@dataclass(frozen=True)
class VerbText:
    """A verb as a manual shows it."""

    name: str
    usage: str
    text: tuple[str, ...]
    """Paragraphs."""
    options: tuple[tuple[str, str], ...]


def verb_texts(group: click.Group, parent: str = "msdctl") -> Iterator[VerbText]:
    """Yield all verbs of a group, those below groups of their own too."""
    context = click.Context(group, info_name=parent)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        full = f"{parent} {name}"
        if isinstance(command, click.Group):
            yield from verb_texts(command, full)
            continue
        own = click.Context(command, info_name=full)
        # A line that begins a paragraph that click shall not wrap holds a backspace.
        told = (command.help or "").replace("\b", "").strip()
        yield VerbText(
            full,
            " ".join(command.collect_usage_pieces(own)),
            tuple(" ".join(part.split()) for part in re.split(r"\n\s*\n", told) if part.strip()),
            tuple(
                record
                for parameter in command.get_params(own)
                if isinstance(parameter, click.Option)
                and (record := parameter.get_help_record(own)) is not None
                and "--help" not in parameter.opts
            ),
        )


def roff(group: click.Group, version: str) -> str:
    """Return the manual as a page of section 1."""
    lines = [
        f'.TH MSDCTL 1 "" "msd {version}" "msd"', ".SH NAME",
        "msdctl \\- look at and steer msd, the data loader of a node", ".SH SYNOPSIS",
        ".B msdctl", "\\fIverb\\fR [\\fIoptions\\fR]", ".SH VERBS",
    ]  # fmt: skip
    for verb in verb_texts(group):
        lines += [".SS " + _roff(f"{verb.name} {verb.usage}")]
        for number, paragraph in enumerate(verb.text):
            lines += ([".PP"] if number else []) + [_roff(paragraph)]
        for option, meaning in verb.options:
            lines += [".TP", f".B {_roff(option)}", _roff(meaning)]
    lines += [".SH EXIT STATUS"]
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", f".B {code}", _roff(meaning)]
    lines += [".SH ENVIRONMENT"]
    for name, meaning in VARIABLES.items():
        lines += [".TP", f".B {_roff(name)}", _roff(meaning)]
    lines += [".SH SEE ALSO", "msd-daemon \\-\\-help, msd-planner \\-\\-help"]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    escaped = "".join(it if it.isascii() else f"\\[u{ord(it):04X}]" for it in escaped)
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


def markdown(group: click.Group) -> str:
    """Return the verbs as a page of the site."""
    parts = [
        "# msdctl, verb by verb\n\nMade from the verbs' own texts by `msdctl man --markdown`.\n"
    ]
    for verb in verb_texts(group):
        parts.append(f"\n## {verb.name}\n\n    {verb.name} {verb.usage}\n")
        parts += [f"\n{paragraph}\n" for paragraph in verb.text]
        if verb.options:
            parts.append("\n| option | |\n|---|---|\n")
            parts += [
                f"| `{_cell(option)}` | {_cell(meaning)} |\n" for option, meaning in verb.options
            ]
    return "".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
