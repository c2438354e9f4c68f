"""The page of daemon.toml and the commented files say what the models do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from msd_daemon.config.daemon_file import DaemonFile, load_daemon_config
from msd_daemon.config.planner_file import load_planner_config
from msd_daemon.config.toml_page import daemon_page, daemon_toml, planner_toml
from tests.support.sources import ROOT

HOME = {"HOME": "/home/u"}


def test_the_page_is_current() -> None:
    written = (ROOT / "docs/daemon.md").read_text()
    assert written == daemon_page(), "run python -m msd_daemon.config.toml_page docs/daemon.md"


def test_the_page_has_every_key() -> None:
    page = daemon_page()
    for section, field in DaemonFile.model_fields.items():
        part = page.split(f"## [{section}]\n")[1].split("\n## ")[0]
        for key in field.annotation.model_fields:
            assert f"| `{key}` |" in part


def test_the_commented_files_are_files_that_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text(daemon_toml())
    plain = load_daemon_config(None, HOME)
    assert load_daemon_config(file, HOME) == plain
    file.write_text(planner_toml())
    assert load_planner_config(file, HOME) == load_planner_config(None, HOME)


def test_their_comments_are_keys_with_their_defaults(tmp_path: Path) -> None:
    """Each commented line, taken out of its comment, is the default."""
    text = re.sub(r"^# (\w+ = (?!\.\.\.).*)$", r"\1", daemon_toml(), flags=re.MULTILINE)
    assert len(tomllib.loads(text)["deadlines"]) == 5
    file = tmp_path / "daemon.toml"
    file.write_text(text)
    found, plain = load_daemon_config(file, HOME), load_daemon_config(None, HOME)
    assert {**vars(found), "origins": {}} == {**vars(plain), "origins": {}}
