"""`dslaunch completion`: the lines that make a shell complete options, commands, values, hosts and jobs."""

from __future__ import annotations

from typing import Any

import click

from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Put one of these lines into the file that your shell reads at its start:
  ~/.bashrc                    eval "$(dslaunch completion bash)"
  ~/.zshrc, behind compinit    eval "$(dslaunch completion zsh)"
  ~/.config/fish/config.fish   dslaunch completion fish | source

At each press of the key the lines ask dslaunch itself what may stand there. Behind --include and --exclude
that are the hosts of the --hostfile on the same line, else those of the default one.
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def command(**given: Any) -> int:
    """Print what makes SHELL complete the options, commands, values, hosts and jobs of dslaunch: bash, zsh
    or fish.
    """
    from .completer import lines_for

    click.echo(lines_for(given["shell"]), nl=False)
    return 0
