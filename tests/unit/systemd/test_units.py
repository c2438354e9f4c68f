"""The units: systemd understands them, they start what there is, and agree with what it does."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from msd_client.contract.errors import AddressMissingError, ConfigError
from msd_client.contract.paths import check_socket_path
from msd_daemon import app, planner_app
from msd_daemon.services.daemon import DRAIN_TIMEOUT_S, TICK_S
from tests.support.sources import ROOT

UNITS = ("msd-daemon.service", "msd-planner.service")
SYSTEM_UNITS = Path("/usr/lib/systemd/system")
SECURITY_MAX = 25
"""Of systemd-analyze security, in tenths; 22 and 17 when the units were written."""
USER_UNITS = ("user/msd-daemon.service", "user/msd-planner.service")

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or not SYSTEM_UNITS.is_dir(),
    reason="systemd is not installed here",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root folder with the units, stand-ins for our programs, and this machine's targets."""
    for folder in ("opt/msd/bin", "etc/systemd/system", "usr/lib/systemd/system"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name in ("opt/msd/bin/msd-daemon", "opt/msd/bin/msd-planner", "bin/kill"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    for unit in UNITS:
        shutil.copy(ROOT / "systemd" / unit, tmp_path / "etc/systemd/system")
    for kind in ("target", "slice", "socket"):
        for path in SYSTEM_UNITS.glob(f"*.{kind}"):
            shutil.copy(path, tmp_path / "usr/lib/systemd/system", follow_symlinks=False)
    return tmp_path


def analyze(root: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", verb, f"--root={root}", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_systemd
def test_systemd_has_nothing_to_say_of_them(root: Path) -> None:
    done = analyze(root, "verify", "--man=no", *UNITS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("unit", USER_UNITS)
def test_systemd_has_nothing_to_say_of_those_of_a_user(root: Path, unit: str) -> None:
    shutil.copy(ROOT / "systemd" / unit, root / "etc/systemd/system")
    done = analyze(root, "verify", "--man=no", Path(unit).name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
def test_a_mistake_would_be_found(root: Path) -> None:
    unit = root / "etc/systemd/system/msd-daemon.service"
    unit.write_text(unit.read_text().replace("WatchdogSec", "WatchDogSec"))
    assert "Unknown key" in analyze(root, "verify", "--man=no", *UNITS).stderr


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_they_are_locked_in(root: Path, unit: str) -> None:
    done = analyze(root, "security", "--offline=true", f"--threshold={SECURITY_MAX}", unit)
    assert done.returncode == 0, done.stdout


def section(unit: str, name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "systemd" / unit)
    return parser[name]


@pytest.mark.parametrize("folder", ["", "user/"])
def test_their_commands_are_ours(folder: str) -> None:
    line = section(f"{folder}msd-daemon.service", "Service")["ExecStart"]
    program, *arguments = shlex.split(line.replace("%t", "/run/user/1000"))
    assert program == "/opt/msd/bin/msd-daemon"
    options = app._parse(arguments)
    assert check_socket_path(Path(options.socket)).parent == Path(options.runtime_dir)
    line = section(f"{folder}msd-planner.service", "Service")["ExecStart"]
    program, *arguments = shlex.split(line)
    assert program == "/opt/msd/bin/msd-planner"
    assert planner_app._parse(arguments).state_dir.endswith(
        "/msd/planner" if folder else "-planner"
    )


@pytest.mark.parametrize("unit", UNITS + USER_UNITS)
def test_they_are_started_again_for_ever_but_for_faults_of_the_configuration(unit: str) -> None:
    limits, service = section(unit, "Unit"), section(unit, "Service")
    assert limits["StartLimitIntervalSec"] == "0"
    assert service["Restart"] == "on-failure"
    assert int(service["RestartPreventExitStatus"]) == ConfigError.exit_code
    assert AddressMissingError.exit_code != ConfigError.exit_code
    assert service["Type"] == "notify"
    assert float(service["WatchdogSec"]) > 3 * TICK_S


@pytest.mark.parametrize("folder", ["", "user/"])
def test_a_stop_leaves_time_to_drain(folder: str) -> None:
    service = section(f"{folder}msd-daemon.service", "Service")
    assert float(service["TimeoutStopSec"]) > DRAIN_TIMEOUT_S + 5


@needs_systemd
def test_users_and_folders_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for program, folder in (("systemd-sysusers", "sysusers.d"), ("systemd-tmpfiles", "tmpfiles.d")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here")
        more = ["--create"] if program == "systemd-tmpfiles" else []
        source = ROOT / "systemd" / folder / "msd.conf"
        done = subprocess.run(
            [program, *more, f"--root={tmp_path}", str(source)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "msd:" in (tmp_path / "etc/passwd").read_text()
    assert (tmp_path / "etc/msd/keys").stat().st_mode & 0o777 == 0o700
