"""A booted systemd of a test's own: this machine's root folder under an overlay, in a container.

Root only, and only where systemd-nspawn is installed. The container has its own network, /dev/shm,
/run and /tmp; what it writes lies in a tmpfs that goes with it. msd is this checkout, with the
libraries of the environment that runs the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.node import is_over, wait_until
from tests.support.sources import ROOT

PROGRAMS = ("systemd-nspawn", "nsenter", "unshare", "mount")
BINARIES = "/opt/msd/bin"
SOURCE = "/opt/msd-source"
BOOT_S = 90.0

_START = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
root="$1/root"
: > "$root/etc/machine-id"
# What this machine runs is no part of the test.
rm -rf "$root"/etc/systemd/system/*.wants
mkdir -p "$root/opt/msd/bin"
cp "$MSD_TEST_PROGRAMS"/* "$root/opt/msd/bin/"
exec systemd-nspawn -D "$root" --register=no --keep-unit --private-network --console=pipe \
    --kill-signal=SIGRTMIN+3 $MSD_TEST_BINDS -b
"""


def needs_booted() -> str:
    """Return why no systemd can be booted here; empty where one can."""
    if os.geteuid():
        return "a container needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not installed (apt-get install systemd-container)"
    if not Path("/usr/lib/systemd/systemd").exists() and not Path("/lib/systemd/systemd").exists():
        return "systemd is not installed here"
    code = (
        'mount -t tmpfs t "$1" && mkdir "$1/u" "$1/w" "$1/r" && '
        'mount -t overlay o -o "lowerdir=/,upperdir=$1/u,workdir=$1/w" "$1/r"'
    )
    probe = subprocess.run(
        ["unshare", "--mount", "sh", "-c", code, "sh", "/mnt"], capture_output=True, check=False
    )
    return "" if not probe.returncode else "this machine forbids overlay mounts"


class Booted:
    """A container whose systemd is up."""

    def __init__(self, leader: int, log: Path) -> None:
        self._leader = leader
        self._log = log

    def run(self, *command: str, is_checked: bool = True) -> str:
        """Run a command inside; return what it printed."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._leader), "-a", "--", *command],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert not (is_checked and done.returncode), (
            f"{command}: {done.stdout}{done.stderr}\n{self._log.read_text()[-2000:]}"
        )
        return done.stdout + done.stderr

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command inside; its caller ends it."""
        return subprocess.Popen(
            ["nsenter", "-t", str(self._leader), "-a", "--", *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def python(self, *arguments: str) -> tuple[str, ...]:
        """Return the command line of this checkout's Python inside."""
        return (f"{BINARIES}/python", *arguments)

    def write(self, path: str, text: str) -> None:
        """Write a file inside."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._leader), "-a", "--", "sh", "-c", f"cat > {path}"],
            input=text, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr

    def unit(self, name: str, *keys: str) -> dict[str, str]:
        """Return properties of a unit."""
        said = self.run("systemctl", "show", name, *(f"--property={key}" for key in keys))
        return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)

    def log_of(self, unit: str) -> str:
        """Return a unit's log."""
        return self.run("journalctl", "-u", unit, "--no-pager", "-o", "cat", is_checked=False)


@contextlib.contextmanager
def booted_system(folder: Path) -> Iterator[Booted]:
    """Boot a container and power it off at the end."""
    programs = folder / "programs"
    programs.mkdir()
    binds = [f"--bind-ro={ROOT}:{SOURCE}"]
    path = [SOURCE]
    for number, entry in enumerate(it for it in sys.path if it.endswith("site-packages")):
        binds.append(f"--bind-ro={entry}:/opt/msd-site{number}")
        path.append(f"/opt/msd-site{number}")
    interpreter = Path(sys.executable).resolve()
    base = Path(sys.base_prefix).resolve()
    if base != Path("/usr"):  # in somebody's home, which units do not see
        binds.append(f"--bind-ro={base}:/opt/msd-python")
        interpreter = Path("/opt/msd-python") / interpreter.relative_to(base)
    head = (
        f"#!/bin/sh\nexport PYTHONPATH={':'.join(path)} PYTHONDONTWRITEBYTECODE=1"
        f" LD_LIBRARY_PATH={interpreter.parents[1]}/lib\nexec {interpreter}"
    )
    for name, call in (
        ("python", ""), ("msd-daemon", " -m msd_daemon"), ("msd-planner", " -m msd_daemon.planner_app"),
        ("msdctl", " -m msd_client.msdctl.main"),
    ):  # fmt: skip
        (programs / name).write_text(f'{head}{call} "$@"\n')
        (programs / name).chmod(0o755)
    mount = folder / "system"
    mount.mkdir()
    log = folder / "console.log"
    with log.open("wb") as console:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _START, "sh", str(mount)],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            env=os.environ | {"MSD_TEST_PROGRAMS": str(programs), "MSD_TEST_BINDS": " ".join(binds)},
        )  # fmt: skip
    try:
        yield _when_up(process, log)
    finally:
        children = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        process.terminate()  # powers it off
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        wait_until(lambda: all(map(is_over, children)), "the container to end", 30)


def _when_up(process: subprocess.Popen[bytes], log: Path) -> Booted:
    found: list[Booted] = []

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() in ("systemd", "init"):
                    system = Booted(child.pid, log)
                    said = system.run("systemctl", "is-system-running", is_checked=False).strip()
                    if said in ("running", "degraded"):
                        found.append(system)
                        return True
        return False

    wait_until(is_up, lambda: f"systemd to be up: {log.read_text()[-2000:]}", BOOT_S)
    return found[0]
