"""Slurm's lists of hosts, written out."""

from __future__ import annotations

import itertools
import re
import subprocess
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msd_client.contract.errors import ConfigError
from msd_daemon.launch.hostlist import HOSTS_MAX, NAME_CHARACTERS_MAX, expand_hostlist


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("n1", "n1"),
        ("n[01-04,7]", "n01 n02 n03 n04 n7"),
        ("a,b-1.example.org,c_2", "a b-1.example.org c_2"),
        ("n[8-11],login", "n8 n9 n10 n11 login"),
        ("n[098-102]", "n098 n099 n100 n101 n102"),
        ("n[08-100]", " ".join(f"n{number:02d}" for number in range(8, 101))),
        ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
        ("[1-3]", "1 2 3"),
        ("n[3,1,2]", "n3 n1 n2"),
        ("n1,n[1-2],n2", "n1 n2"),
        ("n[000000000000000001]", "n000000000000000001"),
    ],
)
def test_lists_are_written_out_in_their_order(text: str, wanted: str) -> None:
    assert expand_hostlist(text) == wanted.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nothing stands between"),
        (",", "nothing stands between"),
        ("n1,,n2", "nothing stands between"),
        ("n1,", "nothing stands between"),
        ("n[1-2", "not closed"),
        ("n1-2]", "without its opening"),
        ("n[1[2]]", "inside a bracket"),
        ("n[]", "no number"),
        ("n[a-b]", "no number"),
        ("n[1-]", "no number"),
        ("n[1--2]", "no number"),
        ("n[1-2-3]", "no number"),
        ("n[1-2]]", "without its opening"),
        ("n[000x133]", "no number"),
        ("n[²]", "no number"),
        ("n[3-1]", "counts down"),
        ("n 1", "names have letters"),
        ("n1\n", "names have letters"),
        ("../etc", "names have letters"),
        (f"n[1-{HOSTS_MAX + 1}]", "more than 65536 hosts"),
        ("n[1-999999999999999999]", "more than 65536 hosts"),
        ("n[1-300]m[1-300]", "more than 65536 hosts"),
        ("n[1-65536],m", "more than 65536 hosts"),
        ("n" * (NAME_CHARACTERS_MAX + 1), "more than 253 characters"),
        ("n[" + "1" * 19 + "]", "no number"),
        ("n," * (1 << 20), "characters, at most"),
    ],
)
def test_what_is_no_list_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        expand_hostlist(text)


def test_as_many_as_slurm_allows() -> None:
    assert len(expand_hostlist(f"n[1-{HOSTS_MAX}]")) == HOSTS_MAX


@st.composite
def brackets(draw: Any) -> tuple[str, list[str]]:
    """A bracket, and its numbers by another way: counted up as text, digit by digit."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 4))
        first = draw(st.integers(0, 10**width - 1))
        count = draw(st.integers(1, 5))
        counted = [str(first).rjust(width, "0")]
        while len(counted) < count:
            counted.append(_next(counted[-1]))
        numbers += counted
        texts.append(counted[0] if count == 1 else f"{counted[0]}-{counted[-1]}")
    return ",".join(texts), numbers


def _next(text: str) -> str:
    digits = list(text)
    for place in reversed(range(len(digits))):
        if digits[place] != "9":
            digits[place] = chr(ord(digits[place]) + 1)
            return "".join(digits)
        digits[place] = "0"
    return "1" + "".join(digits)


NAMES = st.from_regex(r"[a-z][a-z.-]{0,4}", fullmatch=True)


@st.composite
def lists(draw: Any) -> tuple[str, list[str]]:
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        text, parts = draw(NAMES), []
        parts.append([text])
        for _ in range(draw(st.integers(0, 2))):
            inside, numbers = draw(brackets())
            behind = draw(NAMES)
            text += f"[{inside}]{behind}"
            parts += [numbers, [behind]]
        texts.append(text)
        hosts += ["".join(name) for name in itertools.product(*parts)]
    return ",".join(texts), list(dict.fromkeys(hosts))


@given(lists())
def test_what_was_put_together_comes_apart(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert expand_hostlist(text) == hosts
    assert expand_hostlist(",".join(hosts)) == hosts


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1200), st.integers(0, 40), st.integers(1, 5))
def test_ranges_are_bashs_braces(first: int, more: int, width: int) -> None:
    begin, end = f"{first:0{width}d}", f"{first + more:0{width}d}"
    done = subprocess.run(
        ["bash", "-c", f"echo n{{{begin}..{end}}}"], capture_output=True, text=True, check=True
    )
    # bash pads by the wider end, Slurm by the lower one: they agree where both are as wide.
    if len(begin) == len(end):
        assert expand_hostlist(f"n[{begin}-{end}]") == done.stdout.split()


@settings(max_examples=400)
@given(st.text(st.sampled_from("n19[],-0a .\x00²"), max_size=30) | st.text(max_size=30))
@example("[" * 1000)
def test_any_text_gives_hosts_or_the_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ConfigError:
        return
    assert 0 < len(hosts) <= HOSTS_MAX
    assert len(set(hosts)) == len(hosts)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", host) for host in hosts)
