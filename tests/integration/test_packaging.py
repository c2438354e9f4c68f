"""A wheel of this tree, installed where nothing of it is: its programs, files and sizes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

CORE_BYTES_MAX = 12 << 20
"""Of the wheel's own files once installed, kernels included; 6.4 MiB when this was written."""


def tracked_tree(folder: Path) -> Path:
    """Copy the files that git knows: a build must need no other."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to it")
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(("tests/", "bench/")) or not (ROOT / name).is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def built(tree: Path, out: Path, **environ: str) -> Path:
    """Build a wheel as pip does, without a network."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
         "--quiet", "--wheel-dir", str(out), str(tree)],
        capture_output=True, text=True, check=False, env=os.environ | environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")
    return tracked_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def installed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh environment with the wheel; dependencies come from the one that runs the tests."""
    wheel = built(tree, tmp_path_factory.mktemp("wheel"))
    place = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "install", "--quiet",
         "--no-deps", "--no-index", str(wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    others = [it for it in sys.path if it.endswith("site-packages")]
    # Behind its own folder; an editable msd of theirs would be found by a .pth file, which is not read.
    (site / "others.pth").write_text("\n".join(others) + "\n")
    yield place


def run(place: Path, program: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(place / "bin" / program), *arguments],
        capture_output=True, text=True, check=False, cwd="/", timeout=100,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_programs_run_from_the_wheel(installed: Path) -> None:
    where = run(installed, "python", "-c", "import msd_daemon; print(msd_daemon.__file__)")
    assert where.startswith(str(installed))
    assert run(installed, "python", "-m", "msd_daemon", "--version").startswith("msd-daemon 0.")
    assert run(installed, "msd-daemon", "--version") == run(
        installed, "python", "-m", "msd_daemon", "--version"
    ).replace("__main__.py", "msd-daemon")
    assert run(installed, "msd-planner", "--version").startswith("msd-planner 0.")
    assert "msdctl, version 0." in run(installed, "msdctl", "--version")
    assert "install-service" in run(installed, "msdctl", "--help")
    assert '"memory"' in run(installed, "msdctl", "schema", "daemon")


def test_files_that_are_no_modules_are_there(installed: Path, tmp_path: Path) -> None:
    written = run(installed, "msdctl", "install-service", "planner", "--root", str(tmp_path))
    assert f"{tmp_path}/etc/systemd/system/msd-planner.service" in written
    unit = (tmp_path / "etc/systemd/system/msd-planner.service").read_text()
    assert f"ExecStart={installed}/bin/msd-planner" in unit
    code = (
        "from importlib.resources import files\n"
        "print(len(files('msd_daemon.dashboard').joinpath('page/page.js').read_text()))"
    )
    assert int(run(installed, "python", "-c", code)) > 1000


def test_it_is_small(installed: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages")
    own = [*site.glob("msd_*"), site / "federation"]
    size = sum(it.stat().st_size for folder in own for it in folder.rglob("*") if it.is_file())
    assert size < CORE_BYTES_MAX


@pytest.mark.soak
def test_a_pure_wheel_fits_every_machine(tree: Path, tmp_path: Path) -> None:
    wheel = built(tree, tmp_path, MSD_PURE="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [it for it in zipfile.ZipFile(wheel).namelist() if it.endswith(".so")]
