"""Key files and folders: what is read, refused, kept and forgotten."""

from __future__ import annotations

import datetime as dt
import stat
from pathlib import Path

import pytest
import zmq

from federation.key_files import (
    KeyFile,
    check_name,
    generate,
    read_key_file,
    revoke,
    rotate,
    write_key_file,
)
from federation.keys import KeyDir
from msd_client.contract.errors import ConfigError

NOON = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> dt.datetime:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate(tmp_path, "p0")
    generate(tmp_path, "n1")
    return tmp_path


def test_generated_pair_belongs_together_and_only_the_secret_is_secret(folder: Path) -> None:
    public, secret = read_key_file(folder / "n1.pub"), read_key_file(folder / "n1.secret")
    assert public.key == secret.key
    assert zmq.curve_public(secret.secret.encode()).decode() == secret.key
    assert stat.S_IMODE((folder / "n1.secret").stat().st_mode) == 0o600
    assert secret.secret not in (folder / "n1.pub").read_text()
    assert sorted(path.name for path in folder.iterdir()) == [
        "n1.pub", "n1.secret", "p0.pub", "p0.secret"
    ]  # fmt: skip


def test_generate_replaces_nothing(folder: Path) -> None:
    before = (folder / "n1.secret").read_bytes()
    with pytest.raises(ConfigError, match="msdctl keys rotate n1"):
        generate(folder, "n1")
    assert (folder / "n1.secret").read_bytes() == before


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "x" * 65, "ä", "n1\n"])
def test_names_that_could_be_paths_are_refused(tmp_path: Path, name: str) -> None:
    for act in (lambda: check_name(name), lambda: generate(tmp_path, name)):
        with pytest.raises(ConfigError):
            act()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_secret_that_others_may_read_is_refused(folder: Path, mode: int) -> None:
    (folder / "n1.secret").chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 600"):
        KeyDir(folder, "n1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "key = 5",
        'key = "short"',
        f'key = "{"a" * 39}~"',
        f'key = "{"a" * 40}"\nsecret = "{"b" * 40}"',
        f'key = "{"a" * 40}"\nother = 1',
        f'key = "{"a" * 40}"\n[[former]]\nkey = "{"b" * 40}"\nuntil = 2026-11-30T12:00:00',
        f'key = "{"a" * 40}"\n[[former]]\nkey = "{"b" * 40}"',
        "\0",
        "# " + "x" * 20_000,
    ],
)
def test_files_that_are_none_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "n1.pub"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"n1\.pub"):
        read_key_file(path)


def test_written_file_is_read_back(tmp_path: Path) -> None:
    generate(tmp_path, "n1")
    rotate(tmp_path, "n1", HOUR, NOON)
    made = read_key_file(tmp_path / "n1.secret")
    write_key_file(tmp_path / "again.secret", "copy", made)
    assert read_key_file(tmp_path / "again.secret") == made
    assert made.former[0].until == NOON + HOUR


def test_missing_folder_and_secret_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys_dir.*msdctl keys generate n1"):
        KeyDir(tmp_path / "no", "n1")
    with pytest.raises(ConfigError, match="msdctl keys generate n1"):
        KeyDir(tmp_path, "n1")


def test_folder_is_watched(folder: Path) -> None:
    keys = KeyDir(folder, "p0")
    (n1,) = keys.public_keys("n1")
    assert keys.node_of(n1) == "n1"
    assert keys.names() == ["n1", "p0"]
    assert not keys.refresh(is_now=True)
    version = keys.version
    generate(folder, "n2")
    assert keys.refresh(is_now=True)
    assert keys.names() == ["n1", "n2", "p0"]
    (folder / "n1.pub").unlink()
    assert keys.refresh(is_now=True)
    assert keys.node_of(n1) is None
    assert keys.version == version + 2


def test_revoked_key_is_refused_however_often_it_is_listed(folder: Path) -> None:
    keys = KeyDir(folder, "p0")
    listed = (folder / "n1.pub").read_bytes()
    (n1,) = keys.public_keys("n1")
    revoke(folder, "n1")
    assert not (folder / "n1.secret").exists()
    assert keys.refresh(is_now=True)
    (folder / "n1.pub").write_bytes(listed)
    (folder / "other.pub").write_bytes(listed)
    keys.refresh(is_now=True)
    assert keys.node_of(n1) is None
    (folder / "n1.pub").unlink()
    (folder / "other.pub").unlink()
    generate(folder, "n1")
    assert keys.refresh(is_now=True)
    assert len(keys.public_keys("n1")) == 1


def test_both_keys_are_accepted_until_the_grace_ends(folder: Path) -> None:
    clock = Clock()
    keys = KeyDir(folder, "p0", clock)
    (old,) = keys.public_keys("n1")
    rotate(folder, "n1", HOUR, NOON)
    assert keys.refresh(is_now=True)
    new, former = keys.public_keys("n1")
    assert former == old
    assert keys.node_of(new) == keys.node_of(old) == "n1"
    clock.now = NOON + HOUR
    assert keys.refresh(is_now=True)
    assert keys.public_keys("n1") == [new]
    assert keys.node_of(old) is None


def test_listening_end_shows_its_old_key_until_the_grace_ends(folder: Path) -> None:
    clock = Clock()
    keys = KeyDir(folder, "p0", clock)
    old = keys.own
    rotate(folder, "p0", HOUR, NOON)
    keys.refresh(is_now=True)
    assert keys.own == old
    assert keys.own_pairs[1] == old
    clock.now = NOON + HOUR
    assert keys.refresh(is_now=True)
    assert keys.own == keys.own_pairs[0] != old
    assert len(keys.own_pairs) == 1


def test_rotation_without_grace_ends_the_old_key_at_once(folder: Path) -> None:
    keys = KeyDir(folder, "p0")
    (old,) = keys.public_keys("n1")
    rotate(folder, "n1", dt.timedelta(0), NOON)
    keys.refresh(is_now=True)
    assert keys.node_of(old) is None
    assert len(keys.public_keys("n1")) == 1


def test_rotation_twice_in_a_grace_keeps_both_former_keys(folder: Path) -> None:
    rotate(folder, "n1", HOUR, NOON)
    rotate(folder, "n1", HOUR, NOON + HOUR / 2)
    rotate(folder, "n1", HOUR, NOON + HOUR)
    found = read_key_file(folder / "n1.pub")
    assert [one.until for one in found.former] == [NOON + 2 * HOUR, NOON + 1.5 * HOUR]
    assert len(found.keys_at(NOON + 1.7 * HOUR)) == 2


def test_rotation_is_done_where_the_secret_is(folder: Path) -> None:
    (folder / "n1.secret").unlink()
    with pytest.raises(ConfigError, match="on the machine that holds the secret"):
        rotate(folder, "n1", HOUR, NOON)


def test_damaged_file_keeps_what_it_said_and_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyDir(folder, "p0")
    (n1,) = keys.public_keys("n1")
    whole = (folder / "n1.pub").read_bytes()
    (folder / "n1.pub").write_bytes(whole[:-9])
    for _ in range(3):
        assert not keys.refresh(is_now=True)
    assert keys.node_of(n1) == "n1"
    assert "n1.pub" in keys.problems
    assert len([one for one in caplog.records if "n1.pub" in one.message]) == 1
    (folder / "n1.pub").unlink()
    assert keys.refresh(is_now=True)
    assert keys.node_of(n1) is None
    assert not keys.problems


def test_key_under_two_names_is_nobodys(folder: Path) -> None:
    keys = KeyDir(folder, "p0")
    (n1,) = keys.public_keys("n1")
    (folder / "n9.pub").write_bytes((folder / "n1.pub").read_bytes())
    keys.refresh(is_now=True)
    assert keys.node_of(n1) is None
    assert "neither is accepted" in keys.problems["n9.pub"]
    (folder / "n9.pub").unlink()
    keys.refresh(is_now=True)
    assert keys.node_of(n1) == "n1"
    assert not keys.problems


def test_folder_that_is_gone_for_a_while_is_no_revocation(folder: Path, tmp_path: Path) -> None:
    keys = KeyDir(folder, "p0")
    (n1,) = keys.public_keys("n1")
    away = tmp_path.with_name(tmp_path.name + "-away")
    folder.rename(away)
    assert not keys.refresh(is_now=True)
    assert keys.node_of(n1) == "n1"
    assert keys.problems
    away.rename(folder)
    assert not keys.refresh(is_now=True)
    assert not keys.problems


def test_key_file_without_secret_is_no_secret_file(tmp_path: Path) -> None:
    write_key_file(tmp_path / "n1.secret", "x", KeyFile("a" * 40))
    with pytest.raises(ConfigError, match="secrets belong into"):
        read_key_file(tmp_path / "n1.secret")
