"""Slurm's lists of hosts, written out: `n[01-04,7],login` is n01, n02, n03, n04, n7, login. Pure.

A list is names with commas between them; a name may have any number of brackets, each with numbers
and ranges of them, and text around and behind: `r[1-2]n[01-16]-ib`. A range is written as wide as its
lower end where that begins with a zero. As scontrol does it, without scontrol, which many
containers lack.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from msd_client.contract.errors import ConfigError

HOSTS_MAX = 65_536
"""Slurm's own limit of a range."""
TEXT_CHARACTERS_MAX = 1 << 20
NAME_CHARACTERS_MAX = 253
_TEXT = re.compile(r"[A-Za-z0-9._-]*")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a list in its order, each once.

    Raises:
        ConfigError: It is malformed, empty, or of more than 65,536 hosts; what is wrong is named.
    """
    if len(text) > TEXT_CHARACTERS_MAX:
        raise _wrong(text, f"{len(text)} characters, at most {TEXT_CHARACTERS_MAX}")
    hosts: dict[str, None] = {}
    room = HOSTS_MAX
    for item in _items(text):
        found = _expand(text, item, room)
        hosts.update(dict.fromkeys(found))
        room -= len(found)
    if not hosts:
        raise _wrong(text, "it names no host")
    return list(hosts)


def _items(text: str) -> Iterator[str]:
    """Yield what stands between the commas outside brackets."""
    begin, is_inside = 0, False
    for place, character in enumerate(text):
        if character == "[" and is_inside:
            raise _wrong(text, f"a bracket inside a bracket at character {place + 1}")
        if character == "]" and not is_inside:
            raise _wrong(text, f"a closing bracket without its opening at character {place + 1}")
        if character in "[]":
            is_inside = character == "["
        elif character == "," and not is_inside:
            yield text[begin:place]
            begin = place + 1
    if is_inside:
        raise _wrong(text, "a bracket is not closed")
    yield text[begin:]


def _expand(text: str, item: str, room: int) -> list[str]:
    if not item:
        raise _wrong(text, "nothing stands between two commas, or before or behind one")
    parts: list[list[str]] = []
    count = 1
    for number, piece in enumerate(re.split(r"[\[\]]", item)):
        if number % 2:
            found = _numbers(text, piece, room // count)
        elif _TEXT.fullmatch(piece):
            found = [piece]
        else:
            raise _wrong(text, f"{piece[:40]!r}: names have letters, digits, '.', '_' and '-'")
        count *= len(found)
        parts.append(found)
    if sum(max(map(len, found)) for found in parts) > NAME_CHARACTERS_MAX:
        raise _wrong(text, f"a name has more than {NAME_CHARACTERS_MAX} characters")
    if count > room:
        raise _wrong(text, f"more than {HOSTS_MAX} hosts")
    return ["".join(name) for name in itertools.product(*parts)]


def _numbers(text: str, ranges: str, room: int) -> list[str]:
    """Return the numbers of one bracket as text."""
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _wrong(text, f"{part[:40]!r} in brackets is no number and no range like 01-04")
        first, last = match[1], match[2] or match[1]
        begin, end = int(first), int(last) + 1
        if end <= begin:
            raise _wrong(text, f"the range {part} counts down")
        if end - begin > room - len(found):
            raise _wrong(text, f"more than {HOSTS_MAX} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(begin, end)]
    return found


def _wrong(text: str, what: str) -> ConfigError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return ConfigError(f"list of hosts {shown!r}: {what}; write it like n[01-04,7],login")
