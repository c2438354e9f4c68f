"""`msdctl completion`: what a shell needs to complete verbs, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MSDCTL_COMPLETE"


@click.command(name="completion", short_help="Print what completes command lines in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the script by which SHELL completes msdctl's verbs and options.

    \b
    bash: msdctl completion bash > ~/.local/share/bash-completion/completions/msdctl
    zsh:  msdctl completion zsh > "${fpath[1]}/_msdctl"
    fish: msdctl completion fish > ~/.config/fish/completions/msdctl.fish
    """  # noqa: D301 - \b is for click
    from msd_client.msdctl.verbs import VerbGroup

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(VerbGroup(name="msdctl"), {}, "msdctl", VARIABLE).source())
