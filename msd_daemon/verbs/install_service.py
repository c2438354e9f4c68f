"""`msdctl install-service`: the daemon or the planner as a service of systemd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import click

from msd_client.contract.errors import ConfigError, PermissionDeniedError, ResourceError
from msd_client.msdctl.output import json_option, print_json, say
from msd_client.msdctl.whole_file import write_whole
from msd_daemon.install.service_plan import (
    SERVICES,
    ServiceFile,
    ServicePlan,
    system_plan,
    user_plan,
)
from msd_daemon.install.shipped import shipped_file


@click.command(name="install-service", short_help="Run the daemon or planner under systemd.")
@click.argument("services", nargs=-1, type=click.Choice(SERVICES))
@click.option("--user", "is_user", is_flag=True, help="For this user; needs no root.")
@click.option(
    "--root", type=click.Path(path_type=Path, file_okay=False), default=Path("/"),
    help="Install into this folder (an image), and run nothing.",
)  # fmt: skip
@click.option(
    "--binaries", type=click.Path(path_type=PurePosixPath),
    help="Folder of msd-daemon and msd-planner; default: of this msdctl.",
)  # fmt: skip
@click.option(
    "--many-users", is_flag=True, help="Let the daemon read for others, with their own rights."
)
@click.option("--now", "starts", is_flag=True, help="Enable and start them as well.")
@click.option("--dry-run", is_flag=True, help="Show what would be written and run.")
@click.option("--remove", is_flag=True, help="Stop them and take the units away; state stays.")
@json_option
def command(
    services: tuple[str, ...],
    is_user: bool,
    root: Path,
    binaries: PurePosixPath | None,
    many_users: bool,
    starts: bool,
    dry_run: bool,
    remove: bool,
    as_json: bool,
) -> None:
    """Make services of systemd out of the daemon (default) or of SERVICES.

    Writes units, the user msd, its folders and a first daemon.toml; a configuration that is there
    stays as it is. With --now they are enabled and started.
    """
    if many_users and (is_user or (services and "daemon" not in services)):
        raise click.UsageError("--many-users is for the daemon as a system service")
    if starts and root != Path("/"):
        raise click.UsageError(
            "--now starts services of this machine, and --root installs into an image: give one of them"
        )
    chosen = services or ("daemon",)
    plan = _plan(chosen, is_user, binaries or _own_binaries(), starts, many_users)
    written: list[str] = []
    ran: list[str] = []
    if remove:
        _remove(plan, root, is_user, dry_run, written, ran)
    else:
        _install(plan, root, dry_run, written, ran)
    if as_json:
        did = "removed" if remove else "written"
        print_json("install_service", {did: written, "ran": ran, "units": list(plan.units)})
        return
    for path in written:
        click.echo(f"{'would ' if dry_run else ''}{'remove' if remove else 'write'} {path}")
    for line in ran:
        click.echo(f"{'would ' if dry_run else ''}run {line}")
    if not (starts or remove or dry_run):
        scope = " --user" if is_user else ""
        say(f"start with: systemctl{scope} enable --now {' '.join(plan.units)}")


def _plan(
    services: tuple[str, ...],
    is_user: bool,
    binaries: PurePosixPath,
    starts: bool,
    many_users: bool,
) -> ServicePlan:
    from msd_daemon.config.toml_page import daemon_toml, planner_toml

    configurations = {"daemon": daemon_toml(), "planner": planner_toml()}

    def read(name: str) -> str:
        return shipped_file(name).read_text(encoding="utf-8")

    chosen = tuple(dict.fromkeys(services))
    try:
        if not is_user:
            return system_plan(
                chosen, binaries, read, configurations, starts=starts, many_users=many_users
            )
        home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        return user_plan(chosen, binaries, read, configurations, PurePosixPath(home), starts=starts)
    except ValueError as error:
        raise ConfigError(
            f"--binaries {error}: install msd into such a folder, for example /opt/msd"
        ) from error


def _own_binaries() -> PurePosixPath:
    """Return the folder of the programs that belong to this interpreter."""
    beside = Path(sys.executable).parent
    if (beside / "msd-daemon").is_file():
        return PurePosixPath(beside)
    found = shutil.which("msd-daemon")
    if found is None:
        raise ConfigError(
            "no msd-daemon beside this Python or on PATH: pip install 'msd[daemon]', or give --binaries"
        )
    return PurePosixPath(Path(found).parent)


def _install(
    plan: ServicePlan, root: Path, dry_run: bool, written: list[str], ran: list[str]
) -> None:
    for file in plan.files:
        target = _below(root, file.path)
        if file.keeps_existing and target.exists():
            continue
        written.append(str(target))
        if not dry_run:
            _write(target, file)
    if root != Path("/"):
        return
    for command_line in plan.commands:
        ran.append(" ".join(command_line))
        if not dry_run:
            _run(command_line)


def _remove(
    plan: ServicePlan, root: Path, is_user: bool, dry_run: bool, removed: list[str], ran: list[str]
) -> None:
    manager = ("systemctl", "--user") if is_user else ("systemctl",)
    is_here = root == Path("/")
    if is_here:
        ran.append(" ".join((*manager, "disable", "--now", *plan.units)))
        if not dry_run:
            _run((*manager, "disable", "--now", *plan.units))
    for file in plan.files:
        target = _below(root, file.path)
        is_drop_in = file.path.parent.name in {f"{unit}.d" for unit in plan.units}
        if not (is_drop_in or file.path.name in plan.units) or not target.exists():
            continue
        removed.append(str(target))
        if not dry_run:
            target.unlink()
    if is_here:
        ran.append(" ".join((*manager, "daemon-reload")))
        if not dry_run:
            _run((*manager, "daemon-reload"))


def _below(root: Path, path: PurePosixPath) -> Path:
    return root / path.relative_to("/")


def _write(target: Path, file: ServiceFile) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, file.text.encode())
        target.chmod(file.mode)
    except PermissionError as error:
        raise PermissionDeniedError(
            f"{target} can't be written ({error.strerror}): become root (sudo msdctl install-service), "
            "or make services of your own user: msdctl install-service --user"
        ) from error


def _run(command_line: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ResourceError(
            f"{command_line[0]} is not here: this machine runs no systemd; start msd-daemon by your own "
            "supervisor, or install with --root into an image"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ResourceError(
            f"{' '.join(command_line)} failed ({done.returncode}): {said}: mend that and run "
            "msdctl install-service again"
        )
