"""The examples are files that this version reads, with the defaults they claim."""

import re
from pathlib import Path

import pytest

from msd_daemon.config.daemon_file import daemon_schema, load_daemon_config
from msd_daemon.config.job_file import parse_job_file
from msd_daemon.config.planner_file import load_planner_config
from msd_daemon.config.yaml_text import read_yaml

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_example_job_has_no_fault(file):
    parsed = parse_job_file(read_yaml(file.read_text()))
    assert [fault.line() for fault in parsed.faults] == []


def test_there_are_examples():
    assert len(list(EXAMPLES.glob("*.yaml"))) >= 3


def test_example_daemon_file_says_the_defaults():
    environ = {"HOME": "/home/u"}
    written = load_daemon_config(EXAMPLES / "daemon.toml", environ)
    built_in = load_daemon_config(None, environ)
    for key in vars(built_in):
        if key != "origins":
            assert getattr(written, key) == getattr(built_in, key), key


def test_example_planner_file_says_the_defaults():
    environ = {"HOME": "/home/u"}
    written = load_planner_config(EXAMPLES / "planner.toml", environ)
    assert written == load_planner_config(None, environ)


def test_the_daemons_file_names_every_key() -> None:
    named: dict[str, set[str]] = {}
    for line in (EXAMPLES / "daemon.toml").read_text().splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            keys = named.setdefault(match[1], set())
        elif match := re.match(r"(?:# )?(\w+)(?: = |: see )", line):
            keys.add(match[1])
    sections = daemon_schema()["$defs"]
    known = {
        name: set(sections[value["$ref"].rpartition("/")[2]]["properties"])
        for name, value in daemon_schema()["properties"].items()
        if name != "federation"  # of clusters alone, see its own page
    }
    assert named == known
