"""Hosts on one machine: network namespaces on a bridge that has a namespace of its own. Root only.

Each host has its own addresses, hostname, IPC and empty /dev/shm; a process that holds its
namespaces ends with the test. Links are cut, cut one way, made lossy or slow, and healed. Nothing
is set up in the machine's own network namespace; everything is named by a prefix that tells the
test's pid, and is removed by it, also what a killed test left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support.node import is_over, wait_until
from tests.support.sources import ROOT

PREFIX = "msdt"
NET4 = "198.18.0."
NET6 = "fd00:5d::"
PROGRAMS = ("ip", "nft", "nsenter", "unshare")
BRIDGE = "br0"


def needs_hosts() -> str:
    """Return why this machine can't play several; empty where it can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not installed (apt-get install iproute2 nftables util-linux)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if not probe.returncode else "this machine forbids network namespaces"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


@dataclass
class Host:
    """One host: run what belongs there by `command`."""

    name: str
    netns: str
    number: int
    _switch: str
    _holder: subprocess.Popen[bytes] | None = None
    _cable: subprocess.Popen[bytes] | None = None
    _blocked: set[str] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"{NET4}{10 + self.number}"

    @property
    def address6(self) -> str:
        return f"{NET6}{10 + self.number}"

    @property
    def port(self) -> str:
        """The switch's end of this host's cable."""
        return f"p{self.number}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that executes another in its own place, on this host, from the project's root."""
        assert self._holder is not None
        enter = ("nsenter", "-t", str(self._holder.pid), "--net", "--uts", "--ipc", "--mount")
        return (*enter, "--", "env", "-C", str(ROOT))

    def run(self, *command: str) -> str:
        """Run a command here to its end; return what it printed."""
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, check=False)
        assert not done.returncode, f"{self.name}: {' '.join(command)}: {done.stderr}"
        return done.stdout

    def shared_memory(self) -> list[str]:
        """Return what lies in this host's /dev/shm."""
        assert self._holder is not None
        return os.listdir(f"/proc/{self._holder.pid}/root/dev/shm")

    # -- its link ----------------------------------------------------------------------------------

    def cut(self) -> None:
        """Pull the cable out, at the switch: this host's own end goes down with it."""
        _ip("-n", self._switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        """Plug it in again, let everything in again."""
        _ip("-n", self._switch, "link", "set", self.port, "up")
        self._rules([])

    def block(self, *others: Host) -> None:
        """Take in nothing more that these send; what goes to them still goes."""
        self._rules(
            [
                f"{family} saddr {address} drop"
                for other in others
                for family, address in (("ip", other.address), ("ip6", other.address6))
            ]
        )

    def lose(self, percent: int) -> None:
        """Drop a share of all packets that come in."""
        self._rules([f"numgen random mod 100 < {percent} drop"])

    def _rules(self, rules: Sequence[str]) -> None:
        lines = ["add table inet msd", "delete table inet msd", "table inet msd {"]
        lines += [
            "chain input { type filter hook input priority 0; policy accept;",
            *rules,
            "}",
            "}",
        ]
        self.run("nft", "\n".join(lines))

    def slow_down(self, delay_s: float, loss: float) -> None:
        """Let every packet take so long each way, and lose a share of them; needs a slow cable."""
        assert self._cable is not None and self._cable.stdin is not None
        self._cable.stdin.write(f"{delay_s} {loss}\n".encode())
        self._cable.stdin.flush()

    # -- its life ----------------------------------------------------------------------------------

    def _set_up(self, *, is_slow: bool) -> None:
        near = f"q{self.number}" if is_slow else self.port
        _ip("netns", "add", self.netns)
        _ip("-n", self._switch, "link", "add", near, "type", "veth",
            "peer", "name", "eth0", "netns", self.netns)  # fmt: skip
        if is_slow:
            far = f"r{self.number}"
            _ip("-n", self._switch, "link", "add", self.port, "type", "veth", "peer", "name", far)
            for name in (near, far):
                _ip("-n", self._switch, "link", "set", name, "up")
        _ip("-n", self._switch, "link", "set", self.port, "master", BRIDGE, "up")
        own = ("-n", self.netns)
        _ip(*own, "link", "set", "lo", "up")
        _ip(*own, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip(*own, "addr", "add", f"{self.address6}/64", "dev", "eth0", "nodad")
        _ip(*own, "link", "set", "eth0", "up")
        script = f"hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && echo up && exec cat"
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.netns,
             "unshare", "--uts", "--ipc", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        if is_slow:
            self._cable = subprocess.Popen(
                ["ip", "netns", "exec", self._switch,
                 sys.executable, "-m", "tests.support.slow_cable", near, f"r{self.number}"],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert self._cable.stdout is not None
            assert self._cable.stdout.readline() == b"up\n"

    def processes(self) -> list[psutil.Process]:
        """Return what runs on this host, its holder left out."""
        own = os.stat(f"/run/netns/{self.netns}").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                mine = os.stat(f"/proc/{process.pid}/ns/net").st_ino == own
                if mine and (self._holder is None or process.pid != self._holder.pid):
                    found.append(process)
        return found

    def die(self) -> None:
        """Lose power: whatever runs here ends at once, and the cable is dead."""
        self.cut()
        running = self.processes()
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: all(map(is_over, running)), f"{running} to end")

    def _tear_down(self) -> None:
        for process in (self._cable, self._holder):
            if process is not None:
                process.kill()
                process.communicate()
        subprocess.run(["ip", "netns", "del", self.netns], check=False, capture_output=True)


@dataclass
class Network:
    """The hosts by number, and their switch."""

    hosts: list[Host]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def heal(self) -> None:
        for host in self.hosts:
            host.heal()


def _forget(prefix: str) -> None:
    """Remove what a test that was killed left: its namespaces, and with them its links."""
    for path in Path("/run/netns").glob(f"{prefix}*"):
        subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


def _forget_dead() -> None:
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


@contextlib.contextmanager
def hosts(*names: str, slow: Sequence[str] = ()) -> Iterator[Network]:
    """Set up hosts of these names; skip the test where the machine can't.

    Args:
        names: Hostnames.
        slow: Those with a cable that can be made slow (it is a process: tests.support.slow_cable).
    """
    reason = needs_hosts()
    if reason:
        pytest.skip(reason)
    _forget_dead()
    prefix = f"{PREFIX}{os.getpid()}-"
    switch = f"{prefix}sw"
    network = Network(
        [Host(name, f"{prefix}{name}", number, switch) for number, name in enumerate(names)]
    )
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _ip("-n", switch, "link", "set", BRIDGE, "up")
        for host in network.hosts:
            host._set_up(is_slow=host.name in slow)
        yield network
        left = {host.name: names for host in network.hosts if (names := host.shared_memory())}
        assert not left, f"left in /dev/shm: {left}"
    finally:
        for host in network.hosts:
            host._tear_down()
        _forget(prefix)
