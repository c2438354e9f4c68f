"""`msdctl man`: the manual, and what completes command lines."""

from __future__ import annotations

from importlib import metadata

import click

from msd_client.msdctl.manual import markdown, roff


@click.command(name="man", short_help="Print the manual page.")
@click.option("--markdown", "as_markdown", is_flag=True, help="As Markdown, for a site.")
def command(as_markdown: bool) -> None:
    """Print the manual as a page for man(1), made from the verbs' own texts.

    \b
    msdctl man | man -l -
    msdctl man > ~/.local/share/man/man1/msdctl.1
    """  # noqa: D301 - \b is for click
    from msd_client.msdctl.verbs import VerbGroup

    group = VerbGroup(name="msdctl")
    if as_markdown:
        click.echo(markdown(group), nl=False)
    else:
        click.echo(roff(group, metadata.version("msd")), nl=False)
