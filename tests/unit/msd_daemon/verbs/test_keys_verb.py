"""`msdctl keys` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msd_client.msdctl import main


class Typed:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        code = main.run(["keys", "--keys-dir", str(self.folder), *words])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def json(self, *words: str) -> Any:
        code, out, err = self(*words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(tmp_path / "keys", capsys)


def test_keys_are_made_listed_and_shown(keys: Typed) -> None:
    code, out, err = keys("generate", "n1")
    assert code == 0
    assert "n1.secret stays here" in err
    shown = keys.json("show", "n1")
    assert shown["schema"] == "msd.keys_show/1"
    assert shown["key"] in out
    listed = keys.json("list")
    assert listed["schema"] == "msd.keys/1"
    (row,) = listed["keys"]
    assert (row["name"], row["state"], row["has_secret"]) == ("n1", "listed", True)
    assert row["fingerprint"] == shown["fingerprint"]
    code, out, _ = keys("list")
    assert out.splitlines()[0].split() == [
        "NAME", "FINGERPRINT", "STATE", "MADE", "UNTIL", "SECRET"
    ]  # fmt: skip


def test_rotated_key_is_listed_with_its_grace(keys: Typed) -> None:
    old = keys.json("generate", "n1")["key"]
    made = keys.json("rotate", "n1", "--grace", "10m")
    assert made["key"] != old
    assert made["former"][0]["key"] == old
    assert [row["state"] for row in keys.json("list")["keys"]] == ["listed", "grace"]
    assert keys.json("rotate", "n1", "--grace", "0s")["former"] == []


def test_revoked_name_is_listed_as_such(keys: Typed) -> None:
    fingerprint = keys.json("generate", "n1")["fingerprint"]
    noted = keys.json("revoke", "n1")["noted"]
    assert [Path(path).name for path in noted] == [f"n1-{fingerprint}.revoked"]
    (row,) = keys.json("list")["keys"]
    assert row["state"] == "revoked"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["generate", "../n1"], 78, "named by 1 to 64"),
        (["show", "n9"], 4, "msdctl keys list"),
        (["revoke", "n9"], 4, "not listed"),
        (["rotate", "n9"], 78, "on the machine that holds the secret"),
        (["rotate", "n1", "--grace", "1w"], 2, "30s, 10m, 1h, 2d"),
        (["rotate", "n1", "--grace", "900d"], 2, "more than a year"),
    ],
)
def test_faults_have_their_exit_codes(keys: Typed, words: list[str], code: int, said: str) -> None:
    keys("generate", "n1")
    found, out, err = keys(*words)
    assert (found, out) == (code, "")
    assert said in err


def test_list_names_what_is_wrong_and_fails(keys: Typed) -> None:
    keys("generate", "n1")
    (keys.folder / "n2.pub").write_text("nonsense")
    code, out, err = keys("list")
    assert code == 1
    assert "n1" in out
    assert "n2.pub" in err


def test_missing_folder_is_named(keys: Typed) -> None:
    code, _, err = keys("list")
    assert code == 78
    assert "--keys-dir" in err
