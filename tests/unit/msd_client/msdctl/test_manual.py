"""The manual and what completes command lines, made from the verbs' own texts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from msd_client.msdctl import completion, man
from msd_client.msdctl.manual import EXIT_CODES, verb_texts
from msd_client.msdctl.verbs import VerbGroup


def test_every_verb_has_a_text_and_every_option_a_meaning() -> None:
    verbs = {verb.name: verb for verb in verb_texts(VerbGroup(name="msdctl"))}
    assert {"msdctl status", "msdctl mixture set", "msdctl keys rotate"} <= set(verbs)
    assert [name for name, verb in verbs.items() if not verb.text] == []
    for verb in verbs.values():
        for option, meaning in verb.options:
            assert option.startswith("-")
            assert meaning or option == "", f"{verb.name} {option}"


def test_the_page_is_roff_that_man_takes(tmp_path: Path) -> None:
    text = CliRunner().invoke(man.command, [], catch_exceptions=False).output
    assert all(f".B {code}\n" in text for code in EXIT_CODES)
    page = tmp_path / "msdctl.1"
    page.write_text(text)
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed here")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", str(page)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_same_as_markdown() -> None:
    text = CliRunner().invoke(man.command, ["--markdown"], catch_exceptions=False).output
    assert "\n## msdctl status\n" in text
    assert "| `--json` |" in text


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    text = CliRunner().invoke(completion.command, [shell], catch_exceptions=False).output
    assert "_MSDCTL_COMPLETE" in text


def test_verbs_and_options_are_completed() -> None:
    def completed(*words: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "msd_client.msdctl.main"],
            env=os.environ | {
                completion.VARIABLE: "bash_complete", "COMP_WORDS": " ".join(words),
                "COMP_CWORD": str(len(words) - 1),
            },
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert {"status", "stop", "start-state"} <= set(completed("msdctl", "st"))
    assert "--mesh" in completed("msdctl", "check", "--me")
