"""The verbs of `msdctl` and where they live; each module is imported when its verb is called.

Verbs that need sources or planning are installed by `msd_daemon` under the entry point group
`msd.verbs`; this side imports nothing of the daemon.
"""

from __future__ import annotations

import importlib
from importlib import metadata

import click

ENTRY_POINT_GROUP = "msd.verbs"

BUILT_IN = {
    "bad": "msd_client.msdctl.bad",
    "cluster": "msd_client.msdctl.cluster",
    "completion": "msd_client.msdctl.completion",
    "demo": "msd_client.msdctl.demo",
    "doctor": "msd_client.msdctl.doctor",
    "drain": "msd_client.msdctl.drain",
    "jobs": "msd_client.msdctl.jobs",
    "man": "msd_client.msdctl.man",
    "mix": "msd_client.msdctl.mix",
    "mixture": "msd_client.msdctl.mixture",
    "report": "msd_client.msdctl.report",
    "reload": "msd_client.msdctl.reload",
    "rewind": "msd_client.msdctl.rewind",
    "scale": "msd_client.msdctl.scale",
    "skip": "msd_client.msdctl.skip",
    "status": "msd_client.msdctl.status",
    "stop": "msd_client.msdctl.stop",
    "submit": "msd_client.msdctl.submit",
    "top": "msd_client.msdctl.top",
    "trace": "msd_client.msdctl.trace",
    "why": "msd_client.msdctl.why",
}
"""Verb to module; the module holds a click command named `command`."""


class VerbGroup(click.Group):
    """Click group whose commands are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(BUILT_IN | _installed())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        try:
            if cmd_name in BUILT_IN:
                found = importlib.import_module(BUILT_IN[cmd_name]).command
            elif cmd_name in (installed := _installed()):
                found = installed[cmd_name].load()
            else:
                return None
        except ImportError as error:
            return _unavailable(cmd_name, error)
        if not isinstance(found, click.Command):
            raise click.ClickException(f"verb {cmd_name} is not a click command: {found!r}")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"no verb {args[0]!r}; known: {', '.join(known)}", ctx)
        return super().resolve_command(ctx, args)


def _unavailable(verb: str, error: ImportError) -> click.Command:
    """Return a command that says which library is missing; the other verbs work without it."""

    def refuse(**_: object) -> None:
        raise click.ClickException(
            f"{verb} can't be loaded: {error}; on a node that runs msd-daemon: "
            "pip install 'msd[daemon]'"
        )

    return click.Command(
        verb,
        callback=refuse,
        short_help=f"(not available: {error})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _installed() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
