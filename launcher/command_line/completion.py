"""`dslaunch completion`: the lines that make a shell complete options, commands, values, hosts and jobs."""

from __future__ import annotations

from typing import Any

import click

from .completion_bash import bash_script
from .completion_fish import fish_script
from .completion_hosts import completed_hosts
from .completion_jobs import completed_jobs
from .completion_places import places
from .completion_zsh import zsh_script
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand

EPILOG = """
\b
Put one of these lines into the file that your shell reads at its start:
  ~/.bashrc                    eval "$(dslaunch completion bash)"
  ~/.zshrc, behind compinit    eval "$(dslaunch completion zsh)"
  ~/.config/fish/config.fish   dslaunch completion fish | source

Behind --include and --exclude the hosts are completed that the --hostfile on the same line names, else those
of the default one. For that the lines call `dslaunch completion hosts VALUE WORDS`: VALUE is what there is of
the value, and WORDS are the words before it. The names of jobs come from `dslaunch completion jobs VALUE`.
"""
_SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=PROGRAM_SETTINGS)
@click.argument("shell", type=click.Choice([*_SCRIPTS, "hosts", "jobs"]), metavar="SHELL")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="")
def command(**given: Any) -> int:
    """Print what makes SHELL complete the options, commands, values, hosts and jobs of dslaunch: bash, zsh
    or fish.
    """
    shell: str = given["shell"]
    words: tuple[str, ...] = given["words"]
    if shell == "hosts":
        for one in completed_hosts(words[0] if words else "", words[1:]):
            click.echo(one)
        return 0
    if shell == "jobs":
        for one in completed_jobs(words[0] if words else ""):
            click.echo(one)
        return 0
    if words:
        raise click.UsageError(f"{shell} takes no more words; write: dslaunch completion {shell}")
    click.echo(_SCRIPTS[shell](places()))
    return 0
