"""msdctl install-service: what it writes, and what it leaves alone."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath

import pytest
from click.testing import CliRunner

from msd_daemon.install.service_plan import placed
from msd_daemon.verbs.install_service import command


def run(*arguments: str) -> dict[str, list[str]]:
    done = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_a_system_service_has_units_user_folders_and_a_configuration(tmp_path: Path) -> None:
    answer = run("daemon", "planner", "--root", str(tmp_path), "--binaries", "/srv/msd/bin")
    assert answer["units"] == ["msd-daemon.service", "msd-planner.service"]
    assert answer["ran"] == []
    assert sorted(str(Path(it).relative_to(tmp_path)) for it in answer["written"]) == [
        "etc/msd/daemon.toml",
        "etc/msd/planner.toml",
        "etc/systemd/system/msd-daemon.service",
        "etc/systemd/system/msd-planner.service",
        "etc/sysusers.d/msd.conf",
        "etc/tmpfiles.d/msd.conf",
    ]
    unit = (tmp_path / "etc/systemd/system/msd-daemon.service").read_text()
    assert "ExecStart=/srv/msd/bin/msd-daemon --config /etc/msd/daemon.toml" in unit
    assert "/opt/msd" not in unit


def test_a_configuration_that_is_there_stays_and_units_are_brought_up_to_date(
    tmp_path: Path,
) -> None:
    config = tmp_path / "etc/msd/daemon.toml"
    unit = tmp_path / "etc/systemd/system/msd-daemon.service"
    for path in (config, unit):
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    run("--root", str(tmp_path), "--binaries", "/opt/msd/bin")
    assert config.read_text() == "mine"
    assert "msd-daemon" in unit.read_text()


def test_capabilities_come_only_where_they_are_asked_for(tmp_path: Path) -> None:
    arguments = ("--root", str(tmp_path), "--binaries", "/opt/msd/bin")
    drop_in = tmp_path / "etc/systemd/system/msd-daemon.service.d/many-users.conf"
    run(*arguments)
    assert not drop_in.exists()
    run(*arguments, "--many-users")
    assert "AmbientCapabilities=CAP_SETUID CAP_SETGID CAP_KILL" in drop_in.read_text()
    run(*arguments, "--many-users", "--remove")
    assert not drop_in.exists()


def test_removing_takes_units_away_and_leaves_what_people_wrote(tmp_path: Path) -> None:
    arguments = ("--root", str(tmp_path), "--binaries", "/opt/msd/bin")
    run(*arguments)
    answer = run(*arguments, "--remove")
    assert [Path(it).name for it in answer["removed"]] == ["msd-daemon.service"]
    assert (tmp_path / "etc/msd/daemon.toml").exists()


def test_a_users_service_lies_in_his_home_and_a_dry_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    answer = run("--user", "--now", "--dry-run", "--binaries", "/opt/msd/bin")
    assert answer["written"] == [
        f"{tmp_path}/systemd/user/msd-daemon.service", f"{tmp_path}/msd/daemon.toml"
    ]  # fmt: skip
    assert answer["ran"][-1] == "systemctl --user enable --now msd-daemon.service"
    assert os.listdir(tmp_path) == []


def test_an_image_is_installed_into_and_nothing_of_it_started(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--root", str(tmp_path), "--now"])
    assert done.exit_code == 2
    assert "--now starts services of this machine" in done.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["relative/bin", "/with space/bin", "/with%t/bin"])
def test_folders_that_a_unit_cannot_hold_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        placed("ExecStart=/opt/msd/bin/x", PurePosixPath(path))
