"""Every block of the documentation is what it says: jobs and configurations that the models take,
Python whose names exist, command lines that the verbs take, links that lead somewhere."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import tomllib
from typing import Any

import click
import pytest
import yaml

from msd_client.msdctl.verbs import VerbGroup
from msd_daemon.config.daemon_file import DaemonFile
from msd_daemon.config.job_file import JobFile, parse_job_file
from msd_daemon.config.planner_file import PlannerFile
from msd_daemon.config.yaml_text import YamlFaultError, read_yaml
from tests.support.pages import PAGES, Block, anchors, blocks, commands
from tests.support.sources import ROOT

REST = {
    "tokenizer": {"bytes": True},
    "batch": {"rows": 1, "row_tokens": 64},
    "sources": {"any": "any.jsonl"},
}


def shown(found: list[Any]) -> dict[str, Any]:
    return {
        "argvalues": found,
        "ids": [str(it[0] if isinstance(it, tuple) else it) for it in found],
    }


@pytest.mark.parametrize("block", **shown(blocks("yaml")))
def test_yaml_is_a_job_or_a_part_of_one(block: Block) -> None:
    for text in re.split(r"^---$", block.text, flags=re.MULTILINE):
        try:
            found = read_yaml(text)
        except YamlFaultError:
            # Several ways to write one key, each on a line of its own.
            found = {}
            for line in filter(str.strip, text.splitlines()):
                check_job_part(read_yaml(line), block)
        check_job_part(found, block)


def check_job_part(found: dict[str, Any], block: Block) -> None:
    if "apiVersion" in found:
        return  # Kubernetes; tests/unit/examples looks at those
    if (
        found
        and not set(found) & set(JobFile.model_fields)
        and all(isinstance(it, (dict, str)) for it in found.values())
    ):
        found = {"sources": found}  # a source alone
    parsed = parse_job_file(REST | found)
    unknown = [it.line() for it in parsed.faults if "unknown key" in it.line()]
    assert unknown == [], str(block)


@pytest.mark.parametrize("block", **shown(blocks("toml")))
def test_toml_is_a_configuration(block: Block) -> None:
    found = tomllib.loads(block.text)
    if "project" in found:
        return  # a pyproject.toml
    model = DaemonFile if set(found) & set(DaemonFile.model_fields) else PlannerFile
    model.model_validate(found)


@pytest.mark.parametrize("block", **shown(blocks("json")))
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", **shown(blocks("python")))
def test_python_compiles_and_our_names_in_it_exist(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msd_"):
            module = importlib.import_module(str(node.module))
            missing = [it.name for it in node.names if not hasattr(module, it.name)]
            assert missing == [], str(block)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("msd_client", "msd_daemon")
        ):
            module = importlib.import_module(node.value.id)
            if not hasattr(module, node.attr):
                importlib.import_module(f"{node.value.id}.{node.attr}")


GROUP = VerbGroup(name="msdctl")


@pytest.mark.parametrize("found", **shown(commands("msdctl")))
def test_command_lines_are_what_the_verbs_take(found: tuple[Block, str]) -> None:
    block, line = found
    context = click.Context(GROUP)
    words = shlex.split(re.sub(r"[\[\]…]|\.\.\.", "", line).replace("|", " "))[1:]
    command: click.Command | None = GROUP
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        verb = words.pop(0)
        command = command.get_command(context, verb)
        assert command is not None, f"{block}: no verb {verb!r} in {line!r}"
    assert command is not None
    known = {
        option
        for parameter in command.params
        for option in parameter.opts + parameter.secondary_opts
    }
    used = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    assert used - known - {"--help"} == set(), f"{block}: {line!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_links_lead_somewhere(page: Any) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_verb_stands_on_its_page() -> None:
    page = (ROOT / "docs/msdctl.md").read_text(encoding="utf-8")
    context = click.Context(GROUP)
    missing = [it for it in GROUP.list_commands(context) if not re.search(rf"`{it}\b", page)]
    assert missing == []


def test_every_page_stands_in_the_sites_contents() -> None:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    site = yaml.load((ROOT / "docs/mkdocs.yml").read_text(), Loader)
    listed = set(re.findall(r"[\w-]+\.md", str(site["nav"])))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - listed == set()
