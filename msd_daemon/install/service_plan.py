"""Which files make a service of msd, with their contents, and the commands behind them. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

BINARIES = "/opt/msd/bin/"
"""In the units as they are shipped."""
SERVICES = ("daemon", "planner")
MANY_USERS = """# The daemon reads for each user with his own rights: it becomes him where it opens his files.
[Service]
CapabilityBoundingSet=CAP_SETUID CAP_SETGID CAP_KILL
AmbientCapabilities=CAP_SETUID CAP_SETGID CAP_KILL
"""
MANY_USERS_FILE = "msd-daemon.service.d/many-users.conf"


@dataclass(frozen=True)
class ServiceFile:
    """One file of a service."""

    path: PurePosixPath
    """Absolute, below the root that is installed to."""
    text: str
    mode: int = 0o644
    keeps_existing: bool = False
    """A file that people edit: one that is there stays."""


@dataclass(frozen=True)
class ServicePlan:
    """What an installation does, in order."""

    files: tuple[ServiceFile, ...]
    commands: tuple[tuple[str, ...], ...]
    """Run behind the files, on this machine alone."""
    units: tuple[str, ...]


def system_plan(
    services: Sequence[str],
    binaries: PurePosixPath,
    read: Callable[[str], str],
    configurations: Mapping[str, str],
    *,
    starts: bool,
    many_users: bool = False,
) -> ServicePlan:
    """Return what makes system services.

    Args:
        services: Of SERVICES.
        binaries: Folder of `msd-daemon` and `msd-planner`.
        read: Returns the text of a shipped file.
        configurations: First text of `daemon.toml` and `planner.toml`, by service.
        starts: Enable and start them.
        many_users: Let the daemon read for users other than its own.
    """
    units = tuple(f"msd-{service}.service" for service in services)
    etc = PurePosixPath("/etc")
    files = [
        ServiceFile(etc / "sysusers.d/msd.conf", read("systemd/sysusers.d/msd.conf")),
        ServiceFile(etc / "tmpfiles.d/msd.conf", read("systemd/tmpfiles.d/msd.conf")),
    ]
    files += [
        ServiceFile(etc / "systemd/system" / unit, placed(read(f"systemd/{unit}"), binaries))
        for unit in units
    ]
    if many_users:
        files.append(ServiceFile(etc / "systemd/system" / MANY_USERS_FILE, MANY_USERS))
    files += _configurations(etc / "msd", services, configurations)
    commands: list[tuple[str, ...]] = [
        ("systemd-sysusers", "/etc/sysusers.d/msd.conf"),
        ("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/msd.conf"),
        ("systemctl", "daemon-reload"),
    ]
    if starts:
        commands.append(("systemctl", "enable", "--now", *units))
    return ServicePlan(tuple(files), tuple(commands), units)


def user_plan(
    services: Sequence[str],
    binaries: PurePosixPath,
    read: Callable[[str], str],
    configurations: Mapping[str, str],
    config_home: PurePosixPath,
    *,
    starts: bool,
) -> ServicePlan:
    """Return what makes services of one user; see `system_plan`.

    Args:
        services: Of SERVICES.
        binaries: Folder of the programs.
        read: Returns the text of a shipped file.
        configurations: By service.
        config_home: `$XDG_CONFIG_HOME`, mostly `~/.config`.
        starts: Enable and start them.
    """
    units = tuple(f"msd-{service}.service" for service in services)
    files = [
        ServiceFile(
            config_home / "systemd/user" / unit, placed(read(f"systemd/user/{unit}"), binaries)
        )
        for unit in units
    ]
    files += _configurations(config_home / "msd", services, configurations)
    commands: list[tuple[str, ...]] = [("systemctl", "--user", "daemon-reload")]
    if starts:
        commands.append(("systemctl", "--user", "enable", "--now", *units))
    return ServicePlan(tuple(files), tuple(commands), units)


def _configurations(
    folder: PurePosixPath, services: Sequence[str], configurations: Mapping[str, str]
) -> list[ServiceFile]:
    return [
        ServiceFile(folder / f"{service}.toml", configurations[service], keeps_existing=True)
        for service in services
    ]


def placed(unit: str, binaries: PurePosixPath) -> str:
    """Return a unit's text with the programs where they are.

    Raises:
        ValueError: The folder's name can't stand in a unit.
    """
    text = str(binaries)
    if not binaries.is_absolute() or shlex.quote(text) != text or "%" in text:
        raise ValueError(f"{text}: not an absolute path without spaces, quotes and %")
    return unit.replace(BINARIES, f"{text}/")
